"""llama.cpp as the other side: logits of the exported causal trunk, from the `inferna` wheel."""

import importlib.metadata
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clover_jax.checkpoint.gguf_export import export_gguf
from clover_jax.checkpoint.report import NormStorage
from clover_jax.errors import CloverError
from clover_jax.verify.trace import Tensors

THREADS = 2


class LlamaContext:
    """A GGUF file loaded for one sequence; tokens are read after those read before."""

    def __init__(self, path: Path, *, capacity: int, threads: int) -> None:
        """Flash attention is off and the KV cache float32: both defaults round to float16.

        Raises:
            CloverError: there is no wheel, or llama.cpp cannot load the file.
        """
        try:
            from inferna.llama import _llama_native as native
        except ImportError:
            raise CloverError(
                "llama.cpp needs the wheel inferna: install clover-jax with its extra `verify`"
            ) from None
        native.set_log_callback(lambda *_: None)
        native.llama_backend_init()
        native.ggml_backend_load_all()
        try:
            model = native.LlamaModel(
                path_model=str(path), params=native.LlamaModelParams(), verbose=False
            )
        except ValueError as error:
            raise CloverError(f"llama.cpp cannot load this model: {error}") from None
        settings = native.LlamaContextParams()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = max(512, capacity)
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = native.GGML_TYPE_F32
        settings.flash_attn_type = int(native.LLAMA_FLASH_ATTN_TYPE_DISABLED)
        self._native = native
        self._context = native.LlamaContext(model, settings, False)
        self._length = 0

    def clear(self) -> None:
        """Forget every token."""
        self._context.kv_cache_clear(True)
        self._length = 0

    def read(self, ids: list[int], wanted: Sequence[int]) -> np.ndarray:
        """One pass over the ids; the causal logits after the wanted ones, [wanted, vocab].

        Raises:
            CloverError: llama.cpp cannot read the tokens.
        """
        batch = self._native.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
        keep = set(wanted)
        for i, token in enumerate(ids):
            batch.add(token, self._length + i, [0], i in keep)
        status = self._context.decode(batch)
        if status:
            raise CloverError(f"llama.cpp cannot read the {len(ids)} tokens: status {status}")
        self._length += len(ids)
        return np.stack([np.array(self._context.get_logits_ith(i)) for i in wanted])


def llama_logits(path: Path, ids: list[int], first: int = 0) -> np.ndarray:
    """Causal logits of a GGUF file after each of the ids from `first` on, [positions, vocab].

    Raises:
        CloverError: there is no wheel, or llama.cpp cannot load the file or read the tokens.
    """
    context = LlamaContext(path, capacity=len(ids), threads=THREADS)
    return context.read(ids, range(first, len(ids)))


def llama_trace(
    folder: Path,
    ids: np.ndarray,
    *,
    type: Literal["f32", "bf16", "q8_0"],
    norms: NormStorage | None,
    first: int = 0,
) -> tuple[Tensors, dict[str, Any]]:
    """The logits of rows of ids as a trace, by way of a GGUF file that is removed again."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.gguf"
        export_gguf(folder, path, type=type, norms=norms)
        logits = np.stack([llama_logits(path, row.tolist(), first) for row in ids])
    versions = {
        "oracle": "llama.cpp",
        "inferna": importlib.metadata.version("inferna"),
        "gguf": importlib.metadata.version("gguf"),
        "type": type,
    }
    return {"ids": ids.astype(np.int32), "logits": logits}, versions
