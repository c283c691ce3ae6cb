import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.diffusion.penalties import forbid, process_logits, response_counts
from clover_jax.diffusion.ramps import (
    ResponseState,
    advance,
    block_indices,
    later_closes,
    ramp_bias,
    start_response,
)
from clover_jax.diffusion.reveal import choose_tokens, position_keys, reveal_mask
from clover_jax.diffusion.sampling_config import RampConfig, SamplerConfig, sampler_params
from clover_jax.diffusion.stop import block_finished, candidates, counting, first_stop
from clover_jax.model.transformer import align_logits
from tests.helpers.scripted import Ids, generate_numpy, gumbel_noise, script

ROWS, BLOCK, VOCAB = 8, 8, 12  # one shape, compiled once
IDS = Ids(mask=0, stop=(2, 3), forbidden=(0, 11), think_close=4)
PLAIN = Ids(mask=0, stop=(2,), forbidden=(0,))


def ints(*x):
    return jnp.array(x, jnp.int32)


class Canvas(NamedTuple):
    """What the denoising steps of one block read, batched over rows."""

    tokens: Any
    masked: Any
    committed: Any
    state: ResponseState
    start: Any
    seed: Any
    n_valid: Any
    limit: Any
    params: Any
    forbidden: Any
    stop_ids: Any
    think_close: Any


class Step(NamedTuple):
    """What one denoising step gives."""

    tokens: Any
    reveal: Any
    error: Any
    confidence: Any
    log_probability: Any
    stop: Any
    finished: Any


@functools.partial(jax.jit, static_argnames="structure")
def denoise_step(logits, canvas, step, structure):
    """All pure functions in the order of a sampler's step."""
    tokens, masked, params = canvas.tokens, canvas.masked, canvas.params
    stop = first_stop(tokens, ~masked, canvas.stop_ids)
    counts = response_counts(canvas.committed, tokens, counting(masked, stop))
    indices = block_indices(canvas.state, tokens, ~masked, canvas.think_close)
    bias = ramp_bias(indices, params)
    p = process_logits(
        logits,
        counts,
        bias,
        params,
        forbidden=canvas.forbidden,
        stop_ids=canvas.stop_ids,
        think_close=canvas.think_close,
    )
    keys = position_keys(
        canvas.seed, jnp.zeros_like(canvas.seed), canvas.start, step, tokens.shape[1]
    )
    raw = forbid(logits, canvas.forbidden) if structure.confidence == "raw" else None
    chosen, confidence, log_probability = choose_tokens(p, keys, params, raw)
    done = block_finished(masked, stop, canvas.limit)
    n_valid = jnp.where(done, 0, canvas.n_valid)
    reveal, error = reveal_mask(
        masked, confidence, candidates(masked, stop, n_valid), params.threshold
    )
    reveal = reveal & ~later_closes(reveal, chosen, indices.thinking, canvas.think_close)
    tokens, masked = jnp.where(reveal, chosen, tokens), masked & ~reveal
    stop = first_stop(tokens, ~masked, canvas.stop_ids)
    finished = block_finished(masked, stop, canvas.limit)
    return Step(tokens, reveal, error, confidence, log_probability, stop, finished)


@jax.jit
def commit_block(canvas, n_commit):
    """Counts and state after the first n_commit tokens of the block."""
    text = jnp.arange(BLOCK, dtype=jnp.int32)[None] < n_commit[:, None]
    return (
        response_counts(canvas.committed, canvas.tokens, text),
        advance(canvas.state, canvas.tokens, n_commit, canvas.think_close),
    )


class Row(NamedTuple):
    """One row's script, settings and limits."""

    tables: np.ndarray  # [blocks, steps, block, vocab]; the last block and step repeat
    settings: SamplerConfig
    max_tokens: int = 10**6
    prompt_length: int = 0
    context: int = 10**9
    thinking_open: bool = False
    seed: int = 0


