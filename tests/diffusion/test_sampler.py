"""The decode loop over scripted logits: against a numpy loop, and its drivers with each other."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.diffusion import sampler
from clover_jax.diffusion.decode_state import Rules
from clover_jax.diffusion.sampler import Loop
from clover_jax.diffusion.sampling_config import RampConfig, SamplerConfig, sampler_params
from tests.helpers.compilation import unoptimised
from tests.helpers.scripted import Ids, generate_numpy, gumbel_noise, script
from tests.helpers.scripted_passes import Script, ScriptedPasses, scripted_cache

# One shape per block length, compiled once.
ROWS, BLOCKS, STEPS, VOCAB, LIMIT = 8, 4, 8, 12, 64
IDS = Ids(mask=0, stop=(2, 3), forbidden=(0, 11), think_close=4)
PLAIN = Ids(mask=0, stop=(2,), forbidden=(0,))
FINISH = ("running", "stop", "length", "error")
DEFAULT = SamplerConfig()
AT_ONCE, ONE_BY_ONE = SamplerConfig(threshold=0.0), SamplerConfig(threshold=1.1)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Compiling is what these tests cost; what they check does not need fast programs."""
    with unoptimised():
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row's script and request."""

    logits: np.ndarray  # [blocks, steps, block, vocab]; the last block and step repeat
    settings: SamplerConfig = DEFAULT
    coupling: np.ndarray | None = None
    max_tokens: int = LIMIT
    prompt: int = 5
    thinking_open: bool = False
    seed: int = 0
    sample_index: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One row of a finished decode state."""

    tokens: list[int]
    finish: str
    revealed_at: list[int]
    confidence: np.ndarray
    logprob: np.ndarray
    previews: int
    forwards: int
    committed: list[int]  # what the cache holds after the prompt
    margin: float


def prepare(rows, *, mode="block", fuse=False, context=10**6, ids=PLAIN):
    """A driver's arguments; idle rows fill up a batch of more than one row."""
    size = ROWS if len(rows) > 1 else 1
    block = rows[0].logits.shape[2]
    full = [*rows, *[dataclasses.replace(rows[-1], max_tokens=0)] * (size - len(rows))]
    b = np.arange(BLOCKS if mode == "block" else LIMIT)[:, None]
    s = np.arange(STEPS)[None]
    table = [
        r.logits[np.minimum(b, len(r.logits) - 1), np.minimum(s, len(r.logits[0]) - 1)]
        for r in full
    ]
    coupling = [np.zeros((VOCAB, VOCAB)) if r.coupling is None else r.coupling for r in full]
    values = lambda name, dtype=jnp.int32: jnp.asarray([getattr(r, name) for r in full], dtype)
    loop = Loop(
        passes=ScriptedPasses(block),
        structure=rows[0].settings.structure,
        block=block,
        mode=mode,
        fuse_commit=fuse,
        margins=True,
    )
    state = sampler.start(
        scripted_cache(np.asarray(values("prompt")), 96),
        loop=loop,
        vocab_size=VOCAB,
        num_layers=1,
        limit=LIMIT,
        max_tokens=values("max_tokens"),
        thinking_open=values("thinking_open", bool),
        seed=values("seed", jnp.uint32),
        sample_index=values("sample_index", jnp.uint32),
        context=jnp.int32(context),
    )
    rules = Rules(
        forbidden=jnp.asarray(np.isin(np.arange(VOCAB), ids.forbidden)),
        stop_ids=jnp.asarray([*ids.stop, *[-1] * (3 - len(ids.stop))], jnp.int32),
        think_close=jnp.int32(-1 if ids.think_close is None else ids.think_close),
    )
    params = Script(
        *(jnp.asarray(np.stack(x), jnp.float32) for x in (table, coupling)), values("prompt")
    )
    return (params, state, sampler_params([row.settings for row in full]), rules), loop


