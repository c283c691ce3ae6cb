"""One denoising step's choice: which token each position would take, and which to fix.

Low confidence: reveal every candidate whose confidence exceeds the threshold, and if there is none
exactly the most confident one, so that a block of n positions ends within n steps. The rivals
change which come first (entropy, margin, leftmost), how many a step reveals at least (a static
schedule), and how far right they may lie (a window). Dream's rule is the entropy order with a
schedule; LLaDA's the confidence order with a schedule and a window.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from clover_jax.diffusion.sampling_config import Policy, SamplerParams


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


def order_scores(
    processed: Float[Array, "rows block vocab"],
    confidence: Float[Array, "rows block"],
    policy: Policy,
) -> Float[Array, "rows block"]:
    """How early each position comes under a policy: the highest score first.

    Args:
        processed: P, from `penalties.process_logits`.
        confidence: from `choose_tokens`.
        policy: `low_confidence` is the confidence itself; `entropy` minus the entropy of softmax(P)
            in nats; `margin` the difference of its two largest shares; `leftmost` minus the
            position.
    """
    match policy:
        case "low_confidence":
            return confidence
        case "entropy":
            log_p = jax.nn.log_softmax(processed, axis=-1)
            p = jnp.exp(log_p)
            return jnp.where(p > 0, p * log_p, 0.0).sum(-1)
        case "margin":
            share = jax.nn.softmax(processed, axis=-1)
            best = jnp.argmax(share, axis=-1)[..., None]
            others = jnp.arange(share.shape[-1], dtype=best.dtype)[None, None] != best
            return share.max(-1) - jnp.where(others, share, 0.0).max(-1)
        case "leftmost":
            places = jnp.arange(confidence.shape[1], dtype=confidence.dtype)
            return jnp.broadcast_to(-places[None], confidence.shape)


def schedule(
    masked: Bool[Array, "rows block"],
    valid: Bool[Array, "rows block"],
    step: Int[Array, " rows"],
    n_valid: Int[Array, " rows"],
    params: SamplerParams,
) -> tuple[Bool[Array, "rows block"], Int[Array, " rows"]]:
    """Which valid positions are open in this step, and how many it reveals at least.

    The block is cut into windows. Open is the one that holds the first candidate; window j of w is
    due by step (j + 1) · steps // w, and each step reveals an even share of its masks, rounded up
    (LLaDA's split, where they divide). Masks right of a stop count in the share, so that a stop
    does not slow down what is left of it.

    Args:
        masked: positions not yet revealed.
        valid: positions that may be revealed, `stop.candidates`.
        step: denoising steps made in this block.
        n_valid: positions that exist.
        params: `steps` and `window`, 0 for no schedule and for one window.
    """
    block = masked.shape[1]
    places = jnp.arange(block, dtype=jnp.int32)[None]
    width = jnp.where(params.window > 0, jnp.minimum(params.window, block), block)
    first = jnp.argmax(masked & valid, axis=-1).astype(jnp.int32)
    window = first // width
    inside = places // width[:, None] == window[:, None]
    windows = (block + width - 1) // width
    left = jnp.maximum((window + 1) * params.steps // windows - step, 1)
    masks = (masked & inside & (places < n_valid[:, None])).sum(-1, dtype=jnp.int32)
    share = (masks + left - 1) // left
    return valid & inside, jnp.where(params.steps > 0, jnp.maximum(share, 1), 1)


def reveal_mask(
    masked: Bool[Array, "rows block"],
    confidence: Float[Array, "rows block"],
    valid: Bool[Array, "rows block"],
    threshold: Float[Array, " rows"],
    score: Float[Array, "rows block"] | None = None,
    at_least: Int[Array, " rows"] | None = None,
) -> tuple[Bool[Array, "rows block"], Bool[Array, " rows"]]:
    """Positions to fix in this step, never one that is fixed already.

    Args:
        masked: positions not yet revealed.
        confidence: from `choose_tokens`.
        valid: positions that may be revealed, `stop.candidates` or `schedule`'s.
        threshold: per row; confidence must exceed it strictly.
        score: `order_scores`; the confidence if None.
        at_least: from `schedule`; 1 if None.

    Returns:
        reveal: every candidate above the threshold; where these are fewer than `at_least`, also
            that many candidates of the highest score (lowest position on ties); nothing in a row
            without candidates.
        error: rows where a candidate's confidence is NaN; nothing is revealed there.
    """
    candidate = masked & valid
    error = (candidate & jnp.isnan(confidence)).any(-1)
    above = candidate & (confidence > threshold[:, None])
    score = confidence if score is None else score
    least = jnp.ones_like(error, jnp.int32) if at_least is None else at_least
    place = jnp.arange(masked.shape[1], dtype=jnp.int32)
    tied = (score[:, None] == score[:, :, None]) & (place[None] < place[:, None])[None]
    ahead = ((score[:, None] > score[:, :, None]) | tied) & candidate[:, None]
    forced = candidate & (ahead.sum(-1, dtype=jnp.int32) < least[:, None])
    few = above.sum(-1, dtype=jnp.int32) < least
    return (above | (forced & few[:, None])) & ~error[:, None], error


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