@dataclasses.dataclass
class Result:
    """What `generate` did in one row; lists by block, then by step."""

    response: list = dataclasses.field(default_factory=list)
    finish: str = ""
    steps: list = dataclasses.field(default_factory=list)
    confidence: list = dataclasses.field(default_factory=list)
    log_probability: list = dataclasses.field(default_factory=list)


def new_canvas(rows, ids):
    """An empty canvas of ROWS rows; the last of the given rows fills up the batch."""
    full = [*rows, *[rows[-1]] * (ROWS - len(rows))]
    close = -1 if ids.think_close is None else ids.think_close
    none = ints(*[0] * ROWS)
    return full, Canvas(
        tokens=jnp.full((ROWS, BLOCK), ids.mask, jnp.int32),
        masked=jnp.ones((ROWS, BLOCK), bool),
        committed=jnp.zeros((ROWS, VOCAB), jnp.int32),
        state=start_response(jnp.array([row.thinking_open for row in full])),
        start=none,
        seed=ints(*(row.seed for row in full)),
        n_valid=none,
        limit=none,
        params=sampler_params([row.settings for row in full]),
        forbidden=jnp.array([i in ids.forbidden for i in range(VOCAB)]),
        stop_ids=ints(*ids.stop, *[-1] * (4 - len(ids.stop))),
        think_close=jnp.int32(close),
    )


def generate(rows, ids=IDS):
    """A host loop over blocks and steps, at most ROWS rows together; finished ones idle."""
    full, empty = new_canvas(rows, ids)
    committed, state = empty.committed, empty.state
    out = [Result() for _ in full]
    b = 0
    while True:
        start = [row.prompt_length + len(o.response) for row, o in zip(full, out, strict=True)]
        n_valid = [min(BLOCK, row.context - at) for row, at in zip(full, start, strict=True)]
        left = [row.max_tokens - len(o.response) for row, o in zip(full, out, strict=True)]
        for r, o in enumerate(out):
            if not o.finish and min(n_valid[r], left[r]) <= 0:
                o.finish = "length"
            if o.finish:
                n_valid[r] = left[r] = 0
        if all(o.finish for o in out):
            return out[: len(rows)]
        limit = np.minimum(n_valid, left).astype(np.int32)
        canvas = empty._replace(
            committed=committed,
            state=state,
            start=ints(*start),
            n_valid=ints(*n_valid),
            limit=jnp.array(limit),
        )
        for o in out:
            if not o.finish:
                for kept in (o.steps, o.confidence, o.log_probability):
                    kept.append([])
        finished, s = limit == 0, 0
        while not finished.all():
            tables = [row.tables[min(b, len(row.tables) - 1)] for row in full]
            logits = jnp.array([table[min(s, len(table) - 1)] for table in tables])
            got = denoise_step(
                logits, canvas, ints(*[s] * ROWS), structure=rows[0].settings.structure
            )
            canvas = canvas._replace(tokens=got.tokens, masked=canvas.masked & ~got.reveal)
            got = jax.tree.map(np.asarray, got)
            for r in np.flatnonzero(~finished):
                record(out[r], *(x[r] for x in got))
            limit = np.where(got.error, 0, limit)  # an error ends the row without this block
            canvas = canvas._replace(limit=jnp.array(limit))
            finished, s = got.finished | got.error | (limit == 0), s + 1
        n_commit = np.minimum(got.stop + 1, limit)
        committed, state = commit_block(canvas, jnp.array(n_commit))
        for r, o in enumerate(out):
            o.response += got.tokens[r, : n_commit[r]].tolist()
            if not o.finish and got.stop[r] < limit[r]:
                o.finish = "stop"
        b += 1


def record(o, tokens, reveal, error, confidence, log_probability, stop, finished):
    """Append one step of one row; every step reveals something or ends the row."""
    assert reveal.any() != error
    if error:
        o.finish = "error"
        return
    places = np.flatnonzero(reveal)
    o.steps[-1].append(places.tolist())
    o.confidence[-1].append(confidence[places])
    o.log_probability[-1].append(log_probability[places])


