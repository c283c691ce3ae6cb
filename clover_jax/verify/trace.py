"""Traces: the inner tensors of a pass by name, as a safetensors file.

The names are those that `oracles/hf_trace.py` documents; whoever writes them can be compared.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import load_file, save_file

from clover_jax.errors import CloverError
from clover_jax.files import whole_file

type Tensors = dict[str, Any]  # arrays by name


def read_trace(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors of a trace and what its writer says about itself.

    Raises:
        CloverError: the file cannot be read, or holds no `ids`.
    """
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
        tensors = load_file(path)
        versions = json.loads(metadata.get("versions", "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise CloverError(f"{path} cannot be read as a trace: {error}") from None
    ids = tensors.get("ids")
    if ids is None or ids.ndim != 2:
        shape = "missing" if ids is None else f"of shape {tuple(ids.shape)}"
        raise CloverError(f"{path}: ids are {shape}: expected int32 [rows, time]")
    return tensors, versions if isinstance(versions, dict) else {}


def write_trace(path: Path, tensors: Tensors, versions: dict[str, Any]) -> None:
    """Writes all or nothing."""
    arrays = {name: jax.numpy.asarray(tensor) for name, tensor in tensors.items()}
    try:
        with whole_file(path) as building:
            save_file(arrays, building, metadata={"versions": json.dumps(versions)})
            building.chmod(0o644)  # the writer leaves it private
    except SafetensorError as error:
        raise CloverError(f"{path} cannot be written: {error}") from None


def as_float(tensor: Any) -> np.ndarray:
    """On the host, in float64."""
    return np.asarray(jax.device_get(tensor)).astype(np.float64)
