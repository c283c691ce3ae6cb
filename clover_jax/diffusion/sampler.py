"""The decode loop: one `decode_step` body, three drivers around it.

A step commits the rows whose block is finished, previews every running row's block once, and
reveals what the model is sure of. Rows are at their own block and step; none waits for another and
none influences another. `generate` runs steps in one `lax.while_loop` until all rows are finished,
`run_block` until some row has finished a block (streaming, with a trace), `run_step` once (live
view). AR decoding is the same loop with blocks of one token whose logits are the causal ones.

A block closes as `SamplerConfig.close` says. What closed is pending until the next step commits it;
a verified block is first held against the causal pass, which says what of it is committed. A row's
last tokens are never committed: nobody reads that state. A conversation goes on by a prefill from
`cache.length`.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from clover_jax.cache import DecodeCache
from clover_jax.diffusion.decode_state import (
    ERROR,
    LENGTH,
    RUNNING,
    STOP,
    Canvas,
    Counters,
    DecodeState,
    Rules,
    Text,
    Trace,
    blank_canvas,
    chosen_coreset,
)
from clover_jax.diffusion.passes import Passes
from clover_jax.diffusion.penalties import forbid, process_logits, response_counts
from clover_jax.diffusion.ramps import (
    advance,
    block_indices,
    later_closes,
    ramp_bias,
    start_response,
)
from clover_jax.diffusion.reveal import (
    choose_tokens,
    order_scores,
    position_keys,
    reveal_mask,
    schedule,
)
from clover_jax.diffusion.sampling_config import (
    Close,
    Policy,
    SamplerParams,
    SamplerStructure,
)
from clover_jax.diffusion.speculative import Verdict, no_verdict, verify
from clover_jax.diffusion.stop import (
    block_finished,
    candidates,
    counting,
    first_position,
    first_stop,
)
from clover_jax.model.stack import StackStats


@dataclasses.dataclass(frozen=True)
class Loop:
    """The static part of a decode loop.

    Attributes:
        passes: the model.
        structure: policy and confidence source.
        block: canvas length; 1 in `ar` mode.
        mode: `block` denoises canvases, `ar` takes one causal token at a time.
        fuse_commit: commit a block and preview the next one in one pass over the weights.
        by_row: choose tokens row by row, so that not even a confidence's last bit depends on the
            batch; off where rows are batched.
        margins: record how near each row came to another decision (`DecodeState.margin`).
    """

    passes: Passes
    structure: SamplerStructure
    block: int
    mode: Literal["block", "ar"] = "block"
    fuse_commit: bool = False
    by_row: bool = True
    margins: bool = False

    @property
    def fuses(self) -> bool:
        """Whether a commit and a preview are one pass. What is verified was read once already."""
        return self.fuse_commit or self.close == "verified"

    @property
    def close(self) -> Close:
        """When a block closes; AR mode's blocks of one token have but one way."""
        return self.structure.close if self.mode == "block" else "resolved"


