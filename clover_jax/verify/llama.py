"""llama.cpp as the other side: logits of the exported causal trunk, from the `inferna` wheel."""

import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clover_jax.checkpoint.gguf_export import export_gguf
from clover_jax.checkpoint.report import NormStorage
from clover_jax.errors import CloverError
from clover_jax.verify.trace import Tensors

THREADS = 2


def llama_logits(path: Path, ids: list[int], first: int = 0) -> np.ndarray:
    """Causal logits of a GGUF file after each of the ids from `first` on, [positions, vocab].

    Flash attention is off and the KV cache float32: both defaults round to float16.

    Raises:
        CloverError: there is no wheel, or llama.cpp cannot read the file or the tokens.
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
    model = native.LlamaModel(
        path_model=str(path), params=native.LlamaModelParams(), verbose=False
    )  # fmt: skip
    settings = native.LlamaContextParams()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = max(512, len(ids))
    settings.n_threads = settings.n_threads_batch = THREADS
    settings.type_k = settings.type_v = native.GGML_TYPE_F32
    settings.flash_attn_type = int(native.LLAMA_FLASH_ATTN_TYPE_DISABLED)
    context = native.LlamaContext(model, settings, False)
    batch = native.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    for position, token in enumerate(ids):
        batch.add(token, position, [0], position >= first)
    status = context.decode(batch)
    if status:
        raise CloverError(f"llama.cpp cannot read the {len(ids)} tokens: status {status}")
    return np.stack([np.array(context.get_logits_ith(i)) for i in range(first, len(ids))])


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