def oracle(row, ids=IDS):
    return generate_numpy(
        lambda b: row.tables[min(b, len(row.tables) - 1)],
        row.settings,
        ids,
        block=row.tables.shape[-2],
        max_tokens=row.max_tokens,
        prompt_length=row.prompt_length,
        context=row.context,
        thinking_open=row.thinking_open,
        noise=gumbel_noise(row.seed, 0, row.tables.shape[-1]),
    )


def random_row(rng, confidence, **fixed):
    """A random script and random settings; a third of the positions are sharp."""
    shape = (3, BLOCK, BLOCK, VOCAB)
    sharp = np.where(rng.random(shape[:3]) < 0.3, 12.0, 2.0)[..., None]
    tables = (rng.normal(size=shape) * sharp).astype(np.float32)
    tables[..., IDS.stop] -= 6  # fewer stops, so that several blocks are written

    def ramp():
        cap = [None, 2.0][rng.integers(2)]
        return RampConfig(start=int(rng.integers(20)), slope=float(rng.random() / 2), cap=cap)

    settings: dict[str, Any] = {
        "threshold": float(rng.choice([0.0, 0.5, 0.95, 1.1])),
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        "top_k": int(rng.choice([0, 0, 1, 3])),
        "top_p": float(rng.choice([1.0, 0.7])),
        "presence": float(rng.choice([0.0, 0.9])),
        "frequency": float(rng.choice([0.0, 0.3])),
        "repetition": float(rng.choice([1.0, 1.3])),
        "response_ramp": ramp() if rng.random() < 0.5 else None,
        "thinking_ramp": ramp() if rng.random() < 0.5 else None,
    }
    return Row(
        tables,
        SamplerConfig(confidence=confidence, **{**settings, **fixed}),
        max_tokens=int(rng.integers(1, 30)),
        prompt_length=int(rng.integers(20)),
        context=int(rng.choice([10**6, 28])),
        thinking_open=bool(rng.random() < 0.6),
        seed=int(rng.integers(2**31)),
    )


@pytest.mark.parametrize("confidence", ["processed", "raw"])
def test_batched_functions_equal_the_numpy_loop_row_by_row(confidence):
    rng = np.random.default_rng(3)
    rows = [random_row(rng, confidence) for _ in range(4 * ROWS)]
    found = [got for i in range(0, len(rows), ROWS) for got in generate(rows[i : i + ROWS])]
    near_ties = 0
    for row, got in zip(rows, found, strict=True):
        want = oracle(row)
        if min(b.margin for b in want.blocks) < 1e-4:
            near_ties += 1
            continue
        assert (got.response, got.finish) == (want.response, want.finish)
        assert got.steps == [b.steps for b in want.blocks]
        for b, done in enumerate(want.blocks):
            for s, places in enumerate(done.steps):
                np.testing.assert_allclose(
                    got.confidence[b][s], [done.confidence[i] for i in places], rtol=2e-5
                )
                np.testing.assert_allclose(
                    got.log_probability[b][s],
                    [done.log_probability[i] for i in places],
                    rtol=2e-5,
                    atol=2e-6,
                )
    assert near_ties <= 4