def start(
    cache: DecodeCache,
    *,
    loop: Loop,
    vocab_size: int,
    num_layers: int,
    limit: int,
    max_tokens: Int[Array, " rows"],
    thinking_open: Bool[Array, " rows"],
    seed: UInt32[Array, " rows"],
    sample_index: UInt32[Array, " rows"],
    context: Int[Array, ""],
    coreset: tuple[int, int] | None = None,
) -> DecodeState:
    """State after the prompts' prefill.

    Args:
        cache: the prompts.
        loop: static part.
        vocab_size: rows of the logits.
        num_layers: rows of the expert accounting.
        limit: size of the text buffers, at least every max_tokens.
        max_tokens: at most this many tokens per row; 0 for a row that only fills the batch.
        thinking_open: the prompt ends inside an open thinking block.
        seed: of each row's request.
        sample_index: which of the request's samples the row is.
        context: positions that cache and model hold.
        coreset: (layers, experts) where a block keeps its first step's coreset.
    """
    rows, block = cache.rows, loop.block
    fill = lambda width, value, dtype: jnp.full((rows, width), value, dtype)
    zeros = lambda: jnp.zeros((rows,), jnp.int32)  # each its own buffer: the state is donated
    return DecodeState(
        cache=cache,
        response=start_response(thinking_open),
        counts=jnp.zeros((rows, vocab_size), jnp.int32),
        canvas=blank_canvas(rows, block, coreset),
        step=zeros(),
        pending=zeros(),
        finish=jnp.where((max_tokens > 0) & (cache.length < context), RUNNING, LENGTH),
        text=Text(
            tokens=fill(limit, 0, jnp.int32),
            logprob=fill(limit, 0, jnp.float32),
            confidence=fill(limit, 0, jnp.float32),
            revealed_at=fill(limit, -1, jnp.int32),
            length=zeros(),
        ),
        max_tokens=max_tokens,
        seed=seed,
        sample_index=sample_index,
        context=context,
        counters=Counters(
            previews=zeros(),
            forwards=zeros(),
            experts=jnp.zeros((num_layers, rows), jnp.float32),
            experts_union=jnp.zeros((num_layers,), jnp.float32),
            steps=jnp.int32(0),
        ),
        margin=jnp.full((rows,), jnp.inf, jnp.float32),
    )


def decode_step(
    params: Any, state: DecodeState, sampling: SamplerParams, rules: Rules, loop: Loop
) -> DecodeState:
    """Commit what is pending, preview, reveal, and close blocks."""
    if loop.close == "verified":
        state, n_commit, canvas = _verify(params, state, sampling, rules, loop)
    else:
        n_commit = jnp.where(state.finish == RUNNING, state.pending, 0)
        canvas = _opened(state.canvas, n_commit)
    running = state.finish == RUNNING
    tokens = state.canvas.tokens
    response = advance(state.response, tokens, n_commit, rules.think_close)
    places = jnp.arange(loop.block, dtype=jnp.int32)[None]
    counts = response_counts(state.counts, tokens, places < n_commit[:, None])
    # A block that closed early keeps counting: no random key is used twice at a position.
    step = jnp.where(n_commit == loop.block, 0, state.step)
    length = state.cache.length + n_commit
    n_valid = jnp.where(running, jnp.clip(state.context - length, 0, loop.block), 0)
    cache, logits, stats = _forward(params, state, canvas, n_commit, n_valid, step, loop)

    # Reveal.
    masked = canvas.masked
    stop = first_stop(canvas.tokens, ~masked, rules.stop_ids)
    current = response_counts(counts, canvas.tokens, counting(masked, stop))
    indices = block_indices(response, canvas.tokens, ~masked, rules.think_close)
    bias = ramp_bias(indices, sampling)
    processed = process_logits(
        logits,
        current,
        bias,
        sampling,
        forbidden=rules.forbidden,
        stop_ids=rules.stop_ids,
        think_close=rules.think_close,
    )
    raw = forbid(logits, rules.forbidden) if loop.structure.confidence == "raw" else None
    # Drafts take AR mode's keys: where both draw, the same noise draws the same token more often.
    drawn = jnp.zeros_like(step) if loop.close == "verified" else step
    keys = position_keys(state.seed, state.sample_index, length, drawn, loop.block)
    choice = (processed, keys, sampling, raw)
    choose = functools.partial(_choose, policy=loop.structure.policy)
    guess, confidence, logprob, score = _by_row(choose, choice) if loop.by_row else choose(*choice)
    open_positions, at_least = schedule(
        masked, candidates(masked, stop, n_valid), step, n_valid, sampling
    )
    reveal, error = reveal_mask(
        masked, confidence, open_positions, sampling.threshold, score, at_least
    )
    unsure = ~(masked & open_positions & (confidence > sampling.threshold[:, None])).any(-1)
    known = first_position(masked)
    # A block that is verified needs no known start: its guesses are drafts, too.
    ends = {"resolved": jnp.zeros_like(unsure), "unsure": known > 0, "verified": running}
    unsure = unsure & running & ~error & ends[loop.close]
    reveal = reveal & ~unsure[:, None]
    reveal = reveal & ~later_closes(reveal, guess, indices.thinking, rules.think_close)
    canvas = Canvas(
        tokens=jnp.where(reveal, guess, canvas.tokens),
        masked=masked & ~reveal,
        logprob=jnp.where(reveal, logprob, canvas.logprob),
        confidence=jnp.where(masked, confidence, canvas.confidence),
        revealed_at=jnp.where(reveal, step[:, None], canvas.revealed_at),
        guess=jnp.where(masked, guess, canvas.guess),
        coreset=chosen_coreset(stats),
    )
    margin = state.margin
    if loop.margins and loop.close != "verified":  # whose text does not depend on previews
        near = _margin(processed, guess, confidence, score, open_positions, reveal, sampling, stats)
        margin = jnp.minimum(margin, jnp.where(running, near, jnp.inf))

    # Close.
    stop = first_stop(canvas.tokens, ~canvas.masked, rules.stop_ids)
    limit = jnp.minimum(state.max_tokens - response.response_length, n_valid)
    resolved = running & ~error & block_finished(canvas.masked, stop, limit)
    if loop.close == "verified":
        drafts = jnp.where(canvas.masked, canvas.guess, canvas.tokens)
        n = jnp.minimum(first_stop(drafts, jnp.ones_like(masked), rules.stop_ids) + 1, limit)
        pending = jnp.where(resolved | unsure, n, 0)
        finish, written = state.finish, jnp.zeros_like(n)
    else:
        stopped = resolved & (stop < limit)
        full = (response.response_length + limit >= state.max_tokens) | (
            length + n_valid >= state.context
        )
        finish = jnp.where(stopped, STOP, jnp.where(resolved & full, LENGTH, state.finish))
        early = unsure & ~resolved
        pending = jnp.where(resolved & (finish == RUNNING), loop.block, 0)
        pending = jnp.where(early, known, pending)
        written = jnp.where(resolved, jnp.minimum(stop + 1, limit), jnp.where(early, known, 0))
    finish = jnp.where(running & error, ERROR, finish)
    return state._replace(
        cache=cache,
        response=response,
        counts=counts,
        canvas=canvas,
        step=step + running.astype(jnp.int32),
        pending=pending,
        finish=finish,
        text=_write(state.text, canvas, response.response_length, written),
        counters=_count(state.counters, running, n_commit > 0, stats, loop),
        margin=margin,
    )


