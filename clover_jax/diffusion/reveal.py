"""One denoising step's choice: which token each position would take, and which to fix.

Low confidence: reveal every candidate whose confidence exceeds the threshold, and if there is none
exactly the most confident one, so that a block of n positions ends within n steps.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from clover_jax.diffusion.sampling_config import SamplerParams


def position_keys(
    seed: Integer[Array, " rows"],
    sample_index: Integer[Array, " rows"],
    start: Integer[Array, " rows"],
    step: Integer[Array, " rows"],
    block: int,
) -> Key[Array, "rows block"]:
    """Random keys that depend on nothing but the request and the place in it.

    key = fold_in(fold_in(fold_in(key(seed), sample_index), absolute position), step in block)

    Args:
        seed: of the request, 0 <= seed < 2^32.
        sample_index: which of a request's samples the row is.
        start: absolute position of the block's first row (committed tokens, prompt included).
        step: denoising steps made in this block.
        block: block length.
    """

    def row(seed: Array, sample: Array, start: Array, step: Array) -> Array:
        base = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), sample)
        places = start + jnp.arange(block, dtype=start.dtype)
        return jax.vmap(lambda p: jax.random.fold_in(jax.random.fold_in(base, p), step))(places)

    return jax.vmap(row)(seed, sample_index, start, step)


def choose_tokens(
    processed: Float[Array, "rows block vocab"],
    keys: Key[Array, "rows block"],
    params: SamplerParams,
    confidence_logits: Float[Array, "rows block vocab"] | None = None,
) -> tuple[Int[Array, "rows block"], Float[Array, "rows block"], Float[Array, "rows block"]]:
    """The token that each position would take, and how sure the model is of it.

    The token is argmax P in rows at temperature 0, else a draw from softmax(P / temperature) cut
    by top-k, then top-p. Confidence is the token's share of softmax(P), whatever the temperature.

    Args:
        processed: P, from `penalties.process_logits`.
        keys: `position_keys`; unused in rows at temperature 0.
        params: one set per row.
        confidence_logits: logits whose softmax is the confidence; P if None. For the `raw`
            confidence: `penalties.forbid(raw logits)`.

    Returns:
        tokens int32, confidence float32, and log softmax(P)[token] float32. Where a logit is NaN
        or +inf, or every id is forbidden, confidence and log-probability are NaN.
    """
    sampled = params.temperature > 0
    greedy = jnp.argmax(processed, axis=-1).astype(jnp.int32)
    # Whether some other row samples decides only if the draw is computed, never which one a row
    # takes.
    tokens = jax.lax.cond(
        sampled.any(),
        lambda: jnp.where(sampled[:, None], _draw(processed, keys, params), greedy),
        lambda: greedy,
    )
    log_probability = _log_probability(processed, tokens)
    if confidence_logits is None:
        return tokens, jnp.exp(log_probability), log_probability
    return tokens, jnp.exp(_log_probability(confidence_logits, tokens)), log_probability


def reveal_mask(
    masked: Bool[Array, "rows block"],
    confidence: Float[Array, "rows block"],
    valid: Bool[Array, "rows block"],
    threshold: Float[Array, " rows"],
) -> tuple[Bool[Array, "rows block"], Bool[Array, " rows"]]:
    """Positions to fix in this step, never one that is fixed already.

    Args:
        masked: positions not yet revealed.
        confidence: from `choose_tokens`.
        valid: positions that may be revealed, `stop.candidates`.
        threshold: per row; confidence must exceed it strictly.

    Returns:
        reveal: every candidate above the threshold; if there is none the most confident candidate
            (lowest position on ties); nothing in a row without candidates.
        error: rows where a candidate's confidence is NaN; nothing is revealed there.
    """
    candidate = masked & valid
    error = (candidate & jnp.isnan(confidence)).any(-1)
    above = candidate & (confidence > threshold[:, None])
    best = jnp.argmax(jnp.where(candidate, confidence, -1), axis=-1).astype(jnp.int32)
    # Where any candidate is above the threshold the best one is too, so it never adds a second.
    forced = candidate & (jnp.arange(masked.shape[1], dtype=jnp.int32)[None] == best[:, None])
    return (above | forced) & ~error[:, None], error


def _draw(
    processed: Float[Array, "rows block vocab"],
    keys: Key[Array, "rows block"],
    params: SamplerParams,
) -> Int[Array, "rows block"]:
    """Gumbel-max draw from softmax(P / temperature) after top-k, then top-p."""
    # The peak is moved to 0 before the division, so that no temperature overflows the best logits;
    # the smallest normal float keeps rows at temperature 0, whose draw is not used, free of NaN.
    temperature = jnp.maximum(params.temperature, jnp.finfo(jnp.float32).tiny)[:, None, None]
    scaled = (processed - processed.max(-1, keepdims=True)) / temperature
    truncates = (params.temperature > 0) & ((params.top_k > 0) | (params.top_p < 1))
    kept = jax.lax.cond(
        truncates.any(), lambda: _truncate(scaled, params.top_k, params.top_p), lambda: scaled
    )
    vocab = processed.shape[-1]
    noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), mode="high")))(keys)
    return jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)


def _truncate(
    logits: Float[Array, "rows block vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
) -> Float[Array, "rows block vocab"]:
    """-inf outside the k best ids, then outside the fewest of those that reach the share top_p.

    Ids rank by logit, equal ones by id. top_k 0 and top_p 1 are off.
    """
    k, p = top_k[:, None, None], top_p[:, None, None]
    ids = jnp.broadcast_to(jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape)
    descending, order = jax.lax.sort((-logits, ids), dimension=-1, is_stable=True, num_keys=1)
    in_k = (k == 0) | (ids < k)  # of the sorted axis, so `ids` are the ranks
    share = jax.nn.softmax(jnp.where(in_k, -descending, -jnp.inf), axis=-1)
    before = jnp.pad(jnp.cumsum(share, axis=-1), ((0, 0), (0, 0), (1, 0)))[..., :-1]
    # Rank 0 always stays: before is 0 there, and top_p is positive.
    n_kept = (in_k & ((p >= 1) | (before < p))).sum(-1, keepdims=True, dtype=jnp.int32)
    last = jnp.take_along_axis(-descending, n_kept - 1, axis=-1)
    last_id = jnp.take_along_axis(order, n_kept - 1, axis=-1)
    keep = (logits > last) | ((logits == last) & (ids <= last_id))
    return jnp.where(keep, logits, -jnp.inf)


def _log_probability(
    logits: Float[Array, "rows block vocab"], tokens: Int[Array, "rows block"]
) -> Float[Array, "rows block"]:
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