def test_rows_never_influence_each_other():
    rng = np.random.default_rng(5)
    temperature = {"temperature": 0.8}
    rows = [random_row(rng, "processed", **temperature if r % 2 else {}) for r in range(ROWS)]
    even = np.arange(ROWS) % 2 == 0
    rows = [
        row._replace(settings=dataclasses.replace(row.settings, temperature=0.0)) if e else row
        for row, e in zip(rows, even, strict=True)
    ]
    canvas = new_canvas(rows, IDS)[1]._replace(
        tokens=jnp.array(rng.integers(1, 11, (ROWS, BLOCK)), jnp.int32),
        masked=jnp.array(rng.random((ROWS, BLOCK)) < 0.6),
        committed=jnp.array(rng.integers(0, 2, (ROWS, VOCAB)), jnp.int32),
        start=ints(*range(ROWS)),
        n_valid=ints(*[BLOCK] * ROWS),
        limit=ints(*[BLOCK] * ROWS),
    )
    logits = jnp.array([row.tables[0, 0] for row in rows])
    others = jnp.array([row.tables[1, 1] for row in rows])
    shared = {"forbidden", "stop_ids", "think_close"}  # every other field has one entry per row

    def run(logits, canvas):
        step = ints(*[1] * ROWS)
        structure = rows[0].settings.structure
        return jax.tree.map(np.asarray, denoise_step(logits, canvas, step, structure=structure))

    want = run(logits, canvas)
    order = rng.permutation(ROWS)
    own = {k: v for k, v in canvas._asdict().items() if k not in shared}
    permuted = canvas._replace(**jax.tree.map(lambda x: x[order], own))
    for a, b in zip(run(logits[order], permuted), want, strict=True):
        np.testing.assert_array_equal(a, b[order])
    # The even rows are greedy: their neighbours get other logits or NaN, another past, and stop
    # sampling.
    calm = jax.tree.map(lambda x: jnp.where(even, x, jnp.ones_like(x)), canvas.params)
    calm = calm._replace(temperature=jnp.zeros_like(calm.temperature))
    moved = canvas._replace(
        params=calm, committed=jnp.where(even[:, None], canvas.committed, 7), seed=canvas.seed + 1
    )
    for neighbours in (others, jnp.full_like(logits, jnp.nan)):
        for changed in (moved, canvas):
            mixed = jnp.where(even[:, None, None], logits, neighbours)
            for a, b in zip(run(mixed, changed), want, strict=True):
                np.testing.assert_array_equal(a[even], b[even])


def test_sweeping_numbers_never_recompiles():
    rng = np.random.default_rng(6)
    compiled = None
    for settings in (
        SamplerConfig(),
        SamplerConfig(threshold=0.2, temperature=0.7, top_k=3, top_p=0.9, presence=1.0),
        SamplerConfig(repetition=1.2, response_ramp=RampConfig(start=3, slope=0.1, cap=2.0)),
    ):
        row = random_row(rng, "processed")._replace(settings=settings, max_tokens=3)
        generate([row])
        compiled = compiled or denoise_step._cache_size()
    assert denoise_step._cache_size() == compiled


# D1: the loop always ends.


def uniform(n):
    return np.zeros((1, 1, n, VOCAB), np.float32)


@pytest.mark.parametrize(("threshold", "steps"), [(0.99, 8), (1.1, 8), (0.0, 1)])
def test_uniform_logits_take_one_step_per_position_or_one_in_all(threshold, steps):
    row = Row(uniform(BLOCK), SamplerConfig(threshold=threshold), max_tokens=BLOCK)
    got = generate([row], PLAIN)[0]
    everything = [list(range(BLOCK))]
    assert got.steps == [[[i] for i in range(BLOCK)] if steps == BLOCK else everything]
    assert got.response == [1] * BLOCK and got.finish == "length"