def _choose(
    processed: Array, keys: Array, sampling: SamplerParams, raw: Array | None, policy: Policy
) -> tuple[Array, Array, Array, Array]:
    """Token, confidence, log-probability and order score of every position."""
    guess, confidence, logprob = choose_tokens(processed, keys, sampling, raw)
    return guess, confidence, logprob, order_scores(processed, confidence, policy)


def _by_row(f: Any, args: Any) -> Any:
    """`f` row by row: a softmax over the vocabulary has other last bits at other batch sizes."""
    one = lambda r: jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, r, 1, 0), args)
    shapes = jax.eval_shape(lambda: f(*one(0)))
    rows = args[0].shape[0]
    out = jax.tree.map(lambda s: jnp.zeros((rows, *s.shape[1:]), s.dtype), shapes)

    def body(r: Array, out: Any) -> Any:
        got = lax.optimization_barrier(f(*lax.optimization_barrier(one(r))))
        return jax.tree.map(lambda a, b: lax.dynamic_update_slice_in_dim(a, b, r, 0), out, got)

    return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(rows)), body, out)


def _opened(canvas: Canvas, n: Array) -> Canvas:
    """The canvases without their first n positions, masks behind; untouched in rows with n = 0.

    A frozen coreset does not outlive its block.
    """
    rows, block = canvas.tokens.shape
    at = jnp.arange(block, dtype=jnp.int32)[None] + n[:, None]
    move = lambda old, new: jnp.where(
        at < block, jnp.take_along_axis(old, jnp.minimum(at, block - 1), axis=1), new
    )
    kept = canvas.coreset
    moved = jax.tree.map(move, canvas._replace(coreset=None), blank_canvas(rows, block))
    if kept is not None:
        kept = jnp.where((n > 0)[:, None, None], False, kept)
    return moved._replace(coreset=kept)


