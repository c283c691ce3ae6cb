"""`Generator` on a small real model and a small tokenizer."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.cache import empty_cache
from clover_jax.data.bpe import train_bpe, write_tokenizer
from clover_jax.data.tokenizer import StreamDecoder, Tokenizer
from clover_jax.diffusion import sampler
from clover_jax.diffusion.generate import (
    CanvasEvent,
    DoneEvent,
    Generator,
    Request,
    TextEvent,
    forbidden_ids,
)
from clover_jax.diffusion.sampling_config import RampConfig, SamplerConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.params import path_name
from clover_jax.presets import clover_tiny
from tests.helpers.compilation import unoptimised
from tests.helpers.limits import TOP1_MARGIN, assert_close
from tests.helpers.scripted import Ids, denoise_block_numpy
from tests.model.small import assert_same_bits, jitted, random_params

# One layer of each kind, and a vocabulary with rows that the tokenizer does not know.
CFG = clover_tiny().replace(
    vocab_size=320, num_layers=2, full_attention_interval=2, max_position_embeddings=1024
)
BLOCK, ROWS = CFG.block_length, 4
# On top of the random weights: mixing and logits strong enough for a text that varies.
LIVELY = {"out_proj": 20.0, "o_proj": 20.0, "down_proj": 3.0, "embed_tokens": 0.5, "lm_head": 3.0}
CORPUS = ["the own fox ran over the hill and the other fox", "žluťoučký kůň 你好 🙂"] * 20


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Compiling is what these tests cost; what they check does not need fast programs."""
    with unoptimised():
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, train_bpe(CORPUS, 300), model_max_length=1024)
    return Tokenizer.load(folder)


@functools.cache
def params():
    def scaled(path, array):
        name = path_name(path)
        scale = next((s for end, s in LIVELY.items() if name.endswith(end)), 1.0)
        scale *= np.where(np.arange(CFG.vocab_size) == 2, 0.3, 1.0) if name == "lm_head" else 1.0
        return jnp.asarray(array * np.asarray(scale, np.float32))

    return jax.tree_util.tree_map_with_path(scaled, random_params(CFG))


@functools.cache
def generator(tokenizer=None, rows="mapped", **options):
    # The dense expert path compiles fastest; the batched twin takes what `auto` chooses.
    env = Env(rows="mapped", moe_path="dense") if rows == "mapped" else Env()
    return Generator(CFG, params(), tokenizer=tokenizer, env=env, margins=True, **options)


def request(n, max_tokens, *, first=10, seed=0, sample_index=0, stop_strings=(), **settings):
    """A prompt of n tokens."""
    ids = np.random.default_rng(first).integers(10, 300, n)
    return Request(
        prompt=tuple(ids.tolist()),
        max_tokens=max_tokens,
        sampling=SamplerConfig(**settings),
        seed=seed,
        sample_index=sample_index,
        stop_strings=stop_strings,
    )


REQUESTS = (
    request(5, 24, threshold=0.3),
    request(13, 17, first=5, threshold=0.5, presence=1.0, frequency=0.5),
    request(21, 40, first=2, threshold=0.2, temperature=0.8, seed=2**32 - 1),
    request(60, 9, first=3, threshold=0.4, temperature=1.0, top_k=20, top_p=0.9, seed=3),
)


@functools.cache
def completions(tokenizer, driver="full", mode="block", fuse=False):
    made = generator(tokenizer, fuse_commit=fuse)
    return made.complete(REQUESTS, driver=driver, mode=mode)


def facts(completion, *but):
    """Everything that must not depend on how a row was computed: no times, no batch figures."""
    skip = {"prefill_tokens_per_s", "tokens_per_s", "experts_per_layer_union", *but}
    own = dataclasses.asdict(completion)
    own |= own.pop("stats")
    return {name: value for name, value in own.items() if name not in skip}


def with_states(monkeypatch):
    """A list that receives every state which the full driver returns."""
    states, run = [], sampler.generate
    record = lambda *a, **k: states.append(run(*a, **k)) or states[-1]
    monkeypatch.setattr(sampler, "generate", record)
    return states


