"""The decode loop over scripted logits: against a numpy loop, and its drivers with each other."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.diffusion import sampler
from clover_jax.diffusion.sampler import Loop, Rules
from clover_jax.diffusion.sampling_config import RampConfig, SamplerConfig, sampler_params
from tests.helpers.scripted import Ids, generate_numpy, gumbel_noise, script
from tests.helpers.scripted_passes import Script, ScriptedPasses, scripted_cache

# One shape per block length, compiled once.
ROWS, BLOCKS, STEPS, VOCAB, LIMIT = 8, 4, 8, 12, 32
IDS = Ids(mask=0, stop=(2, 3), forbidden=(0, 11), think_close=4)
PLAIN = Ids(mask=0, stop=(2,), forbidden=(0,))
FINISH = ("running", "stop", "length", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row's script and request."""

    logits: np.ndarray  # [blocks, steps, block, vocab]; the last block and step repeat
    settings: SamplerConfig = SamplerConfig()
    coupling: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((VOCAB, VOCAB), np.float32)
    )
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


def prepare(rows, block, *, mode="block", fuse=False, context=10**6, ids=IDS):
    """Arguments of a driver; idle rows fill up the batch where it has fewer than ROWS."""
    size = ROWS if len(rows) > 1 else 1
    full = [*rows, *[dataclasses.replace(rows[-1], max_tokens=0)] * (size - len(rows))]
    table = np.zeros((size, BLOCKS if block > 1 else LIMIT, STEPS, block, VOCAB), np.float32)
    for r, row in enumerate(full):
        b, s = (np.minimum(np.arange(n), m - 1) for n, m in zip(table.shape[1:3], row.logits.shape))
        table[r] = row.logits[b[:, None], s[None]]
    ints = lambda name, dtype=jnp.int32: jnp.asarray([getattr(r, name) for r in full], dtype)
    coupling = jnp.asarray(np.stack([row.coupling for row in full]))
    params = Script(jnp.asarray(table), coupling, ints("prompt"))
    loop = Loop(
        passes=ScriptedPasses(block),
        structure=rows[0].settings.structure,
        block=block,
        mode=mode,
        fuse_commit=fuse,
        margins=True,
    )
    state = sampler.start(
        scripted_cache(np.asarray(ints("prompt")), 64),
        loop=loop,
        vocab_size=VOCAB,
        num_layers=1,
        limit=LIMIT,
        max_tokens=ints("max_tokens"),
        thinking_open=ints("thinking_open", bool),
        seed=ints("seed", jnp.uint32),
        sample_index=ints("sample_index", jnp.uint32),
        context=jnp.int32(context),
    )
    rules = Rules(
        forbidden=jnp.asarray(np.isin(np.arange(VOCAB), ids.forbidden)),
        stop_ids=jnp.asarray([*ids.stop, *[-1] * (3 - len(ids.stop))], jnp.int32),
        think_close=jnp.int32(-1 if ids.think_close is None else ids.think_close),
    )
    return (params, state, sampler_params([row.settings for row in full]), rules), loop


def final_state(driver, args, loop):
    """The finished state, and all canvases (None for the full driver)."""
    params, state, *rest = args
    if driver == "full":
        return sampler.generate(params, state, *rest, loop=loop), None
    canvases = []
    while (np.asarray(state.finish) == sampler.RUNNING).any():
        if driver == "step":
            ran = np.asarray(state.finish) == sampler.RUNNING
            state = sampler.run_step(params, state, *rest, loop=loop)
            canvases.append(jax.tree.map(np.array, (state.canvas, state.step, ran)))
        else:
            state, trace = sampler.run_block(params, state, *rest, loop=loop)
            for s in range(int(trace.used)):
                one = (trace.canvas, trace.step, trace.ran)
                canvases.append(jax.tree.map(lambda a, s=s: np.array(a[s]), one))
    return state, canvases


def results(state, rows):
    """Per row."""
    state = jax.tree.map(np.asarray, state)
    out = []
    for r in range(len(rows)):
        n = state.text.length[r]
        committed = state.cache.hidden[r, rows[r].prompt : state.cache.length[r]]
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
    return out


