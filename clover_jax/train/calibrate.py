"""Fit the block operator's three scalars per head before conversion.

A convex mix of a state read and block values cannot reproduce the delta rule exactly, so training
would start from a damaged model. Calibration regresses, over blocks of 1 to 32 valid positions and
half of them partly masked, each GDN layer's block values on its causal values at the same
positions, both after the gated norm's normalisation.
"""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from clover_jax.config import ModelConfig
from clover_jax.diffusion.corrupt import Batch, streams
from clover_jax.env import Env
from clover_jax.model.norm import normalise
from clover_jax.model.stack import Groups
from clover_jax.model.transformer import Params, forward

MEASURED = 8  # batches
SCALARS = ("bd_softmax_logit_scale", "bd_softmax_history_bias", "bd_softmax_history_c")


class Residuals(NamedTuple):
    """Mean squared residual per GDN layer and number of valid positions.

    Both sides are normalised to mean square 1, so 0 is equal and 2 is unrelated. NaN: no block of
    that length among the measured batches.
    """

    lengths: tuple[int, ...]
    before: np.ndarray  # [linear_layers, lengths]
    after: np.ndarray

    def to_json(self) -> str:
        """{"lengths": [...], "before": [[...]], "after": [[...]]}; null where nothing was seen."""
        table = lambda a: [[None if np.isnan(x) else round(float(x), 6) for x in row] for row in a]
        return json.dumps(
            {
                "lengths": self.lengths,
                "before": table(self.before),
                "after": table(self.after),
            }
        )


def block_lengths(block: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the block length."""
    return tuple(2**i for i in range(block.bit_length())) if block > 1 else (1,)


def vary_blocks(batch: Batch, step: int, block: int) -> Batch:
    """The batch with other valid lengths per block, every second one without masks.

    Blocks show the clean tokens that follow their boundary, whatever the noise had put there
    (shorter blocks, substitutes): these are the positions of the causal values.
    """
    lengths = np.asarray(block_lengths(block), np.int32)
    draw = np.random.default_rng([step])
    n = draw.choice(lengths, batch.block_n_valid.shape).astype(np.int32)
    masked = batch.block_masked & (draw.random(n.shape) < 0.5)[..., None]
    # A block may not reach past its sample: its causal values would not exist.
    room = _ends(batch) - batch.block_index
    n = np.where((batch.block_n_valid > 0) & (n <= room), n, 0)
    at = np.asarray(batch.block_index)[..., None] + np.arange(block)
    at = np.minimum(at, batch.tokens.shape[1] - 1)
    rows = np.arange(len(batch.tokens))[:, None, None]
    tokens = np.asarray(batch.tokens)[rows, at]
    return batch._replace(
        block_n_valid=n, block_masked=masked, block_tokens=tokens, block_shown=tokens
    )


def _ends(batch: Batch) -> np.ndarray:
    """The column past the last token of each block's sample, [rows, 1 or blocks]."""
    n = np.asarray(batch.n_valid)[:, None]
    if batch.start is None:
        return n
    exists = np.arange(batch.start.shape[1]) < n
    own = (batch.start[:, None] == batch.block_start[..., None]) & exists[:, None]
    return batch.block_start + own.sum(-1)


def residual(
    scalars: dict[str, Array], params: Params, batch: Batch, *, cfg: ModelConfig, env: Env
) -> tuple[Float[Array, ""], Float[Array, "2 layers lengths"]]:
    """Mean residual; and per GDN layer and valid length the sum of residuals and their number."""
    params = with_scalars(params, scalars)
    clean, noisy = streams(batch)
    out = forward(params, clean, noisy, None, cfg=cfg, env=env, taps=True)
    taps: Any = out.taps
    at = batch.block_index[..., None] + jnp.arange(cfg.block_length, dtype=jnp.int32)[None, None]
    at = jnp.minimum(at, batch.tokens.shape[1] - 1).reshape(at.shape[0], -1)
    causal = jnp.take_along_axis(taps.causal, at[None, :, :, None, None], axis=2)
    causal = causal.reshape(taps.block.shape)
    scaled = lambda x: normalise(x, eps=cfg.rms_norm_eps)
    error = jnp.mean(
        (scaled(taps.block) - jax.lax.stop_gradient(scaled(causal))) ** 2, axis=(-2, -1)
    )
    position = jnp.arange(cfg.block_length, dtype=jnp.int32)
    valid = position[None, None] < batch.block_n_valid[..., None]
    error = jnp.where(valid[None], error, 0.0)
    by_length = []
    for n in block_lengths(cfg.block_length):
        chosen = (batch.block_n_valid == n)[None, :, :, None] & valid[None]
        count = jnp.broadcast_to(jnp.sum(chosen.astype(jnp.float32)), error.shape[:1])
        by_length.append(jnp.stack([jnp.sum(jnp.where(chosen, error, 0.0), axis=(1, 2, 3)), count]))
    count = jnp.maximum(jnp.sum(valid.astype(jnp.float32)), 1.0)
    mean = jnp.sum(error) / (error.shape[0] * count)
    return mean, jnp.stack(by_length, axis=2)


def calibrate(
    params: Params,
    batches: list[Batch],
    *,
    cfg: ModelConfig,
    env: Env,
    learning_rate: float = 0.05,
) -> tuple[Params, Residuals]:
    """One Adam step per batch on the scalars alone; residuals are measured on the first batches.

    Args:
        params: stacked weights; all but the scalars stay.
        batches: from the training distribution.
        cfg: a config with the block operator.
        env: where and how.
        learning_rate: of Adam.
    """
    scalars = scalars_of(params)
    optimiser = optax.adam(learning_rate)

    @jax.jit
    def step(scalars: dict, inner: Any, params: Params, batch: Batch) -> tuple:
        grads, table = jax.grad(residual, has_aux=True)(scalars, params, batch, cfg=cfg, env=env)
        with jax.numpy_dtype_promotion("standard"):
            updates, inner = optimiser.update(grads, inner)
            return optax.apply_updates(scalars, updates), inner, table

    inner = optimiser.init(scalars)
    varied = [vary_blocks(batch, i, cfg.block_length) for i, batch in enumerate(batches)]

    def measure(scalars: dict) -> np.ndarray:
        tables = [step(scalars, inner, params, batch)[2] for batch in varied[:MEASURED]]
        total, count = np.sum([np.asarray(t) for t in tables], axis=0)
        return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)

    before = measure(scalars)
    for batch in varied:
        scalars, inner, _ = step(scalars, inner, params, batch)
    found = Residuals(block_lengths(cfg.block_length), before, measure(scalars))
    return with_scalars(params, scalars), found


def scalars_of(params: Params) -> dict[str, Array]:
    """The block operator's scalars, leaves [group, layer, value_heads]."""
    assert isinstance(params.layers, Groups)
    return {name: getattr(params.layers.linear.linear_attn, name) for name in SCALARS}


def with_scalars(params: Params, scalars: dict[str, Array]) -> Params:
    """The weights with other scalars."""
    assert isinstance(params.layers, Groups)
    linear = params.layers.linear
    linear = linear.replace(linear_attn=linear.linear_attn.replace(**scalars))  # pyright: ignore
    return params.replace(layers=params.layers.replace(linear=linear))  # pyright: ignore