def test_a_threshold_of_one_is_not_exceeded_by_certainty():
    table = script([dict.fromkeys(range(BLOCK), 5)], BLOCK, VOCAB, sure=200.0)
    rows = [Row(table[None], SamplerConfig(threshold=t), max_tokens=BLOCK) for t in (1.0, 0.999)]
    assert [len(got.steps[0]) for got in generate(rows, PLAIN)] == [BLOCK, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_broken_logits_end_their_row_and_no_other(bad, temperature):
    settings = SamplerConfig(threshold=0.5, temperature=temperature)
    broken = uniform(BLOCK).copy()
    broken[0, 0, 3, 7] = bad
    rows = [
        Row(uniform(BLOCK), settings, max_tokens=BLOCK, seed=1),
        Row(broken, settings, max_tokens=BLOCK, seed=2),
    ]
    got = generate(rows, PLAIN)
    assert (got[1].finish, got[1].response, got[1].steps) == ("error", [], [[]])
    alone = generate([rows[0], rows[0]], PLAIN)[0]
    assert (got[0].response, got[0].steps) == (alone.response, alone.steps)
    assert got[0].finish == "length" or got[0].finish == "stop"


def test_nan_of_a_forbidden_id_is_an_error_and_nan_at_a_fixed_place_is_not():
    table = script([{0: 5}, {1: 5}], BLOCK, VOCAB)
    table[1, 0] = np.nan  # position 0 is fixed by then
    row = Row(table[None], SamplerConfig(), max_tokens=4)
    assert generate([row], PLAIN)[0].finish == "length"
    table[1, 2, 0] = np.nan
    assert generate([row], PLAIN)[0].finish == "error"


def test_a_vocabulary_without_an_allowed_id_is_an_error():
    ids = Ids(mask=0, stop=(2,), forbidden=tuple(range(VOCAB)))
    assert generate([Row(uniform(BLOCK), SamplerConfig(), max_tokens=4)], ids)[0].finish == "error"


# reveal_mask


def test_reveal_by_hand():
    confidence = jnp.array([[0.96, 0.5, 0.95, 0.99], [0.3, 0.7, 0.7, 0.9]] * 2)
    masked = jnp.array([[True, True, True, True], [True, True, True, False]] * 2)
    valid = masked.at[2].set(False).at[3, 1].set(False)
    threshold = jnp.array([0.95, 0.95, 0.1, 0.7], jnp.float32)
    reveal, error = reveal_mask(masked, confidence, valid, threshold)
    assert reveal.tolist() == [
        [True, False, False, True],  # 0.95 is not above 0.95
        [False, True, False, False],  # none: the best candidate, lowest position on the tie
        [False] * 4,  # no candidate
        [False, False, True, False],  # 0.7 is not above 0.7, so the best one is forced
    ]
    assert not error.any()


def test_reveal_properties():
    rng = np.random.default_rng(7)
    for _ in range(20):
        masked, valid = rng.random((2, 64, BLOCK)) < rng.random((2, 64, 1))
        confidence = rng.choice([0.0, 0.2, 0.5, 0.95, 1.0], (64, BLOCK)).astype(np.float32)
        confidence[rng.random((64, BLOCK)) < 0.02] = np.nan
        threshold = rng.choice([0.0, 0.5, 0.94, 1.0, 1.1], 64).astype(np.float32)
        reveal, error = map(np.asarray, reveal_mask(*map(jnp.array, (masked, confidence, valid, threshold))))  # noqa: E501  # fmt: skip
        candidate = masked & valid
        np.testing.assert_array_equal(error, (candidate & np.isnan(confidence)).any(1))
        assert not (reveal & ~candidate).any()
        np.testing.assert_array_equal(reveal.any(1), candidate.any(1) & ~error)
        above = candidate & (confidence > threshold[:, None])
        some = above.any(1) & ~error
        np.testing.assert_array_equal(reveal[some], above[some])
        assert (reveal[~some].sum(1) <= 1).all()
        for r in np.flatnonzero(~some & candidate.any(1) & ~error):
            best = max(np.flatnonzero(candidate[r]), key=lambda i: (confidence[r, i], -i))
            assert reveal[r, best]


# D3: a stop in the block.


def test_an_early_stop_waits_for_its_left_and_for_nothing_else():
    table = script([{0: 6, 1: 7, 5: 2}, {2: 8}, {3: 9}, {4: 10}], BLOCK, VOCAB)
    got = generate([Row(table[None], SamplerConfig(), max_tokens=100)], PLAIN)[0]
    assert got.response == [6, 7, 8, 9, 10, 2] and got.finish == "stop"
    assert got.steps == [[[0, 1, 5], [2], [3], [4]]]  # one block, fewer steps than positions


def test_places_right_of_a_stop_stay_and_do_not_count():
    # Position 6 is fixed together with the stop at 4, and holds 9; with a presence penalty that
    # counted it, 9 would lose position 1 to 8.
    table = script([{4: 2, 6: 9}, {1: 9}, {0: 7}, {2: 7, 3: 7}], BLOCK, VOCAB)
    table[1, 1, 8] = 29.5
    settings = SamplerConfig(threshold=0.3, presence=5.0)
    got = generate([Row(table[None], settings, max_tokens=100)], PLAIN)[0]
    assert got.response == [7, 9, 7, 7, 2] and got.finish == "stop"
    assert got.steps[0][0] == [4, 6] and not any(5 in step for step in got.steps[0])
    # Control: without the stop it counts.
    table[0, 4] = 0
    table[0, 4, 5] = 30
    row = Row(table[None], settings, max_tokens=BLOCK)
    assert generate([row], PLAIN)[0].response[1] == 8


def test_a_shorter_limit_gives_a_prefix():
    rng = np.random.default_rng(8)
    for _ in range(6):
        row = random_row(rng, "processed")._replace(context=10**6)
        limits = (1, 5, 7, 8, 9, 13, 17, 24)
        texts = [g.response for g in generate([row._replace(max_tokens=n) for n in limits])]
        for n, text in zip(limits, texts, strict=True):
            assert text == texts[-1][:n]
            assert not set(text) & set(IDS.forbidden)


# Ramps end what would not end.


@pytest.mark.parametrize("thinking_open", [False, True])
def test_a_ramp_alone_ends_a_looping_toy(thinking_open):
    loop = np.zeros((1, 1, BLOCK, VOCAB), np.float32)
    loop[..., 7] = 9.1
    endless = Row(loop, SamplerConfig(), max_tokens=96, thinking_open=thinking_open)
    ramps = SamplerConfig(
        response_ramp=RampConfig(start=16, slope=0.5),
        thinking_ramp=RampConfig(start=24, slope=0.5),
    )
    stuck, ended = generate([endless, endless._replace(settings=ramps)])
    assert stuck.finish == "length" and stuck.response == [7] * 96
    # The bias passes 9.1 logits at the 19th token past the start. Positions to its right see a
    # larger bias and may take a close of their own before one stands to their left.
    answer = ended.response
    if thinking_open:
        assert answer[: 24 + 19 + 1] == [7] * (24 + 19) + [IDS.think_close]
        answer = answer[24 + 19 + 1 :]
    assert ended.finish == "stop" and answer[-1] == 2 and len(answer) == 16 + 19 + 1
    assert set(answer[:-1]) <= {7, IDS.think_close} and answer[8:-1] == [7] * (len(answer) - 9)


# D4: which position a logit speaks of.


@pytest.mark.parametrize("model", ["same", "shifted"])
@pytest.mark.parametrize("reading", ["same", "shifted"])
def test_logits_are_read_at_the_place_they_speak_of(model, reading):
    text = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2]])
    block, following = text[:, :-1], text[:, 1:]
    named = np.eye(VOCAB, dtype=np.float32)[block if model == "same" else following]
    last = np.eye(VOCAB, dtype=np.float32)[block[:, 0] if model == "shifted" else [11, 11]]
    aligned = align_logits(jnp.array(named), jnp.array(last), reading)
    right = np.asarray(aligned.argmax(-1)) == block
    loss = -np.log(np.take_along_axis(np.asarray(aligned), block[..., None], -1) + 1e-9).mean()
    if model == reading:
        assert right.all() and loss < 1e-6
    else:
        assert right.mean() < 0.2 and loss > 10
    one_row = align_logits(jnp.array(named[0]), jnp.array(last[0]), reading)
    np.testing.assert_array_equal(one_row, aligned[0])


