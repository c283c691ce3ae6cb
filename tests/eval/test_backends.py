"""Backends: our model against its generator, and servers in the forms that they answer in."""

import dataclasses
import functools
import time
from pathlib import Path

import pytest

from clover_jax.data.chat import tokenize_prompt
from clover_jax.diffusion.generate import Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.eval import backends, openai_api
from clover_jax.eval.backends import endpoint_backend, local_backend
from clover_jax.eval.harness import Problem, Question, Task
from tests.diffusion.test_generate import CFG, params, tokenizer
from tests.helpers.compilation import unoptimised
from tests.helpers.server import Refusal, serve

__all__ = ["serve", "tokenizer"]  # fixtures
SAMPLING = SamplerConfig(threshold=0.05)
QUESTIONS = [Question(f"{word} ants", 20, True, 7, i) for i, word in enumerate(("two", "three"))]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with unoptimised():
        yield


@functools.cache
def generator(tokenizer):
    return Generator(CFG, params(), tokenizer=tokenizer, env=Env(rows="mapped", moe_path="dense"))


def local(tokenizer, spec, batch=3):
    return local_backend(spec, generator(tokenizer), sampling=SAMPLING, weights="w", batch=batch)


@pytest.mark.parametrize("mode", ["ar", "block"])
def test_ours_is_the_generator_on_the_chat_path(tokenizer, mode):
    replies = local(tokenizer, mode).answer(QUESTIONS)  # a short batch is filled up
    requests = []
    for question in QUESTIONS:
        message = [{"role": "user", "content": question.prompt}]
        prompt = tuple(tokenize_prompt(tokenizer, message, enable_thinking=True))
        requests.append(
            Request(
                prompt=prompt, max_tokens=20, sampling=SAMPLING, seed=7, sample_index=question.index
            )
        )
    wanted = generator(tokenizer).complete([*requests, requests[-1]], mode=mode)
    assert len(replies) == 2
    for request, reply, want in zip(requests, replies, wanted, strict=False):
        assert reply.prompt_ids == request.prompt
        assert (reply.token_ids, reply.text) == (want.token_ids, want.text)
        assert (reply.tokens, reply.finish) == (want.stats.tokens, want.finish_reason)
        assert (reply.previews, reply.forwards) == (want.stats.previews, want.stats.forwards)
        assert reply.experts == want.stats.experts_per_layer and reply.seconds > 0


def test_specs(tokenizer):
    spec = "block:threshold=1,policy=entropy,steps=4,window=2,block_length=4,fuse_commit=true"
    backend = local(tokenizer, f"{spec},coreset=false")
    assert backend.generator.cfg == CFG.replace(block_length=4, **{"moe.coreset": None})
    assert backend.generator.fuse_commit and backend.mode == "block"
    assert backend.sampling == SamplerConfig(threshold=1.0, policy="entropy", steps=4, window=2)
    named = "ar:checkpoint=some/folder,name=parent"
    assert backends.checkpoint_of(named) == Path("some/folder")
    assert local(tokenizer, named).name == "parent" and backends.checkpoint_of(spec) is None
    other = local(tokenizer, "block")
    assert other.settings() != backend.settings()
    assert other.settings() == local(tokenizer, "block:threshold=0.05").settings()


@pytest.mark.parametrize(
    ("spec", "fragment"),
    [
        ("diffusion", "expected ar or block"),
        ("block:speed=3", "speed"),
        ("block:threshold=high", "threshold"),
        ("block:threshold", "NAME=VALUE"),
        ("block:block_length=0", "block_length"),
        ("block:steps=-1", "steps"),
    ],
)
def test_bad_specs(tokenizer, spec, fragment):
    with pytest.raises(CloverError, match=fragment):
        local(tokenizer, spec)


def test_backends_refuse(tokenizer):
    with pytest.raises(CloverError, match="batch is 0"):
        local(tokenizer, "ar", batch=0)
    with pytest.raises(CloverError, match="needs a tokenizer"):
        local_backend("ar", without_tokenizer(), sampling=SAMPLING, weights="w")
    for spec, fragment in (
        ("http://x,api=completions", "no tokenizer"),
        ("http://x,batch=0", "batch 0"),
        ("http://x,speed=1", "speed"),
        ("http://x,api=other", "api"),
    ):
        with pytest.raises(CloverError, match=fragment):
            endpoint_backend(spec, None)


def without_tokenizer():
    return Generator(CFG, params(), tokenizer=None, env=Env())


