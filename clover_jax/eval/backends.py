"""Ways to answer a harness' questions: our model in either mode, and OpenAI-compatible servers."""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from clover_jax.config import override, parse_setting
from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.tokenizer import THINK_CLOSE, THINK_OPEN, Tokenizer
from clover_jax.diffusion.generate import Completion, Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.errors import CloverError
from clover_jax.eval.compilations import compilations
from clover_jax.eval.harness import Question, Reply, Task
from clover_jax.eval.openai_api import RefusedError, post
from clover_jax.eval.replay import Block, Replay, reference_blocks, replay


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """How our model is run, beyond its sampling settings.

    Attributes:
        block_length: the checkpoint's if None.
        fuse_commit: commit a block and preview the next one in one pass.
        coreset: share an expert subset in a block, where the checkpoint has one.
    """

    block_length: int | None = None
    fuse_commit: bool = False
    coreset: bool = True


@dataclasses.dataclass(frozen=True)
class LocalBackend:
    """Our model.

    Attributes:
        name: row of the tables.
        generator: the model with its tokenizer, as it is to be run.
        mode: `ar` or `block`.
        sampling: threshold, order, schedule and the like.
        weights: which weights these are, from `fingerprint`.
        batch: rows answered together.
    """

    name: str
    generator: Generator
    mode: Literal["ar", "block"]
    sampling: SamplerConfig
    weights: str
    batch: int = 32

    def __post_init__(self) -> None:
        if self.generator.tokenizer is None:
            raise CloverError("evaluation needs a tokenizer, and this folder has none")
        if self.batch < 1:
            raise CloverError(f"batch is {self.batch}: expected at least 1")

    def settings(self) -> dict[str, Any]:
        """See `Backend`."""
        return {
            "kind": "clover",
            "mode": self.mode,
            "weights": self.weights,
            "config": self.generator.cfg.hash,
            "block_length": self.generator.cfg.block_length,
            "fuse_commit": self.generator.fuse_commit,
            "rows": self.generator.env.rows,
            "batch": self.batch,
            "sampling": dataclasses.asdict(self.sampling),
        }

    def answer(self, questions: Sequence[Question]) -> list[Reply]:
        """See `Backend`. A batch that compiled a program is run again, for its time."""
        requests = [self._request(q) for q in questions]
        # A short part is filled up, so that one compiled program serves all of them.
        padded = [*requests, *[requests[-1]] * (self.batch - len(requests))]
        before = compilations()
        completions, seconds = self._timed(padded)
        if compilations() > before:
            completions, seconds = self._timed(padded)
        return [
            _reply(request, completion, seconds / len(requests))
            for request, completion in zip(requests, completions, strict=False)
        ]

    def _timed(self, requests: Sequence[Request]) -> tuple[list[Completion], float]:
        began = time.perf_counter()
        completions = self.generator.complete(requests, mode=self.mode)
        return completions, time.perf_counter() - began

    def _request(self, question: Question) -> Request:
        assert self.generator.tokenizer is not None
        messages = [{"role": "user", "content": question.prompt}]
        prompt = tokenize_prompt(
            self.generator.tokenizer, messages, enable_thinking=question.thinking
        )
        return Request(
            prompt=tuple(prompt),
            max_tokens=question.max_tokens,
            sampling=self.sampling,
            seed=question.seed,
            sample_index=question.index,
        )


def _reply(request: Request, completion: Completion, seconds: float) -> Reply:
    stats = completion.stats
    return Reply(
        text=completion.text or "",
        prompt_ids=request.prompt,
        token_ids=completion.token_ids,
        finish=completion.finish_reason,
        tokens=stats.tokens,
        previews=stats.previews,
        forwards=stats.forwards,
        seconds=seconds,
        experts=stats.experts_per_layer,
    )


