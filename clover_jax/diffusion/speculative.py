"""Lossless blocks: the causal pass keeps of a block what AR mode would have written.

The draft is a block's revealed tokens, with the latest guesses at its masks. One causal pass over
it gives the next-token logits at every position; AR mode's own choice is made from them, with its
penalties, ramps and random keys. Drafts are kept up to the first that differs; that position, or
the one after the last draft, takes AR mode's choice. So the text is that of AR mode with the same
seed whatever the previews said, but for near-ties: one pass over n rows and n passes over one row
differ in their last bits.

Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) whose draft counts as certain: it is
kept with AR mode's probability of it, and otherwise replaced by a draw from the rest, which one
draw from AR mode's distribution does at once. A model as its own drafter: S2D2 (arXiv 2603.25702).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from clover_jax.diffusion.penalties import forbid, process_logits, response_counts
from clover_jax.diffusion.ramps import RampBias
from clover_jax.diffusion.reveal import choose_tokens
from clover_jax.diffusion.sampling_config import SamplerParams
from clover_jax.diffusion.stop import first_position


class Verdict(NamedTuple):
    """AR mode's choices at the positions of a draft and at the one after it."""

    token: Int[Array, "rows positions"]
    confidence: Float[Array, "rows positions"]
    logprob: Float[Array, "rows positions"]
    accepted: Int[Array, " rows"]  # drafts that are kept
    margin: Float[Array, " rows"]  # smallest gap of two best logits up to the first other choice


def no_verdict(rows: int, block: int) -> Verdict:
    """Of no draft."""
    fill = lambda dtype: jnp.zeros((rows, block + 1), dtype)
    accepted = jnp.zeros((rows,), jnp.int32)
    margin = jnp.full((rows,), jnp.inf, jnp.float32)
    return Verdict(fill(jnp.int32), fill(jnp.float32), fill(jnp.float32), accepted, margin)


def verify(
    logits: Float[Array, "rows positions vocab"],
    draft: Int[Array, "rows block"],
    n: Int[Array, " rows"],
    counts: Int[Array, "rows vocab"],
    bias: RampBias,
    keys: Key[Array, "rows positions"],
    sampling: SamplerParams,
    *,
    forbidden: Bool[Array, " vocab"],
    stop_ids: Int[Array, " stops"],
    think_close: Int[Array, ""],
    raw_confidence: bool,
) -> Verdict:
    """Hold a draft against AR mode.

    Args:
        logits: causal ones of every position and of the one after: positions = block + 1.
        draft: tokens.
        n: how many of them there are.
        counts: of the committed response.
        bias: ramps at every position of the draft, were all of it kept.
        keys: AR mode's.
        sampling: one set per row.
        forbidden: ids that are never chosen.
        stop_ids: get the response ramp.
        think_close: gets the thinking ramp.
        raw_confidence: the confidence is that of the logits before penalties.
    """
    rows, block = draft.shape

    def choose(counts: Array, at: tuple) -> tuple[Array, tuple]:
        logits, draft, bias, keys = jax.tree.map(lambda a: a[:, None], at)
        processed = process_logits(
            logits, counts, bias, sampling,
            forbidden=forbidden, stop_ids=stop_ids, think_close=think_close,
        )  # fmt: skip
        raw = forbid(logits, forbidden) if raw_confidence else None
        found = choose_tokens(processed, keys, sampling, raw)
        best, second = jnp.moveaxis(lax.top_k(processed[:, 0], 2)[0], -1, 0)
        counts = response_counts(counts, draft, jnp.ones_like(draft, bool))
        return counts, (*(a[:, 0] for a in found), best - second)

    behind = jnp.concatenate([draft, jnp.zeros((rows, 1), draft.dtype)], axis=1)
    by_position = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (logits, behind, bias, keys))
    _, found = lax.scan(choose, counts, by_position)
    token, confidence, logprob, gap = (jnp.moveaxis(a, 0, 1) for a in found)
    place = jnp.arange(block, dtype=jnp.int32)[None]
    accepted = first_position((token[:, :-1] != draft) | (place >= n[:, None]))
    decided = jnp.arange(block + 1, dtype=jnp.int32)[None] <= accepted[:, None]
    margin = jnp.where(decided, gap, jnp.inf).min(-1)
    margin = jnp.where(sampling.temperature > 0, 0.0, margin)
    return Verdict(token, confidence, logprob, accepted, margin)