def _verify(
    params: Any, state: DecodeState, sampling: SamplerParams, rules: Rules, loop: Loop
) -> tuple[DecodeState, Array, Canvas]:
    """Hold pending drafts against AR mode.

    Returns:
        The state with the text that is certain, and rows finished that it ends; how many tokens of
        each canvas are to be committed; and the canvases of what follows them. These begin with
        AR mode's choice, where it replaced a draft or follows the last one.
    """
    canvas, block = state.canvas, loop.block
    ready = (state.finish == RUNNING) & (state.pending > 0)
    n = jnp.where(ready, state.pending, 0)
    draft = jnp.where(canvas.masked, canvas.guess, canvas.tokens)
    after = jnp.pad(draft, ((0, 0), (0, 1)))
    indices = block_indices(state.response, after, jnp.ones_like(after, bool), rules.think_close)
    first = jnp.zeros_like(n)  # the step in AR mode's blocks
    keys = position_keys(state.seed, state.sample_index, state.cache.length, first, block + 1)
    judge = functools.partial(
        verify,
        forbidden=rules.forbidden,
        stop_ids=rules.stop_ids,
        think_close=rules.think_close,
        raw_confidence=loop.structure.confidence == "raw",
    )

    def held(cache: DecodeCache) -> tuple[DecodeCache, Verdict]:
        cache, logits = lax.optimization_barrier(loop.passes.verify(params, draft, n, cache))
        args = (logits, draft, n, state.counts, ramp_bias(indices, sampling), keys, sampling)
        return cache, _by_row(judge, args) if loop.by_row else judge(*args)

    idle = lambda cache: (cache, no_verdict(*draft.shape))
    cache, verdict = lax.cond(ready.any(), held, idle, state.cache)

    accepted = jnp.where(ready, verdict.accepted, 0)
    place = jnp.arange(block + 1, dtype=jnp.int32)[None]
    certain = place <= accepted[:, None]
    left = jnp.minimum(
        state.max_tokens - state.response.response_length, state.context - cache.length
    )
    stop = first_stop(verdict.token, certain, rules.stop_ids)
    stopped = ready & (stop < left) & (stop <= accepted)
    full = ready & (accepted + 1 >= left) & ~stopped
    error = ready & (jnp.isnan(verdict.confidence) & certain).any(-1)
    finish = jnp.where(stopped, STOP, jnp.where(full, LENGTH, state.finish))
    finish = jnp.where(error, ERROR, finish)
    written = jnp.where(stopped, stop + 1, jnp.where(full, left, accepted))
    seen = jnp.where(canvas.masked, state.step[:, None], canvas.revealed_at)
    said = blank_canvas(draft.shape[0], block + 1)._replace(
        tokens=verdict.token,
        logprob=verdict.logprob,
        confidence=verdict.confidence,
        revealed_at=jnp.concatenate([seen, state.step[:, None]], axis=1),
    )
    text = _write(
        state.text, said, state.response.response_length, jnp.where(ready & ~error, written, 0)
    )
    pick = lambda a: jnp.take_along_axis(a, accepted[:, None], axis=1)
    start = blank_canvas(draft.shape[0], block)
    head = jnp.arange(block, dtype=jnp.int32)[None] == 0
    start = start._replace(
        tokens=jnp.where(head, pick(verdict.token), start.tokens),
        masked=~head & start.masked,
        logprob=jnp.where(head, pick(verdict.logprob), start.logprob),
        confidence=jnp.where(head, pick(verdict.confidence), start.confidence),
        revealed_at=jnp.where(head, 0, start.revealed_at),
        guess=jnp.where(head, pick(verdict.token), start.guess),
        coreset=None if canvas.coreset is None else jnp.zeros_like(canvas.coreset),
    )
    choose = lambda new, old: jnp.where(ready.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
    counters = state.counters._replace(forwards=state.counters.forwards + ready.astype(jnp.int32))
    margin = jnp.minimum(state.margin, jnp.where(ready, verdict.margin, jnp.inf))
    state = state._replace(
        cache=cache,
        canvas=canvas._replace(tokens=jnp.where(ready[:, None], draft, canvas.tokens)),
        finish=finish,
        text=text,
        step=jnp.where(ready, 0, state.step),
        counters=counters,
        margin=margin if loop.margins else state.margin,
    )
    still = finish == RUNNING
    return state, jnp.where(still, accepted, 0), jax.tree.map(choose, start, canvas)


def _forward(
    params: Any,
    state: DecodeState,
    canvas: Canvas,
    n_commit: Array,
    n_valid: Array,
    step: Array,
    loop: Loop,
) -> tuple[DecodeCache, Array, StackStats | None]:
    """Commit where due, and the logits of every canvas."""
    committing, tokens = n_commit > 0, state.canvas.tokens
    commit = lambda cache: loop.passes.commit(params, tokens, n_commit, cache)
    if loop.mode == "ar":
        cache = lax.cond(committing.any(), commit, lambda c: c, state.cache)
        return cache, loop.passes.next_logits(params, cache)[:, None], None
    preview = lambda cache: loop.passes.preview(params, canvas, n_valid, cache, step)
    if not loop.fuses:
        cache = lax.cond(committing.any(), commit, lambda c: c, state.cache)
        return cache, *preview(cache)
    # Every read before the next write: else XLA copies the whole cache out of the branches.
    in_order = lax.optimization_barrier
    fused = lambda cache: in_order(
        loop.passes.commit_and_preview(params, tokens, n_commit, canvas, n_valid, cache, step)
    )
    alone = lambda cache: in_order((cache, *preview(cache)))
    return lax.cond(committing.any(), fused, alone, state.cache)


def _write(text: Text, canvas: Canvas, offset: Array, written: Array) -> Text:
    """The first `written` canvas positions of each row, at its response offset."""
    rows, block = canvas.tokens.shape
    at = jnp.arange(block, dtype=jnp.int32)[None]
    limit = text.tokens.shape[1]
    index = jnp.where(at < written[:, None], offset[:, None] + at, limit)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    put = lambda buffer, values: buffer.at[row, index].set(values, mode="drop")
    return Text(
        tokens=put(text.tokens, canvas.tokens),
        logprob=put(text.logprob, canvas.logprob),
        confidence=put(text.confidence, canvas.confidence),
        revealed_at=put(text.revealed_at, canvas.revealed_at),
        length=jnp.where(written > 0, offset + written, text.length),
    )


def _count(
    counters: Counters, running: Array, commits: Array, stats: StackStats | None, loop: Loop
) -> Counters:
    ran = running.astype(jnp.int32)
    previews = jnp.zeros_like(ran) if loop.mode == "ar" else ran
    commits = jnp.zeros_like(commits) if loop.fuses else commits
    experts, union = counters.experts, counters.experts_union
    if stats is not None:
        touched = stats.router.touched & running[None, :, None]
        experts = experts + jnp.sum(touched.astype(jnp.float32), axis=-1)
        union = union + jnp.sum(jnp.any(touched, axis=1).astype(jnp.float32), axis=-1)
    return Counters(
        previews=counters.previews + previews,
        forwards=counters.forwards + previews + commits.astype(jnp.int32),
        experts=experts,
        experts_union=union,
        steps=counters.steps + 1,
    )


def _margin(
    processed: Array,
    guess: Array,
    confidence: Array,
    score: Array,
    candidate: Array,
    reveal: Array,
    sampling: SamplerParams,
    stats: StackStats | None,
) -> Float[Array, " rows"]:
    """How near each row was to another decision, 0 for a row that samples.

    The smallest of: top-2 logit gap, |confidence - threshold|, gap of the order scores between what
    is revealed without being above the threshold and what stays masked, router and coreset gaps.
    """
    ids = jnp.arange(processed.shape[-1], dtype=jnp.int32)
    rest = jnp.where(ids[None, None] == guess[..., None], -jnp.inf, processed).max(-1)
    best = jnp.take_along_axis(processed, guess[..., None], axis=-1)[..., 0]
    above = confidence - sampling.threshold[:, None]
    near = jnp.minimum(best - rest, jnp.abs(above))
    near = jnp.where(candidate, near, jnp.inf).min(-1)
    last = jnp.where(reveal & (above <= 0), score, jnp.inf).min(-1)
    next_one = jnp.where(candidate & ~reveal, score, -jnp.inf).max(-1)
    near = jnp.minimum(near, last - next_one)
    near = jnp.where(sampling.temperature > 0, 0.0, near)  # a draw can turn on any last bit
    if stats is not None:
        router = jnp.minimum(stats.router.margin, stats.router.coreset_margin)
        near = jnp.minimum(near, router.min(0))
    return near


@functools.partial(jax.jit, static_argnames=("loop",), donate_argnames=("state",))
def generate(
    params: Any, state: DecodeState, sampling: SamplerParams, rules: Rules, *, loop: Loop
) -> DecodeState:
    """Driver 1: every block and step of every row, without leaving the device."""
    # A running row reveals a position in every step, or closes a block: the bound only stops what
    # is broken.
    most = state.text.tokens.shape[1] + loop.block
    if loop.close != "resolved":
        most *= loop.block + 1
    return lax.while_loop(
        lambda s: jnp.any(s.finish == RUNNING) & (s.counters.steps < most),
        lambda s: decode_step(params, s, sampling, rules, loop),
        state,
    )


@functools.partial(jax.jit, static_argnames=("loop",), donate_argnames=("state",))
def run_block(
    params: Any, state: DecodeState, sampling: SamplerParams, rules: Rules, *, loop: Loop
) -> tuple[DecodeState, Trace]:
    """Driver 2: steps until some row has resolved a block, with their canvases."""
    most = loop.block + 1
    shown = lambda state: state.canvas._replace(coreset=None)  # nobody looks at that
    buffers = jax.tree.map(lambda a: jnp.zeros((most, *a.shape), a.dtype), shown(state))
    by_step = lambda dtype: jnp.zeros((most, *state.step.shape), dtype)
    trace = Trace(buffers, by_step(jnp.int32), by_step(bool), jnp.int32(0))

    def body(carry: tuple[DecodeState, Trace]) -> tuple[DecodeState, Trace]:
        state, trace = carry
        ran = state.finish == RUNNING
        state = decode_step(params, state, sampling, rules, loop)
        put = lambda buffer, x: lax.dynamic_update_index_in_dim(buffer, x, trace.used, 0)
        canvas = jax.tree.map(put, trace.canvas, shown(state))
        step, ran = put(trace.step, state.step), put(trace.ran, ran)
        return state, Trace(canvas, step, ran, trace.used + 1)

    def unresolved(carry: tuple[DecodeState, Trace]) -> Array:
        state, trace = carry
        news = jnp.any(state.pending > 0) | jnp.any((state.finish != RUNNING) != was_finished)
        return (trace.used < most) & jnp.any(state.finish == RUNNING) & ~(news & (trace.used > 0))

    was_finished = state.finish != RUNNING
    return lax.while_loop(unresolved, body, (state, trace))


@functools.partial(jax.jit, static_argnames=("loop",), donate_argnames=("state",))
def run_step(
    params: Any, state: DecodeState, sampling: SamplerParams, rules: Rules, *, loop: Loop
) -> DecodeState:
    """Driver 3: one step."""
    return decode_step(params, state, sampling, rules, loop)