def run(driver, args, loop):
    """The finished state and, save for the full driver, (canvas, step, ran) after every step."""
    params, state, *rest = args
    if driver == "full":
        return sampler.generate(params, state, *rest, loop=loop), []
    seen = []
    while (ran := np.asarray(state.finish) == sampler.RUNNING).any():
        if driver == "step":
            state = sampler.run_step(params, state, *rest, loop=loop)
            seen.append(jax.tree.map(np.array, (state.canvas, state.step, ran)))
        else:
            state, trace = sampler.run_block(params, state, *rest, loop=loop)
            for s in range(int(trace.used)):
                one = (trace.canvas, trace.step, trace.ran)
                seen.append(jax.tree.map(lambda a, s=s: np.array(a[s]), one))
    return state, seen


def results(state, rows):
    """Per row, idle ones left out."""
    state = jax.tree.map(np.asarray, state)
    out = []
    for r, row in enumerate(rows):
        n = state.text.length[r]
        committed = state.cache.hidden[r, row.prompt : state.cache.length[r]]
        out.append(
            Result(
                tokens=state.text.tokens[r, :n].tolist(),
                finish=FINISH[state.finish[r]],
                revealed_at=state.text.revealed_at[r, :n].tolist(),
                confidence=state.text.confidence[r, :n],
                logprob=state.text.logprob[r, :n],
                previews=int(state.counters.previews[r]),
                forwards=int(state.counters.forwards[r]),
                committed=committed.astype(int).tolist(),
                margin=float(state.margin[r]),
            )
        )
    assert not state.counters.forwards[len(rows) :].any()
    return out


def decode(*rows, driver="full", **options):
    """Decode rows together."""
    args, loop = prepare(rows, **options)
    return results(run(driver, args, loop)[0], rows)


def oracle(row, ids=PLAIN, context=10**6):
    """The numpy loop on the same script."""
    coupling = np.zeros((VOCAB, VOCAB)) if row.coupling is None else row.coupling

    def denoiser(b):
        table = row.logits[min(b, len(row.logits) - 1)]

        def logits(step, tokens, masked):
            said = [coupling[t] for t, m in zip(tokens, masked, strict=True) if not m]
            return table[min(step, len(table) - 1)] + np.sum(said, axis=0, initial=0)

        return logits

    return generate_numpy(
        denoiser,
        row.settings,
        ids,
        block=row.logits.shape[2],
        max_tokens=row.max_tokens,
        prompt_length=row.prompt,
        context=context,
        thinking_open=row.thinking_open,
        noise=gumbel_noise(np.uint32(row.seed), row.sample_index, VOCAB),
    )


def assert_is(got, want, *, block, previews=None, fuse=False):
    """A row's tokens, figures and counters are those of the numpy loop."""
    assert (got.tokens, got.finish) == (want.response, want.finish)
    at, confidence, logprob = [], [], []
    for b in want.blocks:
        step_of = {i: s for s, places in enumerate(b.steps) for i in places}
        at += [step_of.get(i, -1) for i in range(block)]
        confidence += b.confidence
        logprob += b.log_probability
    n = len(want.response)
    assert got.revealed_at == at[:n]
    np.testing.assert_allclose(got.confidence, confidence[:n], rtol=2e-5)
    np.testing.assert_allclose(got.logprob, logprob[:n], rtol=2e-5, atol=2e-6)
    # Every block but the last is committed, in full; a step that ends in an error was a preview.
    if previews is None:
        previews = sum(len(b.steps) + b.error for b in want.blocks)
    commits = max(len(want.blocks) - 1, 0)
    assert got.previews == previews
    assert got.forwards == previews + (0 if fuse else commits)
    assert got.committed == want.response[: commits * block]


def assert_same(a, b):
    """Two results hold the same bits."""
    for field in dataclasses.fields(Result):
        np.testing.assert_array_equal(
            getattr(a, field.name), getattr(b, field.name), err_msg=field.name
        )


