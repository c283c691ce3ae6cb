"""A small Clover model whose weights are all away from their neutral values, and its jitted passes.

Compiling is what these tests cost, so every pass is jitted once a process for few fixed shapes.
"""

import functools
from typing import Any

import jax
import numpy as np

from clover_jax.config import ModelConfig
from clover_jax.env import Env
from clover_jax.model import transformer
from clover_jax.model.transformer import CleanInput, param_specs
from clover_jax.params import is_spec, path_name
from clover_jax.presets import clover_tiny

# (end of a leaf's name, mean, standard deviation); the first that fits counts.
NORMAL = (
    ("linear_attn.norm", 1.0, 0.3),
    ("norm", 0.0, 0.3),  # all others multiply by 1 + weight
    ("A_log", -1.5, 1.2),  # from heads that forget in a token to heads that hold all of them
    ("dt_bias", 0.0, 1.0),
    ("conv1d", 0.2, 0.4),
    ("conv_right_weight", 0.0, 0.3),
    ("bd_softmax_logit_scale", 1.5, 1.0),
    ("bd_softmax_history_bias", 0.0, 1.0),
    ("bd_softmax_history_c", 1.0, 0.3),
    ("embed_tokens", 0.0, 0.5),
    ("in_proj_a", 0.0, 0.1),
    ("in_proj_b", 0.0, 0.2),
    ("mlp.gate", 0.0, 0.4),
    ("out_proj", 0.0, 0.02),
    ("o_proj", 0.0, 0.03),
    ("down_proj", 0.0, 0.04),
    ("lm_head", 0.0, 0.12),
    ("", 0.0, 0.12),
)


def config(**changes: Any) -> ModelConfig:
    """One group: three GDN layers and one attention layer."""
    return clover_tiny().replace(num_layers=4, **changes)


def random_tree(specs: Any, seed: int = 0) -> Any:
    """Numpy values for a tree of specs."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, spec: Any) -> np.ndarray:
        name = path_name(path)
        mean, std = next((m, s) for end, m, s in NORMAL if name.endswith(end))
        return (mean + std * rng.normal(size=spec.shape)).astype(spec.dtype)

    return jax.tree_util.tree_map_with_path(draw, specs, is_leaf=is_spec)


@functools.cache
def random_params(cfg: ModelConfig, seed: int = 0) -> Any:
    """Random weights of a whole model."""
    return random_tree(param_specs(cfg), seed)


def random_tokens(cfg: ModelConfig, *shape: int, seed: int = 0) -> np.ndarray:
    """Token ids."""
    return np.random.default_rng(seed).integers(0, cfg.vocab_size, shape).astype(np.int32)


# Machine code that is not optimised compiles in half the time.
QUICK = {"xla_backend_optimization_level": 0}


@functools.cache
def jitted(name: str, cfg: ModelConfig, env: Env = Env(), **options: Any) -> Any:  # noqa: B008
    """`extend`, `preview`, ..., jitted; optimised where bits are compared."""
    if name != "next_token_logits":
        options["cfg"] = cfg
    function = functools.partial(getattr(transformer, name), env=env, **options)
    return jax.jit(function, compiler_options=None if env.rows == "mapped" else QUICK)


def extend(params: Any, pieces: list[np.ndarray], cache: Any, call: Any, time: int):
    """Commit pieces of tokens [rows, n] one after the other, each right-padded to `time`.

    Returns the logits of all tokens [rows, total, vocab] and the cache.
    """
    logits = []
    for piece in pieces:
        rows, n = piece.shape
        padded = np.zeros((rows, time), np.int32)
        padded[:, :n] = piece
        out = call(params, padded, np.full(rows, n, np.int32), cache)
        logits.append(np.asarray(out.logits[:, :n]))
        cache = out.cache
    return np.concatenate(logits, axis=1), cache


def clean_input(tokens: np.ndarray, n_valid: list[int]) -> CleanInput:
    """Tokens of a causal pass."""
    return CleanInput(tokens, np.array(n_valid, np.int32))


def committed(cache: Any) -> dict[str, np.ndarray]:
    """What a cache holds: its arrays by name, cells past a row's length zeroed."""
    arrays = {name: np.asarray(a) for name, a in cache._asdict().items()}
    used = np.arange(arrays["k"].shape[3])[None] < arrays["length"][:, None]
    for name in ("k", "v"):
        arrays[name] = np.where(used[None, :, None, :, None], arrays[name], 0)
    return arrays


def assert_same_bits(got: Any, want: Any, rows: Any = slice(None), want_rows: Any = None) -> None:
    """Two caches hold the same bits in these rows."""
    want_rows = rows if want_rows is None else want_rows
    got, want = committed(got), committed(want)
    axis = {"k": 1, "v": 1, "state": 2, "ring": 2, "hidden": 0, "length": 0}
    for name in got:
        a, b = (np.moveaxis(x[name], axis[name], 0) for x in (got, want))
        np.testing.assert_array_equal(a[rows], b[want_rows], err_msg=name)