def test_oracle_bound_needs_reference_texts(tokenizer):
    task = Task("t", (Problem("two ants", "text of no item"),), lambda p, t: [], 9)
    assert backends.oracle_bound(local(tokenizer, "block"), [task], 4) is None


# --- servers ------------------------------------------------------------------------------------


def test_chat_servers(serve):
    """Thoughts kept, taken out, or absent; ids and counts where they are given."""
    asked = []

    def answer(request):
        asked.append(request)
        question = request["messages"][0]["content"]
        if question == "two ants":
            message = {"content": "6", "reasoning_content": "2 * 3 = 6"}
            choice = {"message": message, "finish_reason": "stop", "token_ids": [5, 6]}
            return {"choices": [choice], "usage": {"completion_tokens": 9}}
        message = {"content": "still thinking"}
        return {"choices": [{"message": message, "finish_reason": "length"}]}

    url = serve(answer)
    backend = endpoint_backend(f"{url},model=mercury,batch=2", None)
    assert (backend.name, backend.batch) == ("mercury", 2)
    first, second = backend.answer(QUESTIONS)
    assert first.text == "<think>\n2 * 3 = 6\n</think>\n\n6"
    assert (first.token_ids, first.tokens, first.finish) == ((5, 6), 9, "stop")
    assert (second.text, second.finish, second.tokens) == ("still thinking", "length", 0)
    assert first.previews is first.forwards is None and first.seconds > 0
    body = next(r for r in asked if r["messages"][0]["content"] == "two ants")
    assert (body["model"], body["max_tokens"], body["seed"], body["temperature"]) == (
        "mercury", 20, 7, 0,
    )  # fmt: skip
    assert body["chat_template_kwargs"] == {"enable_thinking": True}


def test_a_finished_answer_without_thoughts_is_an_answer(serve):
    message = {"content": "6\n\nants"}  # a blank line is no end
    url = serve(lambda _: {"choices": [{"message": message, "finish_reason": "stop"}]})
    (reply,) = endpoint_backend(url, None).answer(QUESTIONS[:1])
    assert reply.text.endswith("</think>\n\n6\n\nants")
    question = dataclasses.replace(QUESTIONS[0], thinking=False)
    (reply,) = endpoint_backend(url, None).answer([question])
    assert reply.text == "6\n\nants"


def test_completions_send_our_ids(serve, tokenizer):
    answer = lambda request: {
        "choices": [{"text": str(len(request["prompt"])), "finish_reason": "stop"}]
    }
    backend = endpoint_backend(f"{serve(answer)},api=completions", tokenizer)
    for question, reply in zip(QUESTIONS, backend.answer(QUESTIONS), strict=True):
        message = [{"role": "user", "content": question.prompt}]
        assert reply.prompt_ids == tuple(tokenize_prompt(tokenizer, message, enable_thinking=True))
        assert reply.text == str(len(reply.prompt_ids))


def test_servers_that_are_busy_refuse_or_talk_nonsense(serve, monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    calls = iter([503, 429])

    def busy(_request):
        status = next(calls, None)
        if status is not None:
            raise Refusal(status, {"error": "busy"})
        return {"choices": [{"message": {"content": "6"}}]}

    (reply,) = endpoint_backend(serve(busy), None).answer(QUESTIONS[:1])
    assert (reply.finish, waited) == ("unknown", [1, 2])

    def refuse(_request):
        raise ValueError("no such model")

    with pytest.raises(CloverError, match="refuses: status 400"):
        endpoint_backend(serve(refuse), None).answer(QUESTIONS[:1])
    assert len(waited) == 2  # not asked again
    for nonsense in ([], {}, {"choices": []}, {"choices": [{}]}, {"choices": ["x"]}):
        with pytest.raises(CloverError, match="no completion"):
            endpoint_backend(serve(lambda _, n=nonsense: n), None).answer(QUESTIONS[:1])
    with pytest.raises(CloverError, match="cannot be asked"):
        endpoint_backend("http://127.0.0.1:9/v1,attempts=2", None).answer(QUESTIONS[:1])
    assert waited[2:] == [1]


def test_a_key_that_no_header_can_hold_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(openai_api.KEY_VARIABLE, "sk-SECRET\r")
    with pytest.raises(CloverError, match="no header can") as raised:
        openai_api.post("http://localhost:9/v1/completions", {}, seconds=1.0, attempts=1)
    assert "SECRET" not in str(raised.value)