def random_row(rng, block, confidence="processed", policy="low_confidence"):
    """A random script and random settings; a third of the places are sharp."""
    blocks = BLOCKS if block > 1 else LIMIT
    shape = (blocks, STEPS, block, VOCAB)
    sharp = np.where(rng.random(shape[:3]) < 0.3, 12.0, 2.0)[..., None]
    logits = (rng.normal(size=shape) * sharp).astype(np.float32)
    logits[..., IDS.stop] -= 6  # fewer stops, so that several blocks are written

    def ramp():
        cap = [None, 2.0][rng.integers(2)]
        return RampConfig(start=int(rng.integers(20)), slope=float(rng.random() / 2), cap=cap)

    settings: dict[str, Any] = {
        "threshold": float(rng.choice([0.0, 0.5, 0.95, 1.1])),
        "temperature": float(rng.choice([0.0, 0.0, 0.3, 1.7])),
        "top_k": int(rng.choice([0, 0, 1, 3])),
        "top_p": float(rng.choice([1.0, 0.7])),
        "presence": float(rng.choice([0.0, 0.9])),
        "frequency": float(rng.choice([0.0, 0.3])),
        "repetition": float(rng.choice([1.0, 1.3])),
        "response_ramp": ramp() if rng.random() < 0.5 else None,
        "thinking_ramp": ramp() if rng.random() < 0.5 else None,
        "steps": int(rng.choice([0, 0, 1, 3, 5, 8, 20])),
        "window": int(rng.choice([0, 0, 1, 3, 4, 30])),
    }
    return Row(
        logits=logits,
        settings=SamplerConfig(confidence=confidence, policy=policy, **settings),
        coupling=rng.normal(size=(VOCAB, VOCAB)) if block > 1 else None,
        max_tokens=int(rng.integers(1, 30)),
        prompt=int(rng.integers(1, 20)),
        thinking_open=bool(rng.random() < 0.5),
        seed=int(rng.integers(2**32)),
        sample_index=int(rng.integers(3)),
    )


CONTEXTS = (10**6, 29, 31)  # the last two end in the middle of a block for most prompts


@functools.cache
def random_batches(block, confidence="processed", policy="low_confidence"):
    """A batch of random rows per context."""
    rng = np.random.default_rng(block)
    return [[random_row(rng, block, confidence, policy) for _ in range(ROWS)] for _ in CONTEXTS]