def test_figures_of_a_completion(tokenizer):
    for request, got in zip(REQUESTS, completions(tokenizer), strict=True):
        n, stats = len(got.token_ids), got.stats
        assert len(got.logprobs) == len(got.confidences) == len(got.revealed_at) == n
        assert n <= request.max_tokens
        assert (got.finish_reason == "length") == (got.token_ids[-1] not in tokenizer.stop_ids)
        assert not set(got.token_ids[:-1]) & set(tokenizer.stop_ids)
        assert max(got.token_ids) < tokenizer.vocab_size and tokenizer.mask_id not in got.token_ids
        assert got.text == tokenizer.decode(got.token_ids, skip_special=True)
        assert (stats.prompt_tokens, stats.reused_tokens, stats.tokens) == (
            len(request.prompt),
            0,
            n,
        )
        assert stats.forwards - stats.previews == (n - 1) // BLOCK  # commits
        assert stats.tpf_previews == n / stats.previews and stats.tpf == n / stats.forwards
        union = stats.experts_per_layer_union
        assert len(stats.experts_per_layer) == len(union) == CFG.num_layers
        assert all(0 < own <= CFG.moe.num_experts for own in stats.experts_per_layer)
        assert min(stats.tokens_per_s, stats.prefill_tokens_per_s) > 0
        np.testing.assert_allclose(got.confidences, np.exp(got.logprobs), rtol=1e-5)


@functools.cache
def alone(tokenizer, row):
    return generator(tokenizer).complete([REQUESTS[row]])[0]


def test_a_batch_of_unequal_prompts_equals_solo_runs(tokenizer):
    for r, together in enumerate(completions(tokenizer)):
        one, figures = alone(tokenizer, r), ("logprobs", "confidences")
        assert facts(one, *figures) == facts(together, *figures)
        for name in figures:
            assert_close("continuation", name, getattr(one, name), getattr(together, name))
        assert one.stats.experts_per_layer_union == one.stats.experts_per_layer
    assert len({c.token_ids for c in completions(tokenizer)}) == ROWS
    assert max(len(set(c.token_ids)) for c in completions(tokenizer)) > 8  # no degenerate text


def test_mapped_rows_are_bit_equal_to_solo_runs(tokenizer):
    for r, together in enumerate(completions(tokenizer)):
        assert facts(alone(tokenizer, r)) == facts(together)


def test_a_mapped_prefill_is_bit_equal_to_solo_runs(tokenizer):
    kept = []
    for requests in (REQUESTS, REQUESTS[:1]):
        list(generator(tokenizer).stream(requests, driver="full", keep_cache=kept.append))
    assert_same_bits(kept[1], kept[0], slice(None), [0])


@pytest.mark.parametrize("driver", ["block", "step"])
def test_drivers_give_the_same_completions(tokenizer, driver):
    pairs = list(zip(completions(tokenizer, driver), completions(tokenizer), strict=True))
    for got, want in pairs:
        assert facts(got) == facts(want)
    # Batch figures are taken when a row's end is seen: the full driver sees all ends at once.
    got, want = max(pairs, key=lambda pair: pair[0].stats.previews)
    assert got.stats.experts_per_layer_union == want.stats.experts_per_layer_union


def prefix(tokens, cache=None):
    """A cache and the causal logits of all tokens, a block of tokens at a time."""
    extend = jitted("extend", CFG, Env(), logits="all")
    cache = empty_cache(CFG, 1, 512) if cache is None else cache
    logits = []
    for i in range(0, len(tokens), BLOCK):
        piece = np.zeros((1, BLOCK), np.int32)
        n = len(tokens[i : i + BLOCK])
        piece[0, :n] = tokens[i : i + BLOCK]
        out = extend(params(), piece, np.array([n], np.int32), cache)
        logits.append(np.asarray(out.logits)[0, :n])
        cache = out.cache
    return cache, np.concatenate(logits)


