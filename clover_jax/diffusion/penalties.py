"""From raw logits to the distribution P that picks tokens.

Order: raw -> forbidden ids to -inf -> repetition -> presence and frequency -> ramps. The counts
are of response tokens only, committed and revealed; a prompt token is never penalised.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clover_jax.diffusion.ramps import RampBias
from clover_jax.diffusion.sampling_config import SamplerParams


def response_counts(
    committed: Int[Array, "rows vocab"],
    tokens: Int[Array, "rows block"],
    counted: Bool[Array, "rows block"],
) -> Int[Array, "rows vocab"]:
    """Occurrences of every id in the response so far.

    Args:
        committed: occurrences in the committed response.
        tokens: the block's canvas.
        counted: its positions to add, `stop.counting`.
    """
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    return committed.at[rows, tokens].add(counted.astype(committed.dtype))


def forbid(
    logits: Float[Array, "rows block vocab"], forbidden: Bool[Array, " vocab"]
) -> Float[Array, "rows block vocab"]:
    """Raw logits in float32 with forbidden ids (mask, ids past the tokenizer's end) at -inf.

    A NaN stays even there, so that `reveal_mask` finds it.
    """
    logits = logits.astype(jnp.float32)
    return jnp.where(forbidden[None, None] & ~jnp.isnan(logits), -jnp.inf, logits)


def process_logits(
    logits: Float[Array, "rows block vocab"],
    counts: Int[Array, "rows vocab"],
    bias: RampBias,
    params: SamplerParams,
    *,
    forbidden: Bool[Array, " vocab"],
    stop_ids: Int[Array, " stops"],
    think_close: Int[Array, ""],
) -> Float[Array, "rows block vocab"]:
    """The processed logits P, float32.

    Repetition divides a positive logit and multiplies a negative one (Keskar et al. 2019, CTRL,
    section 4.1, in the sign-aware form in common use); presence and frequency are subtracted once,
    and once per occurrence.

    Args:
        logits: the preview's logits, aligned with the positions (`transformer.align_logits`).
        counts: `response_counts`.
        bias: `ramps.ramp_bias`.
        params: one set per row.
        forbidden: ids that are never chosen.
        stop_ids: get the response ramp; padded with -1.
        think_close: gets the thinking ramp; -1 for none.
    """
    p = forbid(logits, forbidden)
    repetition, presence, frequency = (
        x[:, None, None] for x in (params.repetition, params.presence, params.frequency)
    )
    counts = counts[:, None]
    seen = counts > 0
    p = jnp.where(seen, jnp.where(p > 0, p / repetition, p * repetition), p)
    p = p - presence * seen.astype(jnp.float32) - frequency * counts.astype(jnp.float32)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    is_stop = (ids[:, None] == stop_ids[None]).any(-1)
    p = p + jnp.where(is_stop[None, None], bias.response[..., None], 0)
    return p + jnp.where((ids == think_close)[None, None], bias.thinking[..., None], 0)