KINDS = {
    "block 8": (8, {}),
    "block 6": (6, {}),
    "raw confidence": (8, {}),
    "fused commit": (8, {"fuse": True}),
    "ar": (1, {"mode": "ar"}),
    "entropy": (8, {}),
    "margin": (8, {}),
    "leftmost": (8, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_the_numpy_loop(kind):
    block, options = KINDS[kind]
    confidence = "raw" if kind == "raw confidence" else "processed"
    policy = kind if kind in ("entropy", "margin", "leftmost") else "low_confidence"
    near_ties, finishes = 0, set()
    for rows, context in zip(random_batches(block, confidence, policy), CONTEXTS, strict=True):
        found = decode(*rows, context=context, ids=IDS, **options)
        for row, got in zip(rows, found, strict=True):
            want = oracle(row, IDS, context)
            if min((b.margin for b in want.blocks), default=1) < 1e-4:
                near_ties += 1
                continue
            previews = 0 if kind == "ar" else None
            assert_is(got, want, block=block, previews=previews, fuse="fuse" in options)
            finishes.add(got.finish)
    assert near_ties <= 3 and finishes == {"stop", "length"}


@pytest.mark.parametrize(
    ("settings", "revealed"),
    [
        ({"steps": 3}, [3, 3, 2]),  # LLaDA's split of 8 over 3: the rest goes to the first steps
        ({"steps": 8}, [1] * 8),
        ({"steps": 4, "window": 4}, [2, 2, 2, 2]),  # semi-autoregressive: 2 steps a window
        ({"steps": 1, "window": 4}, [4, 4]),
        ({"window": 4}, [1] * 8),
        ({"steps": 20}, [1] * 8),  # a step never reveals nothing
    ],
)
def test_static_schedules_by_hand(settings, revealed):
    """Positions revealed by each step of one block of 8, none above the threshold."""
    logits = np.random.default_rng(0).normal(size=(1, 1, 8, VOCAB)).astype(np.float32)
    logits[..., PLAIN.stop] = -9.0
    row = Row(logits=logits, settings=SamplerConfig(threshold=1.1, **settings), max_tokens=8)
    (got,) = decode(row)
    assert [got.revealed_at.count(step) for step in range(len(revealed))] == revealed
    if "window" in settings:
        assert max(got.revealed_at[:4]) < min(got.revealed_at[4:])


@pytest.fixture(scope="module")
def drivers():
    """The same rows by each driver: (state, canvases after each step)."""
    rows = random_batches(8)[1]
    found = {}
    for driver in ("full", "block", "step"):
        args, loop = prepare(rows, context=CONTEXTS[1], ids=IDS)
        found[driver] = jax.tree.map(np.asarray, run(driver, args, loop))
    return rows, found


def test_drivers_are_bit_equal(drivers):
    _, found = drivers
    leaves = jax.tree_util.tree_flatten_with_path(found["full"][0])[0]
    for driver in ("block", "step"):
        for (path, want), got in zip(leaves, jax.tree.leaves(found[driver][0]), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f"{driver} {path}")
    assert len(found["block"][1]) == len(found["step"][1]) == found["full"][0].counters.steps
    for a, b in zip(found["block"][1], found["step"][1], strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_fixed_places_never_change_and_the_last_canvas_is_the_text(drivers):
    rows, found = drivers
    state, seen = found["step"]
    for r in range(len(rows)):
        steps = [(jax.tree.map(lambda a, r=r: a[r], c), s[r]) for c, s, ran in seen if ran[r]]
        text, before = [], None
        for canvas, step in steps:
            fixed = np.zeros(8, bool)
            if step > 1:
                fixed = ~before.masked
                assert not canvas.masked[fixed].any()
                for name in ("tokens", "logprob", "confidence", "revealed_at"):
                    now, then = getattr(canvas, name), getattr(before, name)
                    np.testing.assert_array_equal(now[fixed], then[fixed], err_msg=name)
            else:  # a new block
                text += [] if before is None else before.tokens.tolist()
            new = ~canvas.masked & ~fixed
            assert new.any() and (canvas.revealed_at[new] == step - 1).all()
            assert (canvas.revealed_at[canvas.masked] == -1).all()
            before = canvas
        n = state.text.length[r]
        assert state.text.tokens[r, :n].tolist() == (text + before.tokens.tolist())[:n]


def test_a_trace_ends_where_some_row_has_resolved_a_block():
    fast, slow = Row(logits=uniform(), settings=AT_ONCE), Row(logits=uniform(), settings=ONE_BY_ONE)
    args, loop = prepare([dataclasses.replace(fast, max_tokens=24), slow])
    params, state, *rest = args
    used, lengths = [], []
    for _ in range(5):
        state, trace = sampler.run_block(params, state, *rest, loop=loop)
        used.append(int(trace.used))
        lengths.append(state.text.length[:2].tolist())
        ran = np.asarray(trace.ran)
        assert not ran[used[-1] :].any() and ran[: used[-1], 1].all()
    assert used == [1, 1, 1, 5, 8]
    assert lengths == [[8, 0], [16, 0], [24, 0], [24, 8], [24, 16]]


def test_fused_commits_change_nothing_but_the_count_of_forwards():
    for rows, context in zip(random_batches(8), CONTEXTS, strict=True):
        plain = decode(*rows, context=context, ids=IDS)
        fused = decode(*rows, context=context, ids=IDS, fuse=True)
        for a, b in zip(plain, fused, strict=True):
            assert b.forwards == b.previews
            assert_same(dataclasses.replace(a, forwards=a.previews), b)


def test_rows_never_influence_each_other():
    rows = random_batches(8)[0]
    together = decode(*rows, ids=IDS)
    order = np.random.default_rng(0).permutation(ROWS)
    for r, got in zip(order, decode(*[rows[r] for r in order], ids=IDS), strict=True):
        assert_same(got, together[r])
    for row, want in zip(rows, together, strict=True):
        assert_same(decode(row, ids=IDS)[0], want)
    # Half of the rows break at some block.
    broken = np.full_like(rows[0].logits, np.nan)
    mixed = [
        dataclasses.replace(row, logits=np.where(np.arange(BLOCKS)[:, None, None, None] < r // 2, row.logits, broken)) if r % 2 else row  # noqa: E501
        for r, row in enumerate(rows)
    ]  # fmt: skip
    for r, got in enumerate(decode(*mixed, ids=IDS)):
        if r % 2 == 0:
            assert_same(got, together[r])


def test_draws_depend_on_seed_and_sample_index_and_not_on_the_place_in_the_batch():
    settings = SamplerConfig(threshold=0.0, temperature=1.0)
    row = Row(logits=uniform(), settings=settings, max_tokens=24)
    vary = [
        {},
        {"sample_index": 1},
        {"seed": 1},
        {"seed": 2**32 - 1},
        {"sample_index": 2**31},
        {"prompt": 6},
    ]
    rows = [dataclasses.replace(row, **v) for v in vary]
    found = decode(*rows, row, ids=Ids(mask=0, stop=(), forbidden=(0,)))
    assert_same(found[0], found[-1])
    assert len({tuple(f.tokens) for f in found}) == len(vary)
    # Position p draws the same number wherever the prompt ended.
    assert found[5].tokens[0] == found[0].tokens[1]


# D1: the loop always ends.


def uniform(block=8):
    return np.zeros((1, 1, block, VOCAB), np.float32)


def test_uniform_logits_take_one_step_per_position_or_one_in_all():
    thresholds = (0.99, 1.1, 0.0)
    rows = [
        Row(logits=uniform(), settings=SamplerConfig(threshold=t), max_tokens=16)
        for t in thresholds
    ]
    for threshold, got in zip(thresholds, decode(*rows), strict=True):
        steps = [0] * 8 if threshold == 0 else list(range(8))
        assert (got.tokens, got.finish) == ([1] * 16, "length")
        assert got.revealed_at == steps * 2
        previews = 2 * (max(steps) + 1)
        assert (got.previews, got.forwards) == (previews, previews + 1)


@pytest.mark.parametrize("mode", ["block", "ar"])
def test_nan_ends_its_row_and_keeps_the_blocks_before_it(mode):
    block = 8 if mode == "block" else 1
    sound = np.zeros((3, 1, block, VOCAB), np.float32)
    sound[..., 7] = 9.0
    nan = sound.copy()
    nan[1, 0, 0, 3] = np.nan
    rows = [
        Row(logits=x, settings=dataclasses.replace(AT_ONCE, temperature=t), max_tokens=3 * block)
        for x in (sound, nan, np.full_like(nan, np.nan))
        for t in (0.0, 1e-3)
    ]
    found = decode(*rows, mode=mode)
    assert [got.finish for got in found] == ["length"] * 2 + ["error"] * 4
    for got, blocks in zip(found, [3, 3, 1, 1, 0, 0], strict=True):
        assert got.tokens == [7] * (blocks * block)
        assert np.isfinite(got.logprob).all()
    if mode == "block":
        assert [got.previews for got in found] == [3, 3, 2, 2, 1, 1]
        assert [got.forwards for got in found] == [5, 5, 3, 3, 1, 1]


def test_nan_where_nothing_can_be_revealed_is_no_error():
    table = script([{3: 2}, {0: 5}, {1: 6}, {2: 7}], 8, VOCAB)
    table[1:, 3:] = np.nan  # the stop, fixed by then, and what is right of it
    got = decode(Row(logits=table[None]), Row(logits=table[None]))[0]
    assert (got.tokens, got.finish) == ([5, 6, 7, 2], "stop")


# D2: no mask in the text, whatever its id and the lengths.


@pytest.mark.parametrize("block", [6, 8])
@pytest.mark.parametrize("mask", [0, 7, 11])
def test_the_mask_is_never_written(block, mask):
    rng = np.random.default_rng(mask)
    ids = Ids(mask=mask, stop=(), forbidden=(mask,))
    logits = rng.normal(size=(BLOCKS, STEPS, block, VOCAB)).astype(np.float32)
    logits[..., mask] = 50
    rows = [
        Row(logits=logits, settings=settings, max_tokens=n, prompt=prompt)
        for prompt in (5, 8, 13)
        for n in (1, 7, 8, 17)
        for settings in (SamplerConfig(threshold=0.3), SamplerConfig(temperature=1.0))
    ]
    for i in range(0, len(rows), ROWS):
        some = rows[i : i + ROWS]
        for row, got in zip(some, decode(*some, ids=ids), strict=True):
            assert len(got.tokens) == row.max_tokens and got.finish == "length"
            assert mask not in got.tokens and mask not in got.committed
            want = oracle(row, ids)
            if min(b.margin for b in want.blocks) > 1e-4:
                assert_is(got, want, block=block)


def test_the_text_ends_with_the_context():
    rows = [Row(logits=uniform(), settings=AT_ONCE, prompt=n) for n in (1, 4, 5, 11, 12, 13)]
    found = decode(*rows, context=12)
    assert [len(got.tokens) for got in found] == [11, 8, 7, 1, 0, 0]
    assert [got.finish for got in found] == ["length"] * 6
    assert [got.previews for got in found] == [2, 1, 1, 1, 0, 0]
    assert [got.forwards for got in found] == [3, 1, 1, 1, 0, 0]


def test_a_shorter_limit_gives_a_prefix():
    limits = (64, 40, 24, 17, 9, 8, 7, 1)
    rng = np.random.default_rng(1)
    cut = 0
    for _ in range(4):
        row = dataclasses.replace(random_row(rng, 8), max_tokens=64)
        longest, *others = decode(*[dataclasses.replace(row, max_tokens=n) for n in limits])
        for n, got in zip(limits[1:], others, strict=True):
            assert len(got.tokens) == min(n, len(longest.tokens))
            cut += n < len(longest.tokens)
            for name in ("tokens", "revealed_at", "confidence", "logprob"):
                np.testing.assert_array_equal(
                    getattr(got, name), getattr(longest, name)[:n], err_msg=name
                )
    assert cut >= 8


# D3: stops.


def test_an_early_stop_waits_for_its_left_and_starts_no_further_block():
    table = script([{0: 6, 1: 7, 5: 2}, {2: 8}, {3: 9}, {4: 10}], 8, VOCAB)
    for got in decode(Row(logits=table[None]), Row(logits=table[None], prompt=8)):
        assert (got.tokens, got.finish) == ([6, 7, 8, 9, 10, 2], "stop")
        assert got.revealed_at == [0, 0, 1, 2, 3, 0]
        assert (got.previews, got.forwards, got.committed) == (4, 4, [])


def test_a_stop_counts_where_the_text_can_still_hold_it():
    # The stop stands at index 11, in the second block.
    table = np.stack([script([dict.fromkeys(range(8), 6)], 8, VOCAB)] * 2)
    table[1, 0, 3] = 0
    table[1, 0, 3, 2] = 30
    found = decode(*[Row(logits=table, max_tokens=n) for n in (11, 12, 13, 64)])
    assert [got.finish for got in found] == ["length", "stop", "stop", "stop"]
    assert [got.tokens for got in found] == [[6] * 11] + [[6] * 11 + [2]] * 3
    assert {(got.previews, got.forwards) for got in found} == {(2, 3)}
    assert all(got.committed == [6] * 8 for got in found)


def test_a_steep_ramp_closes_thinking_once():
    """It pushes every position at once; right of the first `</think>` there is none to close."""
    settings = SamplerConfig(threshold=0.0, thinking_ramp=RampConfig(start=2, slope=50.0))
    row = Row(logits=sevens(), settings=settings, thinking_open=True, max_tokens=16)
    got = decode(row, row, ids=IDS)[0]
    assert got.tokens == [7, 7, 7, 4] + [7] * 12
    assert got.previews == 3  # 7 7 7 4, what was right of it, the next block


@pytest.mark.parametrize("place", [0, 7])
def test_a_stop_at_a_block_border(place):
    table = script([dict.fromkeys(range(8), 6)], 8, VOCAB)
    table[0, place] = 0
    table[0, place, 3] = 30
    ids = Ids(mask=0, stop=(2, 3), forbidden=(0,))
    got = decode(*[Row(logits=table[None])] * 2, ids=ids)[0]
    assert (got.tokens, got.finish) == ([6] * place + [3], "stop")
    assert (got.previews, got.forwards) == (1, 1)


def test_an_untouched_canvas_holds_neither_stop_nor_close():
    # Whatever id fills a masked place is no token: here it may be 0, a stop or the close.
    for ids in (
        Ids(mask=1, stop=(0,), forbidden=(1,), think_close=4),
        Ids(mask=1, stop=(4,), forbidden=(1,), think_close=0),
    ):
        settings = dataclasses.replace(
            ONE_BY_ONE, presence=1.0, thinking_ramp=RampConfig(start=0, slope=0.01)
        )
        logits = np.random.default_rng(0).normal(size=(BLOCKS, STEPS, 8, VOCAB))
        row = Row(logits=logits.astype(np.float32), settings=settings, thinking_open=True)
        want = oracle(row, ids)
        assert min(b.margin for b in want.blocks) > 1e-4
        assert_is(decode(row, row, ids=ids)[0], want, block=8)


# Counts and penalties over block borders, by hand.


def sevens():
    table = uniform()
    table[..., 7] = 9.1
    return table


def test_a_frequency_penalty_counts_committed_blocks():
    settings = SamplerConfig(threshold=0.0, frequency=1.0)
    row = Row(logits=sevens(), settings=settings, max_tokens=24)
    one_by_one = dataclasses.replace(row, settings=dataclasses.replace(settings, threshold=1.1))
    ids = Ids(mask=0, stop=(), forbidden=(0,))
    together, single = decode(row, one_by_one, ids=ids)
    # 9.1 - 8 is still above 0, 9.1 - 16 is not.
    assert together.tokens == [7] * 16 + [1] * 8
    assert (together.previews, together.forwards) == (3, 5)
    # Place by place it is gone after ten; then every id has its turn.
    assert single.tokens[:10] == [7] * 10 and single.tokens[20] == 7
    assert sorted(single.tokens[10:20]) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11]


def test_a_ramp_goes_on_over_block_borders():
    settings = SamplerConfig(threshold=0.0, response_ramp=RampConfig(start=10, slope=1.0))
    rows = [Row(logits=sevens(), settings=settings, prompt=n) for n in (5, 13)]
    for got in decode(*rows):
        # The bias is 10 at index 20, 9 before.
        assert got.tokens == [7] * 20 + [2] and got.finish == "stop"
        assert got.committed == [7] * 16


def test_recorded_margins_cover_every_decision():
    """The numpy loop's margin looks at decisions that were taken; the recorded one at all."""
    for rows, context in zip(random_batches(8), CONTEXTS, strict=True):
        for row, got in zip(rows, decode(*rows, context=context, ids=IDS), strict=True):
            want = oracle(row, IDS, context)
            margin = min((b.margin for b in want.blocks), default=np.inf)
            if margin > 1e-4:
                assert 0 <= got.margin <= margin * (1 + 1e-4) + 1e-5
