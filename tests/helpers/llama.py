"""llama.cpp as an oracle: logits of a GGUF file in float32, from the `inferna` wheel."""

from pathlib import Path

import numpy as np
import pytest


def llama_logits(path: Path, ids: list[int]) -> np.ndarray:
    """Causal logits after each of the ids, [ids, vocab]; skips the test where there is no wheel.

    Flash attention is off and the KV cache float32: both defaults round to float16.
    """
    native = pytest.importorskip("inferna.llama._llama_native")
    native.set_log_callback(lambda *_: None)
    native.llama_backend_init()
    native.ggml_backend_load_all()
    model = native.LlamaModel(
        path_model=str(path), params=native.LlamaModelParams(), verbose=False
    )  # fmt: skip
    settings = native.LlamaContextParams()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = max(512, len(ids))
    settings.n_threads = settings.n_threads_batch = 2
    settings.type_k = settings.type_v = native.GGML_TYPE_F32
    settings.flash_attn_type = int(native.LLAMA_FLASH_ATTN_TYPE_DISABLED)
    context = native.LlamaContext(model, settings, False)
    batch = native.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    for position, token in enumerate(ids):
        batch.add(token, position, [0], True)
    assert context.decode(batch) == 0
    return np.stack([np.array(context.get_logits_ith(i)) for i in range(len(ids))])