def local_backend(
    spec: str,
    generator: Generator,
    *,
    sampling: SamplerConfig,
    weights: str,
    batch: int = 32,
) -> LocalBackend:
    """A backend from a line such as `ar`, `block` or `block:threshold=0.8,block_length=16`.

    Args:
        spec: a mode, then fields of `Decoder` and `SamplerConfig`; also the backend's name.
        generator: the model; the spec's settings are applied to a variant of it.
        sampling: what the spec does not set.
        weights: from `fingerprint`.
        batch: rows answered together.

    Raises:
        CloverError: another mode, an unknown setting, or a value out of range.
    """
    mode, _, rest = spec.partition(":")
    if mode not in ("ar", "block"):
        raise CloverError(
            f"backend is {spec!r}: expected ar or block, or settings after it, such as "
            "block:threshold=0.8,block_length=16"
        )
    words = [word for word in rest.split(",") if word]
    own = {field.name for field in dataclasses.fields(Decoder)}
    decoder = override(Decoder(), [w for w in words if parse_setting(w)[0] in own])
    sampling = override(sampling, [w for w in words if parse_setting(w)[0] not in own])
    cfg = generator.cfg
    if decoder.block_length is not None:
        cfg = cfg.replace(block_length=decoder.block_length)
    if not decoder.coreset:
        cfg = cfg.replace(**{"moe.coreset": None})
    variant = generator.variant(cfg=cfg, fuse_commit=decoder.fuse_commit or generator.fuse_commit)
    return LocalBackend(spec, variant, mode, sampling, weights, batch)