def decode(rows, block=8, *, driver="full", **options):
    """Run rows together."""
    args, loop = prepare(rows, block, **options)
    return results(final_state(driver, args, loop)[0], rows)


def oracle(row, ids=IDS, context=10**6, block=None):
    """The numpy loop on the same script."""
    block = block or row.logits.shape[2]

    def denoiser(b):
        table = row.logits[min(b, len(row.logits) - 1)]

        def logits(step, tokens, masked):
            said = sum((row.coupling[t] for t, m in zip(tokens, masked) if not m), np.float32(0))
            return table[min(step, len(table) - 1)] + said

        return logits

    return generate_numpy(
        denoiser,
        row.settings,
        ids,
        block=block,
        max_tokens=row.max_tokens,
        prompt_length=row.prompt,
        context=context,
        thinking_open=row.thinking_open,
        noise=gumbel_noise(row.seed, row.sample_index, VOCAB),
    )


def assert_equals_oracle(got, want, block, *, fuse=False):
    """A row's tokens, figures and counters are those of the numpy loop."""
    assert (got.tokens, got.finish) == (want.response, want.finish)
    at, confidence, logprob = [], [], []
    for b in want.blocks:
        step_of = {i: s for s, places in enumerate(b.steps) for i in places}
        for i in range(block):
            at.append(step_of.get(i, -1))
            confidence.append(b.confidence[i])
            logprob.append(b.log_probability[i])
    n = len(want.response)
    assert got.revealed_at == at[:n]
    np.testing.assert_allclose(got.confidence, confidence[:n], rtol=2e-5)
    np.testing.assert_allclose(got.logprob, logprob[:n], rtol=2e-5, atol=2e-6)
    # Every block but the last is committed, in full; a step that ends in an error was a preview.
    previews = sum(len(b.steps) + b.error for b in want.blocks)
    commits = max(len(want.blocks) - 1, 0)
    assert got.previews == previews
    assert got.forwards == previews + (0 if fuse else commits)
    assert got.committed == want.response[: commits * block]


def random_row(rng, block, **fixed):
    """A random script and random settings; a third of the places are sharp."""
    shape = (BLOCKS, STEPS, block, VOCAB)
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
    }
    return Row(
        logits=logits,
        settings=SamplerConfig(**{**settings, **fixed}),
        coupling=rng.normal(size=(VOCAB, VOCAB)).astype(np.float32),
        max_tokens=int(rng.integers(1, LIMIT + 1)) if block > 1 else int(rng.integers(1, 12)),
        prompt=int(rng.integers(1, 20)),
        thinking_open=bool(rng.random() < 0.5),
        seed=int(rng.integers(2**32)),
        sample_index=int(rng.integers(3)),
    )


@functools.cache
def random_batches(block, count=3):
    """Batches of random rows, and the context that each is decoded in."""
    rng = np.random.default_rng(block)
    contexts = [10**6, 29, 31][:count]
    return [([random_row(rng, block) for _ in range(ROWS)], c) for c in contexts]


if __name__ == "__main__":
    pass


@pytest.mark.parametrize("block", [6, 8])
def test_rows_equal_the_numpy_loop(block):
    near_ties, finishes = 0, set()
    for rows, context in random_batches(block):
        for row, got in zip(rows, decode(rows, block, context=context), strict=True):
            want = oracle(row, context=context)
            if min(b.margin for b in want.blocks) < 1e-4:
                near_ties += 1
                continue
            assert_equals_oracle(got, want, block)
            finishes.add(got.finish)
    assert near_ties <= 3 and finishes == {"stop", "length"}


@pytest.mark.parametrize("block", [6, 8])
def test_drivers_are_bit_equal(block):
    rows, context = random_batches(block)[1]
    found = {}
    for driver in ("full", "block", "step"):
        args, loop = prepare(rows, block, context=context)
        found[driver] = final_state(driver, args, loop)
    leaves = jax.tree_util.tree_flatten_with_path(found["full"][0])[0]
    for driver in ("block", "step"):
        for (path, want), got in zip(leaves, jax.tree.leaves(found[driver][0]), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f"{driver} {path}")
    assert len(found["block"][1]) == len(found["step"][1])
    for a, b in zip(found["block"][1], found["step"][1], strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