@pytest.mark.parametrize("r", [0, 1])
def test_a_greedy_row_is_the_plain_loop(tokenizer, r):
    """Passes one by one, decisions in numpy."""
    request, got = REQUESTS[r], completions(tokenizer)[r]
    spare = tuple(range(tokenizer.vocab_size, CFG.vocab_size))
    ids = Ids(
        mask=tokenizer.mask_id,
        stop=tokenizer.stop_ids,
        forbidden=(tokenizer.mask_id, *spare),
        think_close=tokenizer.think_close_id,
    )
    preview = jitted("preview", CFG, Env())
    cache, response, revealed_at = prefix(request.prompt)[0], [], []
    logprobs, previews = [], 0
    experts = np.zeros(CFG.num_layers)
    while len(response) < request.max_tokens and (not response or response[-1] not in ids.stop):

        def denoiser(step, tokens, masked, cache=cache):
            nonlocal previews, experts
            full = np.array([BLOCK], np.int32)
            canvas = np.array([tokens], np.int32), np.array([masked])
            logits, stats = preview(params(), *canvas, full, cache)
            previews += 1
            experts = experts + np.asarray(stats.router.touched)[:, 0].sum(-1)
            return np.asarray(logits)[0]

        limit = min(BLOCK, request.max_tokens - len(response))
        done = denoise_block_numpy(
            denoiser, request.sampling, ids, block=BLOCK, response=tuple(response), limit=limit
        )
        assert done.margin > TOP1_MARGIN  # else choose another prompt
        step_of = {i: s for s, places in enumerate(done.steps) for i in places}
        n = min(done.stop + 1, limit)
        revealed_at += [step_of[i] for i in range(n)]
        logprobs += done.log_probability[:n]
        response += done.tokens[:n]
        cache = prefix(done.tokens[:n], cache)[0]
    assert got.token_ids == tuple(response)
    assert got.revealed_at == tuple(revealed_at)
    assert got.stats.previews == previews
    assert_close("logits", "log-probabilities", got.logprobs, logprobs)
    np.testing.assert_allclose(got.stats.experts_per_layer, experts / previews, atol=0.01)


def test_autoregressive_decoding_is_the_causal_model(tokenizer):
    found = completions(tokenizer, mode="ar")
    for request, got in zip(REQUESTS[:1], found[:1], strict=True):
        n = len(got.token_ids)
        _, logits = prefix([*request.prompt, *got.token_ids])
        logits = logits[len(request.prompt) - 1 : -1]
        logits[:, tokenizer.vocab_size :] = logits[:, tokenizer.mask_id] = -np.inf
        top = np.sort(logits, axis=-1)
        assert (top[:, -1] - top[:, -2]).min() > TOP1_MARGIN
        assert got.token_ids == tuple(logits.argmax(-1).tolist())
        norm = np.log(np.exp(logits - top[:, -1:]).sum(-1))
        assert_close("logits", "log-probabilities", got.logprobs, -norm)
        assert got.revealed_at == (0,) * n
        assert (got.stats.previews, got.stats.forwards) == (0, n - 1)
        assert got.stats.tpf_previews is None and got.stats.experts_per_layer == ()
    assert {len(c.token_ids) <= r.max_tokens for c, r in zip(found, REQUESTS, strict=True)} == {
        True
    }


def assert_equal_but_for_near_ties(monkeypatch, a, b):
    """Tokens are equal wherever no recorded margin is below the limit; at least one row is."""
    states = with_states(monkeypatch)
    clear = 0
    for seed in range(3):
        requests = [dataclasses.replace(r, seed=r.seed ^ seed) for r in REQUESTS]
        requests = [
            dataclasses.replace(r, prompt=r.prompt[seed:], sampling=greedy(r)) for r in requests
        ]
        one, other = a.complete(requests), b.complete(requests)
        margin = np.minimum(*(np.asarray(s.margin) for s in states[-2:]))
        for x, y, near in zip(one, other, margin, strict=True):
            if near >= TOP1_MARGIN:
                clear += 1
                assert (x.token_ids, x.revealed_at) == (y.token_ids, y.revealed_at)
                assert_close("rows_batched", "log-probabilities", x.logprobs, y.logprobs)
    assert clear >= 3


def greedy(request):
    return dataclasses.replace(request.sampling, temperature=0.0)


def test_batched_rows_equal_mapped_ones_but_for_near_ties(tokenizer, monkeypatch):
    batched = generator(tokenizer, rows="batched")
    assert_equal_but_for_near_ties(monkeypatch, generator(tokenizer), batched)


def test_fused_commits_equal_plain_ones_but_for_near_ties(tokenizer, monkeypatch):
    fused = generator(tokenizer, fuse_commit=True)
    assert_equal_but_for_near_ties(monkeypatch, generator(tokenizer), fused)
    for got in fused.complete(REQUESTS):
        assert got.stats.forwards == got.stats.previews