def fingerprint(folder: Path) -> str:
    """SHA-256 of a checkpoint folder's weights.

    Raises:
        CloverError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CloverError(f"{folder} holds no safetensors: expected a checkpoint folder")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """How a server is asked.

    Attributes:
        model: name that the server knows the model by.
        api: `chat` sends messages, and the server's template renders them; `completions` sends
            our rendered prompt as token ids, which only a server with this tokenizer can read.
        batch: questions in flight at once.
        seconds: until an attempt is given up.
        attempts: of a question that a busy or broken server does not answer.
        temperature: of the draws.
    """

    model: str = "default"
    api: Literal["chat", "completions"] = "chat"
    batch: int = 8
    seconds: float = 120.0
    attempts: int = 4
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if min(self.batch, self.attempts, self.seconds) <= 0 or self.temperature < 0:
            raise CloverError(
                f"endpoint has batch {self.batch}, attempts {self.attempts}, seconds "
                f"{self.seconds}, temperature {self.temperature}: expected numbers above 0 (the "
                "temperature may be 0)"
            )


@dataclasses.dataclass(frozen=True)
class EndpointBackend:
    """An OpenAI-compatible server. Its passes are not known, so it has no tokens per forward.

    Attributes:
        name: row of the tables.
        url: the API's base, such as http://localhost:30000/v1.
        endpoint: how it is asked.
        tokenizer: renders prompts for `completions`; not used by `chat`.
    """

    name: str
    url: str
    endpoint: Endpoint
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if self.endpoint.api == "completions" and self.tokenizer is None:
            raise CloverError(
                f"endpoint {self.url}: api completions sends token ids, and there is no "
                "tokenizer; use api=chat"
            )

    @property
    def batch(self) -> int:
        """See `Backend`."""
        return self.endpoint.batch

    def settings(self) -> dict[str, Any]:
        """See `Backend`. The address is none of it: a server may move."""
        return {
            "kind": "endpoint",
            "model": self.endpoint.model,
            "api": self.endpoint.api,
            "temperature": self.endpoint.temperature,
            "batch": self.batch,
        }

    def answer(self, questions: Sequence[Question]) -> list[Reply]:
        """See `Backend`."""
        began = time.perf_counter()
        with ThreadPoolExecutor(max_workers=self.batch) as pool:
            found = list(pool.map(self._ask, questions))
        seconds = (time.perf_counter() - began) / len(questions)
        return [dataclasses.replace(reply, seconds=seconds) for reply in found]

    def _ask(self, question: Question) -> Reply:
        how = self.endpoint
        body: dict[str, Any] = {
            "model": how.model,
            "max_tokens": question.max_tokens,
            "temperature": how.temperature,
            "seed": question.seed,
            "return_token_ids": True,  # vLLM; others ignore it
        }
        messages = [{"role": "user", "content": question.prompt}]
        prompt: list[int] | None = None
        if how.api == "completions":
            assert self.tokenizer is not None
            prompt = tokenize_prompt(self.tokenizer, messages, enable_thinking=question.thinking)
            body |= {"prompt": prompt}
        else:
            # vLLM, SGLang and llama.cpp give this to the chat template; others ignore it.
            body |= {
                "messages": messages,
                "chat_template_kwargs": {"enable_thinking": question.thinking},
            }
        path = "chat/completions" if how.api == "chat" else "completions"
        url = f"{self.url.rstrip('/')}/{path}"
        try:
            reply = post(url, body, seconds=how.seconds, attempts=how.attempts)
        except RefusedError as refused:
            raise CloverError(f"{url} refuses: {refused}") from None
        try:
            return _from_server(reply, prompt, question.thinking)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CloverError(f"{url} gives no completion ({error!r}): {reply!r:.300}") from None


def endpoint_backend(spec: str, tokenizer: Tokenizer | None) -> EndpointBackend:
    """A backend from `URL` or `URL,model=NAME,api=completions,batch=16`; see `Endpoint`.

    Raises:
        CloverError: an unknown setting, or a value out of range.
    """
    url, *words = spec.split(",")
    how = override(Endpoint(), words)
    name = url if how.model == Endpoint.model else how.model
    return EndpointBackend(name, url, how, tokenizer)


def oracle_bound(
    backend: LocalBackend, chosen: Sequence[Task], per_task: int, batch: int = 32
) -> Replay | None:
    """Replay of reference answers by the oracle rule: what no reveal rule can exceed.

    Args:
        backend: in block mode.
        chosen: tasks; those whose problems have no reference text are left out.
        per_task: reference answers of each.
        batch: blocks denoised together.

    Returns:
        See `replay`; None where no task has reference texts.
    """
    generator = backend.generator
    assert generator.tokenizer is not None
    blocks: list[Block] = []
    for task in chosen:
        items = [p.reference for p in task.problems if isinstance(p.reference, tasks.Item)]
        own = reference_blocks(
            generator.tokenizer, items[:per_task], thinking=task.thinking,
            block=generator.cfg.block_length,
        )  # fmt: skip
        first = blocks[-1].answer + 1 if blocks else 0
        blocks += [block._replace(answer=first + block.answer) for block in own]
    if not blocks:
        return None
    threshold = backend.sampling.threshold
    return replay(generator, blocks, rule="oracle", threshold=threshold, batch=batch)


def _from_server(reply: Any, prompt: list[int] | None, thinking: bool) -> Reply:
    """The reply of either API; time is filled in later."""
    choice = reply["choices"][0]
    finish = choice.get("finish_reason") or "unknown"
    if "message" in choice:
        message = choice["message"]
        text = message.get("content") or ""
        thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
        # A server that takes the thoughts out, or has none, gives a finished answer as it is; the
        # judge wants to see where the thoughts end.
        if thoughts or (thinking and finish == "stop" and THINK_CLOSE not in text):
            text = f"{THINK_OPEN}\n{thoughts}\n{THINK_CLOSE}\n\n{text}" if text else thoughts
    else:
        text = choice["text"]
    usage = reply.get("usage") or {}
    ids = choice.get("token_ids")
    sent = reply.get("prompt_token_ids") or choice.get("prompt_token_ids") or prompt
    return Reply(
        text=str(text),
        prompt_ids=None if sent is None else tuple(map(int, sent)),
        token_ids=None if ids is None else tuple(map(int, ids)),
        finish=str(finish),
        tokens=int(usage.get("completion_tokens") or len(ids or ())),
        previews=None,
        forwards=None,
        seconds=0.0,
    )
