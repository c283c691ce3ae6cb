"""Causal and preview logits of whole small models against the numpy oracle."""

import functools

import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.config import BDGDNConfig, CoresetConfig
from tests.helpers.limits import assert_close
from tests.model.oracle import Row
from tests.model.small import config, jitted, random_params, random_tokens

PREFIX, BLOCK = 13, 8
CONFIGS = {
    "clover": config(),
    "pruned, tied, shifted, all mass, rivals of the operator": config(
        tie_word_embeddings=True,
        logits_position="shifted",
        bd_gdn=BDGDNConfig(operator="added", block_bias="decay", right_order="next_last"),
        **{
            "moe.experts_per_layer": (8, 5, 3, 4),
            "moe.norm_topk_prob": False,
            "moe.coreset": CoresetConfig(top_p=0.7, mass="softmax", pool="max"),
        },
    ),
}
N_PREFIX = np.array([PREFIX, 0], np.int32)  # one row starts at an empty prefix
N_VALID = np.array([BLOCK, 5], np.int32)
every_config = pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)


@functools.cache
def both(cfg):
    """Ours: (causal pass, preview logits, statistics); the oracle's (causal, previews, rows)."""
    params = random_params(cfg)
    prefix, block = random_tokens(cfg, 2, 16), random_tokens(cfg, 2, BLOCK, seed=1)
    masked = np.random.default_rng(2).random((2, BLOCK)) < 0.6
    out = jitted("extend", cfg, logits="all")(params, prefix, N_PREFIX, empty_cache(cfg, 2, 64))
    logits, stats = jitted("preview", cfg)(params, block, masked, N_VALID, out.cache)
    counts = cfg.moe.experts_per_layer
    rows = [Row(params, cfg, counts and [list(range(n)) for n in counts]) for _ in range(2)]
    causal = rows[0].extend(prefix[0, :PREFIX])
    want = [row.preview(block[r], masked[r], N_VALID[r]) for r, row in enumerate(rows)]
    assert min(row.margin for row in rows) > 1e-4, "a near-tie: choose other weights"
    return (out, logits, stats), (causal, want, rows)


@every_config
def test_causal_logits(cfg):
    (out, _, _), (causal, _, _) = both(cfg)
    assert_close("logits", "causal", out.logits[0, :PREFIX], causal)


@every_config
def test_what_a_prefix_leaves_behind(cfg):
    (out, _, _), (_, _, rows) = both(cfg)
    row, attention = rows[0], cfg.num_layers - 1
    for i in range(attention):
        assert_close("hidden", f"state of layer {i}", out.cache.state[0, i, 0], row.state[i])
        assert_close("hidden", f"ring of layer {i}", out.cache.ring[0, i, 0], row.ring[i])
    for name, cells in (("k", row.keys), ("v", row.values)):
        got = getattr(out.cache, name)[0, 0, :, :PREFIX]
        assert_close("hidden", name, got, np.stack(cells[attention], axis=1))


@every_config
@pytest.mark.parametrize("row", (0, 1), ids=("after a prefix", "at an empty prefix, 5 of 8 valid"))
def test_preview_logits(cfg, row):
    (_, logits, stats), (causal, want, _) = both(cfg)
    n, (of_rows, touched) = N_VALID[row], want[row]
    if cfg.logits_position == "shifted":
        first = causal[-1:] if row == 0 else np.zeros_like(causal[:1])
        of_rows = np.concatenate([first, of_rows[:-1]])
    assert_close("logits", "preview", logits[row, :n], of_rows)
    for layer, experts in enumerate(touched):
        got = np.flatnonzero(stats.router.touched[layer, row])
        assert set(got) == experts, f"layer {layer}"