# D6: the distribution that gives the confidence, by hand.

HAND = np.array([1.0, 2.0, 0.5, -1.0, 0.0, -2.0])
SHARE = np.exp(HAND) / sum(math.exp(x) for x in HAND)


KEYS = jax.jit(position_keys, static_argnums=4)


@functools.cache
def draws(temperature, top_k, top_p, logits=tuple(HAND)):
    """4,096 draws from a row of logits: tokens, confidence and log-probability."""
    rows, block = 64, 64
    params = sampler_params([SamplerConfig(temperature=temperature, top_k=top_k, top_p=top_p)])
    params = jax.tree.map(lambda x: jnp.repeat(x, rows), params)
    index = jnp.arange(rows, dtype=jnp.int32)
    keys = KEYS(index, index, index * block, index * 0, block)
    everywhere = jnp.broadcast_to(jnp.array(logits, jnp.float32), (rows, block, 6))
    return [np.asarray(x).ravel() for x in jax.jit(choose_tokens)(everywhere, keys, params)]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (0.0, 0, 1.0, [1]),
        (0.0, 3, 0.5, [1]),
        (0.7, 0, 0.5, [1]),  # share of id 1: 0.70
        (1.5, 0, 0.5, [1, 0]),  # shares 0.43, 0.22
        (0.7, 0, 1.0, [1, 0, 2, 4, 3, 5]),
        (1.5, 0, 1.0, [1, 0, 2, 4, 3, 5]),
        (1.5, 3, 1.0, [1, 0, 2]),
        (1.5, 3, 0.6, [1, 0]),  # 0.43 of all ids, but 0.53 and 0.80 of the three
        (1.5, 1, 0.6, [1]),
        (1.5, 100, 1.0, [1, 0, 2, 4, 3, 5]),
    ],
)
def test_draws_and_confidence_by_hand(temperature, top_k, top_p, kept):
    tokens, confidence, log_probability = draws(temperature, top_k, top_p)
    # Confidence: softmax at temperature 1 over all ids, whatever was cut.
    np.testing.assert_allclose(confidence, SHARE[tokens], rtol=0, atol=1e-6)
    np.testing.assert_allclose(log_probability, np.log(SHARE[tokens]), rtol=1e-6)
    assert set(tokens.tolist()) <= set(kept)
    weight = np.exp(HAND[kept] / (temperature or 1.0))
    expected = weight / weight.sum()
    found = np.array([(tokens == k).mean() for k in kept])
    sigma = np.sqrt(expected * (1 - expected) / len(tokens))
    assert (np.abs(found - expected) <= 4.5 * sigma + 1e-12).all()