def test_no_recompilation_after_warm_up(tokenizer):
    made = generator(tokenizer)
    cold, _ = made.complete(REQUESTS), made.complete(REQUESTS[:1])
    made.complete([dataclasses.replace(r, stop_strings=(cold[0].text[2:4],)) for r in REQUESTS])
    compiled, watching = [], True

    def note(event, seconds, **_):
        if watching and event.startswith("/jax/core/compile/"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    rng = np.random.default_rng(0)
    ramp = RampConfig(start=4, slope=0.5)
    for i in range(6):
        batch = [
            request(
                int(rng.integers(1, 65)),
                int(rng.integers(1, 65)),
                first=int(rng.integers(100)),
                seed=int(rng.integers(2**32)),
                threshold=float(rng.random()),
                temperature=float(rng.choice([0.0, 1.0])),
                top_k=int(rng.choice([0, 5])),
                presence=float(rng.random()),
                repetition=float(1 + rng.random()),
                response_ramp=ramp if rng.random() < 0.5 else None,
                thinking_ramp=ramp if rng.random() < 0.5 else None,
                stop_strings=("fox",) if i > 3 else (),
            )
            for _ in range(ROWS if i != 3 else 1)
        ]
        thinking = dataclasses.replace(batch[0], prompt=(*batch[0].prompt[1:], 3))
        made.complete([thinking, *batch[1:]])
    watching = False
    assert compiled == []


# A conversation.


def last(events):
    return next(event for event in events if isinstance(event, DoneEvent)).completion


def test_a_continued_conversation_equals_cold_runs(tokenizer):
    made, prompt, kept = generator(tokenizer), REQUESTS[1].prompt, []
    for turn in range(3):
        asked = dataclasses.replace(REQUESTS[1], prompt=prompt, sampling=greedy(REQUESTS[1]))
        options = {"cache": kept[-1]} if kept else {}
        reused = int(kept[-1].length[0]) if kept else 0
        warm = last(made.stream([asked], driver="full", keep_cache=kept.append, **options))
        (cold,) = made.complete([asked])
        assert (warm.token_ids, warm.finish_reason) == (cold.token_ids, cold.finish_reason)
        assert_close("logits", "log-probabilities", warm.logprobs, cold.logprobs)
        assert warm.stats.reused_tokens == reused and (reused > 0) == (turn > 0)
        assert warm.stats.prompt_tokens == len(prompt) == int(kept[-1].length[0])
        prompt = (*prompt, *warm.token_ids, 30 + turn, 40 + turn)


# Text.


def texts(events, row):
    return [e for e in events if isinstance(e, TextEvent) and e.row == row]


def assert_text_events(events, row, completion, tokenizer):
    """The deltas joined are the completion, and nothing follows the end."""
    deltas = texts(events, row)
    assert "".join(e.text for e in deltas) == completion.text
    assert sum((e.token_ids for e in deltas), ()) == completion.token_ids
    mine = [e for e in events if e.row == row]
    assert isinstance(mine[-1], DoneEvent)
    assert sum(isinstance(e, DoneEvent) for e in mine) == 1


def completed_at(ids, strings, tokenizer):
    """How many tokens a stream has when one of the strings is complete; all if none ever is."""
    decoder, text = StreamDecoder(tokenizer, skip_special=True), ""
    for n, token in enumerate(ids, 1):
        text += decoder.push([token])
        if any(s in text for s in strings):
            return n
    return len(ids)


def test_stop_strings_cut_exactly(tokenizer):
    made = generator(tokenizer)
    base = dataclasses.replace(REQUESTS[2], seed=5)
    (cold,) = made.complete([base])
    assert cold.finish_reason == "length" and len(cold.text) > 30
    borders = [len(tokenizer.decode(cold.token_ids[:n], skip_special=True)) for n in (8, 16, 24)]
    places = sorted(
        {max(b + d, 0) for b in borders for d in (-2, -1, 0)} | {0, 5, len(cold.text) - 2}
    )
    cut_in_last_block = False
    pieces = [cold.text[p : p + 3] for p in places]
    misses = [piece[:-1] + "\x00" for piece in pieces]
    for i in range(0, len(pieces), ROWS - 1):
        strings = [*pieces[i : i + ROWS - 1], misses[i]]
        strings += ["\x00"] * (ROWS - len(strings))
        rows = [dataclasses.replace(base, stop_strings=(s, "\x00\x00")) for s in strings]
        events = list(made.stream(rows, driver="block"))
        done = {e.row: e.completion for e in events if isinstance(e, DoneEvent)}
        for r, s in enumerate(strings):
            at = cold.text.find(s)
            n = completed_at(cold.token_ids, [s], tokenizer)
            assert done[r].text == (cold.text if at < 0 else cold.text[:at]), s
            assert done[r].token_ids == cold.token_ids[:n], s
            assert done[r].finish_reason == ("length" if at < 0 else "stop"), s
            assert_close("continuation", s, done[r].logprobs, cold.logprobs[:n])
            assert done[r].stats.tokens == n
            assert_text_events(events, r, done[r], tokenizer)
            cut_in_last_block |= at >= 0 and n > len(cold.token_ids) - BLOCK
    assert cut_in_last_block


def test_a_stop_string_ends_its_row_only(tokenizer):
    made, cold = generator(tokenizer), completions(tokenizer)
    stop = cold[0].text[3:6]
    rows = [dataclasses.replace(REQUESTS[0], stop_strings=(stop,)), *REQUESTS[1:]]
    for driver in ("block", "step"):
        got = made.complete(rows, driver=driver)
        assert got[0].text == cold[0].text[: cold[0].text.find(stop)]
        assert got[0].stats.previews <= cold[0].stats.previews
        for a, b in zip(got[1:], cold[1:], strict=True):
            assert facts(a) == facts(b)


@pytest.mark.parametrize("driver", ["full", "block", "step"])
def test_events_join_to_the_completions(tokenizer, driver):
    events = list(generator(tokenizer).stream(REQUESTS, driver=driver, trace=driver != "full"))
    done = {e.row: e.completion for e in events if isinstance(e, DoneEvent)}
    for r, want in enumerate(completions(tokenizer)):
        assert facts(done[r]) == facts(want)
        assert_text_events(events, r, want, tokenizer)
        if driver != "full":
            assert_canvases(events, r, want)
    assert any(isinstance(e, CanvasEvent) for e in events) == (driver != "full")


def assert_canvases(events, row, completion):
    """Steps count up, fixed places stay, and the last canvas of each block is the text."""
    blocks = collections.defaultdict(list)
    for e in events:
        if isinstance(e, CanvasEvent) and e.row == row:
            blocks[e.start // BLOCK].append(e)
    assert sum(map(len, blocks.values())) == completion.stats.previews
    assert list(blocks) == list(range(-(-len(completion.token_ids) // BLOCK)))
    for b, canvases in blocks.items():
        assert [c.step for c in canvases] == list(range(len(canvases)))
        for before, after in itertools.pairwise(canvases):
            for i in range(BLOCK):
                if not before.masked[i]:
                    assert not after.masked[i]
                    for name in ("tokens", "logprobs", "confidences", "revealed_at"):
                        assert getattr(after, name)[i] == getattr(before, name)[i]
        for c in canvases:
            assert CFG.mask_token_id not in c.tokens  # masked places show a guess
            assert all((at == -1) == m for at, m in zip(c.revealed_at, c.masked, strict=True))
            assert all(0 <= p <= 1 for p in c.confidences)
        end, span = canvases[-1], slice(b * BLOCK, (b + 1) * BLOCK)
        for name, field in (
            ("tokens", "token_ids"),
            ("logprobs", "logprobs"),
            ("confidences", "confidences"),
            ("revealed_at", "revealed_at"),
        ):
            want = getattr(completion, field)[span]
            assert getattr(end, name)[: len(want)] == want
        assert not any(end.masked[: len(completion.token_ids[span])])


def test_a_row_can_end_in_the_middle_of_a_character(tokenizer):
    """Every limit of one text: decoded in whole or as a stream, it is the same."""
    made = generator(tokenizer)
    base = dataclasses.replace(REQUESTS[2], seed=9)
    rows = [dataclasses.replace(base, max_tokens=n) for n in range(1, 17)]
    broken = 0
    for i in range(0, 16, ROWS):
        events = list(made.stream(rows[i : i + ROWS]))
        for e in events:
            if isinstance(e, DoneEvent):
                assert_text_events(events, e.row, e.completion, tokenizer)
                whole = tokenizer.decode(e.completion.token_ids, skip_special=True)
                assert e.completion.text == whole
                broken += whole.endswith("�")
    assert broken


def test_without_a_tokenizer_only_the_limit_ends_a_row(tokenizer):
    got = generator(None).complete(REQUESTS)
    for request, one in zip(REQUESTS, got, strict=True):
        assert one.text is None and one.finish_reason == "length"
        assert len(one.token_ids) == request.max_tokens
        assert CFG.mask_token_id not in one.token_ids


def test_nan_weights_end_in_an_error(tokenizer):
    broken = params().replace(lm_head=params().lm_head.at[:, 7].set(jnp.nan))
    made = Generator(CFG, broken, tokenizer=tokenizer, env=generator(tokenizer).env, margins=True)
    for got in made.complete(REQUESTS):
        assert (got.finish_reason, got.token_ids, got.text) == ("error", (), "")
        assert (got.stats.previews, got.stats.tpf) == (1, 0.0)


def test_a_thinking_ramp_closes_what_the_prompt_left_open(tokenizer):
    ramp, opened = RampConfig(start=10, slope=50.0), (*REQUESTS[0].prompt, tokenizer.think_open_id)
    settings = SamplerConfig(threshold=0.3, thinking_ramp=ramp)
    rows = [
        dataclasses.replace(REQUESTS[0], prompt=prompt, sampling=settings, max_tokens=16)
        for prompt in (opened, (*opened, tokenizer.think_close_id), REQUESTS[0].prompt, opened)
    ]
    close = [
        c.token_ids.index(tokenizer.think_close_id)
        if tokenizer.think_close_id in c.token_ids
        else -1
        for c in generator(tokenizer).complete(rows)
    ]
    assert close[0] == close[3] and 11 <= close[0] < 16 and close[1] == close[2] == -1


def test_samples_of_a_request_differ(tokenizer):
    rows = [dataclasses.replace(REQUESTS[2], sample_index=i) for i in (0, 1, 2, 0)]
    got = generator(tokenizer).complete(rows)
    assert got[0].token_ids == got[3].token_ids == completions(tokenizer)[2].token_ids
    assert len({c.token_ids for c in got}) == 3


# What cannot be asked for.

FINE = {"prompt": (11, 12), "max_tokens": 4, "sampling": SamplerConfig()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": ()}, "prompt"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"sample_index": -1}, "sample_index is -1"),
        ({"sample_index": 2**32}, "sample_index is 4294967296"),
        ({"prompt": (11, 320)}, r"\[320\].*vocabulary of 320"),
        ({"prompt": (-1,)}, r"\[-1\].*vocabulary of 320"),
        ({"prompt": (11,) * 1000, "max_tokens": 25}, "1000 tokens and max_tokens 25.*1024"),
        ({"max_tokens": 2**40}, "context of 1024"),
        ({"stop_strings": ("a", "")}, "stop strings"),
    ],
)
def test_bad_requests_are_named(tokenizer, change, says):
    with pytest.raises(CloverError, match=says):
        generator(tokenizer).complete([Request(**{**FINE, **change})])


def test_bad_batches_are_named(tokenizer):
    made = generator(tokenizer)
    fine = Request(**FINE)
    raw = dataclasses.replace(fine, sampling=SamplerConfig(confidence="raw"))
    with pytest.raises(CloverError, match="structure"):
        made.complete([fine, raw])
    with pytest.raises(CloverError, match="request"):
        made.complete([])
    with pytest.raises(CloverError, match="tokenizer"):
        generator(None).complete([dataclasses.replace(fine, stop_strings=("a",))])
    autoregressive = Generator(
        CFG.replace(bd_gdn=None), params(), tokenizer=tokenizer, env=Env(rows="mapped")
    )
    with pytest.raises(CloverError, match="mode ar"):
        autoregressive.complete([fine])
    with pytest.raises(CloverError, match="belong together"):
        Generator(CFG.replace(vocab_size=299), params(), tokenizer=tokenizer, env=Env())
    with pytest.raises(CloverError, match="mask"):
        Generator(CFG.replace(mask_token_id=6), params(), tokenizer=tokenizer, env=Env())


def test_bad_continuations_are_named(tokenizer):
    made, kept = generator(tokenizer), []
    asked = dataclasses.replace(REQUESTS[1], sampling=greedy(REQUESTS[1]))
    last(made.stream([asked], driver="full", keep_cache=kept.append))
    bad = {
        "prompt": [dataclasses.replace(asked, prompt=asked.prompt[:-1])],
        "one row": [asked, asked],
        "cells": [dataclasses.replace(asked, max_tokens=512)],
    }
    for says, requests in bad.items():
        with pytest.raises(CloverError, match=says):
            list(made.stream(requests, driver="full", cache=kept[0]))


def test_forbidden_are_the_masks_and_what_the_tokenizer_does_not_know(tokenizer):
    past = set(range(tokenizer.vocab_size, CFG.vocab_size))
    ids = lambda cfg, known: set(np.flatnonzero(forbidden_ids(cfg, known)).tolist())
    assert ids(CFG, tokenizer) == {CFG.mask_token_id, tokenizer.mask_id} | past
    base = CFG.replace(bd_gdn=None, mask_token_id=None, **{"moe.coreset": None})
    assert ids(base, tokenizer) == {tokenizer.mask_id} | past  # an AR base's tokenizer has one, too
    assert ids(CFG, None) == {CFG.mask_token_id} and not ids(base, None)
