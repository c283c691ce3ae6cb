"""Per-token log-probabilities of an OpenAI-compatible server against ours.

The server is asked for a greedy completion with log-probabilities, the prompt as token ids; where
it echoes the prompt with its log-probabilities, those are compared, too. Ours are computed on the
very tokens that it returned, so that a different choice ends nothing.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clover_jax.config import ModelConfig
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.errors import CloverError
from clover_jax.eval.openai_api import SHOWN, RefusedError, post
from clover_jax.model.transformer import Params
from clover_jax.verify.limits import log_softmax
from clover_jax.verify.ours import CausalPasses

_TOKEN_ID = re.compile(r"token_id:(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One prompt's tokens and log-probabilities from a server.

    Attributes:
        tokens: prompt and completion.
        prompt: how many of them are the prompt.
        logprobs: nats, aligned with `tokens`; None where the server gave none.
    """

    tokens: tuple[int, ...]
    prompt: int
    logprobs: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointRow:
    """One prompt's comparison.

    Attributes:
        prompt: tokens of the prompt.
        compared_prompt: prompt tokens with a log-probability.
        compared: completion tokens with a log-probability.
        mean_gap: mean |ours - theirs|, nats.
        max_gap: its maximum.
        worst: position of the maximum, counted from the prompt's start.
        not_greedy: completion tokens that are not our most likely one.
        ok: whether the maximum is inside the limit.
    """

    prompt: int
    compared_prompt: int
    compared: int
    mean_gap: float
    max_gap: float
    worst: int
    not_greedy: int
    ok: bool


def ask(
    url: str,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    *,
    model: str,
    max_tokens: int,
    seconds: float,
) -> Answer:
    """A greedy completion with log-probabilities, with the prompt's where the server echoes it.

    Args:
        url: the API's base, such as http://localhost:30000/v1.
        prompt: token ids.
        tokenizer: reads token texts back where the server gives no ids.
        model: name that the server knows the model by.
        max_tokens: of the completion.
        seconds: until the server is given up.

    Raises:
        CloverError: the server cannot be reached, refuses, or gives no log-probabilities.
    """
    body: dict[str, Any] = {
        "model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
        "logprobs": 1, "echo": True,
        "return_tokens_as_token_ids": True,  # vLLM; others ignore it
    }  # fmt: skip
    try:
        reply = post(f"{url.rstrip('/')}/completions", body, seconds=seconds)
    except RefusedError:  # no echo, or no id tokens: ask for less
        body = {k: v for k, v in body.items() if k not in ("echo", "return_tokens_as_token_ids")}
        try:
            reply = post(f"{url.rstrip('/')}/completions", body, seconds=seconds)
        except RefusedError as refused:
            raise CloverError(f"{url} refuses: {refused}") from None
    found = _tokens(reply, url)
    ids = [_token_id(token, tokenizer, url) for token, _ in found]
    logprobs = [logprob for _, logprob in found]
    if len(ids) >= len(prompt) and ids[: len(prompt)] == list(prompt):
        return Answer(tokens=tuple(ids), prompt=len(prompt), logprobs=tuple(logprobs))
    nothing = (None,) * len(prompt)
    return Answer(
        tokens=(*prompt, *ids), prompt=len(prompt), logprobs=(*nothing, *logprobs)
    )  # fmt: skip


def compare_endpoint(
    cfg: ModelConfig,
    params: Params,
    answers: Sequence[Answer],
    *,
    limit: float,
    progress: Callable[[str], None],
) -> list[EndpointRow]:
    """Our log-probability of every token that a server gave one for.

    Raises:
        CloverError: an answer holds no log-probability at all, or an id that we do not have.
    """
    longest = max(len(answer.tokens) for answer in answers)
    passes = CausalPasses(params, cfg, rows=1, capacity=longest)
    rows = []
    for i, answer in enumerate(answers):
        progress(f"prompt {i + 1} of {len(answers)}")
        tokens = np.asarray([answer.tokens], np.int32)
        if tokens.max() >= cfg.vocab_size:
            raise CloverError(
                f"the server returned the id {tokens.max()}: expected ids below {cfg.vocab_size}"
            )
        # One width for all prompts, so that one program serves them.
        padded = np.pad(tokens, ((0, 0), (0, longest - tokens.shape[1])))
        logits, _ = passes.read(padded, [longest])
        ours = log_softmax(np.asarray(logits)[0])
        given = [t for t in range(1, len(answer.tokens)) if answer.logprobs[t] is not None]
        if not given:
            raise CloverError(f"the server gave no log-probability for prompt {i + 1}")
        gaps = np.asarray([ours[t - 1, answer.tokens[t]] - answer.logprobs[t] for t in given])
        gaps = np.abs(gaps)
        best = ours.argmax(axis=-1)
        completion = range(answer.prompt, len(answer.tokens))
        rows.append(
            EndpointRow(
                prompt=answer.prompt,
                compared_prompt=sum(t < answer.prompt for t in given),
                compared=sum(t >= answer.prompt for t in given),
                mean_gap=float(gaps.mean()),
                max_gap=float(gaps.max()),
                worst=given[int(gaps.argmax())],
                not_greedy=sum(int(best[t - 1]) != answer.tokens[t] for t in completion),
                ok=bool(gaps.max() <= limit),
            )
        )
    return rows


def _tokens(reply: Any, url: str) -> list[tuple[Any, float | None]]:
    """(token, log-probability) of a completion, in either form of the API."""
    try:
        logprobs = reply["choices"][0]["logprobs"]
        if "content" in logprobs:  # the newer form
            return [(entry, _number(entry["logprob"])) for entry in logprobs["content"]]
        texts, values = logprobs["tokens"], logprobs["token_logprobs"]
        return [(t, _number(v)) for t, v in zip(texts, values, strict=True)]
    except (KeyError, IndexError, TypeError, ValueError):
        shown = json.dumps(reply)[:SHOWN]
        raise CloverError(f"{url} gives no log-probabilities: {shown}") from None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _token_id(token: Any, tokenizer: Tokenizer, url: str) -> int:
    """The id that a server's token stands for: given as such, or by its text."""
    text = token
    if isinstance(token, dict):
        if isinstance(token.get("id"), int):
            return token["id"]
        text = token.get("token")
    if not isinstance(text, str):
        raise CloverError(f"{url} gives the token {token!r}: expected a text or an id")
    match = _TOKEN_ID.fullmatch(text)
    if match:
        return int(match[1])
    ids = tokenizer.encode(text, special=True)
    if len(ids) != 1:
        raise CloverError(
            f"{url} gives the token {text!r} without its id, and it is {len(ids)} tokens of this "
            "folder's tokenizer: another model, or a server that cannot tell ids"
        )
    return ids[0]