def test_raw_confidence_is_of_the_raw_logits():
    raw = jnp.array(HAND, jnp.float32)[None, None]
    processed = raw.at[0, 0, 1].set(-3.0)  # a penalty moves the choice to id 0
    params = sampler_params([SamplerConfig()])
    keys = KEYS(*[ints(0)] * 4, 1)
    tokens, confidence, log_probability = jax.jit(choose_tokens)(processed, keys, params, raw)
    assert tokens.tolist() == [[0]]
    np.testing.assert_allclose(confidence, SHARE[0], rtol=1e-6)
    left = np.exp(np.where(HAND == 2.0, -3.0, HAND))
    np.testing.assert_allclose(np.exp(log_probability), left[0] / left.sum(), rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-44])
def test_temperature_zero_is_the_limit_of_small_ones(temperature):
    tokens, confidence, _ = draws(temperature, 0, 1.0)
    greedy, greedy_confidence, _ = draws(0.0, 0, 1.0)
    np.testing.assert_array_equal(tokens, greedy)
    np.testing.assert_array_equal(confidence, greedy_confidence)


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.4}])
def test_truncation_breaks_ties_by_id(cut):
    tokens = draws(1.0, cut.get("top_k", 0), cut.get("top_p", 1.0), logits=(0.0,) * 6)[0]
    assert set(tokens.tolist()) == {0, 1, 2}  # 1/6 each: three reach 0.4


def test_keys_depend_on_request_sample_place_and_step_only():
    keys = jax.random.key_data(
        KEYS(ints(7, 7, 7, 7, 8), ints(0, 0, 1, 0, 0), ints(5, 6, 5, 5, 5),
                      ints(0, 0, 0, 1, 0), 4)
    )  # fmt: skip
    np.testing.assert_array_equal(keys[0, 1:], keys[1, :-1])  # same absolute positions
    assert len({tuple(k) for k in np.asarray(keys).reshape(-1, 2).tolist()}) == 20 - 3
    chain = jax.random.key(7, impl="threefry2x32")
    for data in (1, 5 + 2, 0):
        chain = jax.random.fold_in(chain, data)
    np.testing.assert_array_equal(keys[2, 2], jax.random.key_data(chain))
