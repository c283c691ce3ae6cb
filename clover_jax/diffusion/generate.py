"""Text in, text out: prompts are prefilled, a driver of `sampler` runs, tokens become text.

`Generator` is the one host-side object that serving, evaluation and the command line share.
"""

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.cache import DecodeCache, empty_cache, snapshot
from clover_jax.config import ModelConfig
from clover_jax.data.chat import thinking_state
from clover_jax.data.tokenizer import StopStrings, StreamDecoder, Tokenizer
from clover_jax.diffusion import sampler
from clover_jax.diffusion.decode_state import DecodeState, Rules, frozen_coreset
from clover_jax.diffusion.passes import ModelPasses
from clover_jax.diffusion.sampler import Loop
from clover_jax.diffusion.sampling_config import SamplerConfig, SamplerParams, sampler_params
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.placement import place, replicate, to_host
from clover_jax.model.transformer import Params, prefill, unstack

FINISH_REASONS = ("", "stop", "length", "error")  # by sampler.RUNNING, STOP, LENGTH, ERROR
type Driver = Literal["full", "block", "step"]

compiled_prefill = jax.jit(
    prefill, static_argnames=("chunk", "cfg", "env"), donate_argnames=("cache",)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to answer it.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: the answer is cut there.
        sampling: threshold, temperature, penalties, ...
        seed: of the random draws.
        sample_index: tells samples of one prompt and seed apart.
        stop_strings: the text ends before the first of these.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplerConfig
    seed: int = 0
    sample_index: int = 0
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise CloverError("the prompt has no tokens: give at least one")
        if self.max_tokens < 1:
            raise CloverError(f"max_tokens is {self.max_tokens}: expected at least 1")
        if not 0 <= self.seed < 2**32:
            raise CloverError(f"seed is {self.seed}: expected an integer in [0, 2^32)")
        if not 0 <= self.sample_index < 2**32:
            raise CloverError(
                f"sample_index is {self.sample_index}: expected an integer in [0, 2^32)"
            )


@dataclasses.dataclass(frozen=True)
class Stats:
    """Accounting of one answer. TPF counts tokens up to and including the stop; no prefill.

    Attributes:
        prompt_tokens: of the prompt, reused ones included.
        reused_tokens: taken from an earlier turn's cache.
        tokens: of the answer.
        previews: denoising passes.
        forwards: previews and commits; a fused pass counts once.
        tpf_previews: tokens per preview, None in AR mode.
        tpf: tokens per forward, None if the answer needed none.
        prefill_tokens_per_s: of this row, in the time of the batch's prefill.
        tokens_per_s: of this row, in the time until it was finished, prefill excluded.
        experts_per_layer: mean distinct experts of this row per preview; a fused pass adds its
            commit's.
        experts_per_layer_union: the same of the whole batch, over its steps so far.
    """

    prompt_tokens: int
    reused_tokens: int
    tokens: int
    previews: int
    forwards: int
    tpf_previews: float | None
    tpf: float | None
    prefill_tokens_per_s: float
    tokens_per_s: float
    experts_per_layer: tuple[float, ...]
    experts_per_layer_union: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: up to and including the stop token, or the token that completes a stop string.
        text: without control tokens, cut before a stop string; None without a tokenizer.
        finish_reason: `stop`, `length` or `error` (NaN logits).
        logprobs: log-probability of each token when it was revealed.
        confidences: the same as the sampler saw it.
        revealed_at: denoising step within its block.
        stats: accounting.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    logprobs: tuple[float, ...]
    confidences: tuple[float, ...]
    revealed_at: tuple[int, ...]
    stats: Stats


@dataclasses.dataclass(frozen=True)
class CanvasEvent:
    """A block after one step. Tokens where `masked` are the latest guesses."""

    row: int
    start: int  # response index of its first position
    step: int
    tokens: tuple[int, ...]
    masked: tuple[bool, ...]
    confidences: tuple[float, ...]
    logprobs: tuple[float, ...]
    revealed_at: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TextEvent:
    """Final text of a row: complete characters only, nothing that a stop string may yet cut."""

    row: int
    text: str
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DoneEvent:
    """A row is finished."""

    row: int
    completion: Completion


type Event = CanvasEvent | TextEvent | DoneEvent


class Generator:
    """A loaded model, ready to answer."""

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        *,
        tokenizer: Tokenizer | None,
        env: Env,
        prefill_chunk: int = 64,
        fuse_commit: bool = False,
        margins: bool = False,
    ) -> None:
        """Without a tokenizer (token ids in and out) only a row's limit ends an answer."""
        if tokenizer is not None and tokenizer.vocab_size > cfg.vocab_size:
            raise CloverError(
                f"the tokenizer has {tokenizer.vocab_size} ids, the model {cfg.vocab_size} rows: "
                "they do not belong together"
            )
        if (
            tokenizer is not None
            and cfg.mask_token_id is not None
            and tokenizer.mask_id not in (None, cfg.mask_token_id)
        ):
            raise CloverError(
                f"the tokenizer's mask is {tokenizer.mask_id}, config.json's mask_token_id "
                f"{cfg.mask_token_id}: correct one of them"
            )
        self.cfg = cfg
        # Scanned on a mesh: unrolled, the partitioner would work through every layer by itself.
        self.params = unstack(params) if env.mesh is None else place(params, cfg, env)
        self.tokenizer = tokenizer
        self.env = env
        self.prefill_chunk = prefill_chunk
        self.fuse_commit = fuse_commit
        self.margins = margins
        self.rules = replicate(_rules(cfg, tokenizer), env)

    def variant(
        self, *, cfg: ModelConfig | None = None, fuse_commit: bool | None = None
    ) -> "Generator":
        """The same weights under another config (block length, coreset) or loop."""
        own = copy.copy(self)
        own.cfg = self.cfg if cfg is None else cfg
        own.fuse_commit = self.fuse_commit if fuse_commit is None else fuse_commit
        return own

    def complete(
        self,
        requests: Sequence[Request],
        *,
        mode: Literal["block", "ar"] = "block",
        driver: Driver = "full",
    ) -> list[Completion]:
        """All answers, in order. Stop strings need the `block` or `step` driver, and get it."""
        if driver == "full" and any(r.stop_strings for r in requests):
            driver = "block"
        done = {
            event.row: event.completion
            for event in self.stream(requests, mode=mode, driver=driver)
            if isinstance(event, DoneEvent)
        }
        return [done[row] for row in range(len(requests))]

    def stream(
        self,
        requests: Sequence[Request],
        *,
        mode: Literal["block", "ar"] = "block",
        driver: Driver = "block",
        cache: DecodeCache | None = None,
        keep_cache: Callable[[DecodeCache], None] | None = None,
        trace: bool = False,
    ) -> Iterator[Event]:
        """Answers as they form.

        Args:
            requests: one per row of a batch.
            mode: block diffusion, or one causal token at a time.
            driver: `full` yields at the end, `block` as blocks are resolved, `step` after each
                denoising step.
            cache: a prefix that the one row's prompt starts with; it is used up.
            keep_cache: receives a copy of the cache right after the prompt, for the next turn.
            trace: yield a `CanvasEvent` for every step.

        Raises:
            CloverError: a prompt with ids outside the vocabulary, or more tokens than fit.
        """
        if not requests:
            raise CloverError("there is no request: give at least one")
        if mode == "block" and self.cfg.bd_gdn is None:
            raise CloverError(
                "this is an autoregressive model (config bd_gdn is null): use mode ar, or convert "
                "it with `clover checkpoint convert` and train it"
            )
        loop = Loop(
            passes=ModelPasses(self.cfg, self.env),
            structure=requests[0].sampling.structure,
            block=self.cfg.block_length if mode == "block" else 1,
            mode=mode,
            fuse_commit=self.fuse_commit and mode == "block",
            by_row=self.env.rows == "mapped",
            margins=self.margins,
        )
        sampling = replicate(sampler_params([r.sampling for r in requests]), self.env)
        rows = [_Row(self.tokenizer, r) for r in requests]
        began = time.perf_counter()
        state, reused = self.start(requests, loop, cache)
        if keep_cache is not None:
            keep_cache(snapshot(state.cache))
        jax.block_until_ready(state.cache.length)
        prefilled = time.perf_counter()
        while True:
            state, canvases = self._drive(state, sampling, loop, driver, trace)
            view = to_host((state.finish, state.text), self.env)
            finish, text = np.array(view[0]), view[1]
            yield from canvases
            cut = np.zeros(len(rows), bool)
            for r, row in enumerate(rows):
                if row.done:
                    continue
                event = row.advance(r, text, ended=bool(finish[r] != sampler.RUNNING))
                if event is not None:
                    yield event
                if row.matched:
                    cut[r] = finish[r] == sampler.RUNNING
                    finish[r] = sampler.STOP
                if finish[r] != sampler.RUNNING:
                    row.done = True
                    seconds = (prefilled - began, time.perf_counter() - prefilled)
                    yield DoneEvent(
                        r, self._completion(r, row, state, text, finish, seconds, reused)
                    )
            if cut.any():
                stopped = jnp.where(replicate(cut, self.env), sampler.STOP, state.finish)
                state = state._replace(finish=stopped)
            if (finish != sampler.RUNNING).all():
                return

    def start(
        self, requests: Sequence[Request], loop: Loop, prefix: DecodeCache | None = None
    ) -> tuple[DecodeState, int]:
        """Prefill the prompts, after checking that everything fits.

        Returns:
            A decode loop's first state, and how many tokens of `prefix` were reused.
        """
        cfg = self.cfg
        limit = max(r.max_tokens for r in requests)
        longest = max(len(r.prompt) for r in requests)
        for r in requests:
            bad = [i for i in r.prompt if not 0 <= i < cfg.vocab_size]
            if bad:
                raise CloverError(
                    f"prompt ids {bad[:5]} are outside the vocabulary of {cfg.vocab_size}"
                )
            if len(r.prompt) + r.max_tokens > cfg.max_position_embeddings:
                raise CloverError(
                    f"a prompt of {len(r.prompt)} tokens and max_tokens {r.max_tokens} do not fit "
                    f"the context of {cfg.max_position_embeddings}: shorten one of them"
                )
        reused = 0 if prefix is None else int(to_host(prefix.length, self.env)[0])
        if prefix is not None and (len(requests) != 1 or prefix.rows != 1):
            raise CloverError(
                f"{len(requests)} requests continue a cache of {prefix.rows} rows: a conversation "
                "is one row"
            )
        if longest < reused:
            raise CloverError(
                f"the prompt has {longest} tokens, the cache it should continue {reused}: give the "
                "whole prompt"
            )
        need = longest + limit + cfg.block_length
        cache = prefix
        if cache is None:
            cache = empty_cache(cfg, len(requests), _bucket(need, 512), self.env)
        elif cache.capacity < (cells := min(need, cfg.max_position_embeddings)):
            # One block more than the limit, or the last block would be shorter than a cold run's.
            raise CloverError(
                f"the conversation needs {cells} cells, its cache has {cache.capacity}: start it "
                "with a larger cache"
            )
        width = _bucket(max(len(r.prompt) - reused for r in requests), self.prefill_chunk)
        tokens = np.zeros((len(requests), width), np.int32)
        n_valid = np.zeros((len(requests),), np.int32)
        for row, request in enumerate(requests):
            rest = request.prompt[reused:]
            tokens[row, : len(rest)] = rest
            n_valid[row] = len(rest)
        cache = compiled_prefill(
            self.params,
            *replicate((tokens, n_valid), self.env),
            cache,
            chunk=self.prefill_chunk,
            cfg=cfg,
            env=self.env,
        )
        thinking = [
            self.tokenizer is not None and thinking_state(self.tokenizer, r.prompt)
            for r in requests
        ]
        by_row = {
            "max_tokens": np.array([r.max_tokens for r in requests], np.int32),
            "thinking_open": np.array(thinking),
            "seed": np.array([r.seed for r in requests], np.uint32),
            "sample_index": np.array([r.sample_index for r in requests], np.uint32),
            "context": np.int32(min(cfg.max_position_embeddings, cache.capacity)),
        }
        state = sampler.start(
            cache,
            loop=loop,
            vocab_size=cfg.vocab_size,
            num_layers=cfg.num_layers,
            limit=_bucket(limit, 128),
            coreset=frozen_coreset(cfg) if loop.mode == "block" else None,
            **replicate(by_row, self.env),
        )
        return state, reused

    def _drive(
        self, state: DecodeState, sampling: SamplerParams, loop: Loop, driver: Driver, trace: bool
    ) -> tuple[DecodeState, list[CanvasEvent]]:
        args = (self.params, state, sampling, self.rules)
        if driver == "full":
            return sampler.generate(*args, loop=loop), []
        if driver == "step":
            ran = to_host(state.finish, self.env) == sampler.RUNNING
            state = sampler.run_step(*args, loop=loop)
            if not trace:
                return state, []
            canvas = jax.tree.map(lambda a: a[None], state.canvas._replace(coreset=None))
            return state, self._canvas_events(canvas, state.step[None], ran[None], state)
        state, record = sampler.run_block(*args, loop=loop)
        if not trace:
            return state, []
        ran, used = to_host((record.ran, record.used), self.env)
        return state, self._canvas_events(record.canvas, record.step, ran[:used], state)

    def _canvas_events(
        self, canvas: Any, step: Any, ran: np.ndarray, state: DecodeState
    ) -> list[CanvasEvent]:
        view = (canvas, step, state.response.response_length)
        canvas, step, response = to_host(view, self.env)
        return _canvas_events(canvas, step, response, ran)

    def _completion(
        self,
        r: int,
        row: "_Row",
        state: DecodeState,
        text: Any,
        finish: np.ndarray,
        seconds: tuple[float, float],
        reused: int,
    ) -> Completion:
        n = row.emitted
        counters = to_host(state.counters, self.env)
        previews, forwards = int(counters.previews[r]), int(counters.forwards[r])
        experts = tuple((counters.experts[:, r] / max(previews, 1)).round(2).tolist())
        union = tuple((counters.experts_union / max(int(counters.steps), 1)).round(2).tolist())
        in_block = previews > 0
        new = len(row.request.prompt) - reused
        return Completion(
            token_ids=tuple(text.tokens[r, :n].tolist()),
            text=row.text if self.tokenizer is not None else None,
            finish_reason=FINISH_REASONS[int(finish[r])],
            logprobs=tuple(text.logprob[r, :n].tolist()),
            confidences=tuple(text.confidence[r, :n].tolist()),
            revealed_at=tuple(text.revealed_at[r, :n].tolist()),
            stats=Stats(
                prompt_tokens=len(row.request.prompt),
                reused_tokens=reused,
                tokens=n,
                previews=previews,
                forwards=forwards,
                tpf_previews=n / previews if in_block else None,
                tpf=n / forwards if forwards else None,
                prefill_tokens_per_s=new / max(seconds[0], 1e-9),
                tokens_per_s=n / max(seconds[1], 1e-9),
                experts_per_layer=experts if in_block else (),
                experts_per_layer_union=union if in_block else (),
            ),
        )


class _Row:
    """Host side of one answer: which tokens became text."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        self.request = request
        self.decoder = None
        if tokenizer is not None:
            self.decoder = StreamDecoder(tokenizer, skip_special=True)
        elif request.stop_strings:
            raise CloverError("stop strings need a tokenizer, and this folder has none")
        self.stops = StopStrings(list(request.stop_strings))
        self.emitted = 0
        self.text = ""
        self.matched = False
        self.done = False

    def advance(self, r: int, text: Any, *, ended: bool) -> TextEvent | None:
        """Take the tokens written since the last call; the text event for them, if any."""
        new = text.tokens[r, self.emitted : int(text.length[r])].tolist()
        if self.decoder is None:
            self.emitted += len(new)
            return TextEvent(r, "", tuple(new)) if new else None
        out, taken = "", []
        for token in new:
            piece, self.matched = self.stops.push(self.decoder.push([token]))
            out += piece
            taken.append(token)
            if self.matched:
                break
        self.emitted += len(taken)
        if ended and not self.matched:
            for rest in (self.stops.push(self.decoder.flush()), self.stops.flush()):
                if not self.matched:
                    out, self.matched = out + rest[0], rest[1]
        self.text += out
        return TextEvent(r, out, tuple(taken)) if taken or out else None


def forbidden_ids(cfg: ModelConfig, tokenizer: Tokenizer | None) -> np.ndarray:
    """Ids that no position can take, bool [vocab]: the mask, and those past the tokenizer's end.

    The mask is the config's and the tokenizer's: an AR base has one in its tokenizer only.
    """
    forbidden = np.zeros(cfg.vocab_size, bool)
    masks = {cfg.mask_token_id}
    if tokenizer is not None:
        forbidden[tokenizer.vocab_size :] = True
        masks.add(tokenizer.mask_id)
    forbidden[[mask for mask in masks if mask is not None]] = True
    return forbidden


def _rules(cfg: ModelConfig, tokenizer: Tokenizer | None) -> Rules:
    stops, close = [-1], -1
    if tokenizer is not None:
        stops = list(tokenizer.stop_ids)
        close = -1 if tokenizer.think_close_id is None else tokenizer.think_close_id
    return Rules(
        jnp.asarray(forbidden_ids(cfg, tokenizer)),
        jnp.asarray(stops, jnp.int32),
        jnp.asarray(close, jnp.int32),
    )


def _bucket(n: int, smallest: int) -> int:
    """The smallest power-of-two multiple of `smallest` that holds n: few compiled programs."""
    size = smallest
    while size < n:
        size *= 2
    return size


def _canvas_events(
    canvas: Any, step: np.ndarray, response: np.ndarray, ran: np.ndarray
) -> list[CanvasEvent]:
    return [
        CanvasEvent(
            row=int(r),
            start=int(response[r]),
            step=int(step[s, r]) - 1,
            tokens=tuple(
                np.where(canvas.masked[s, r], canvas.guess[s, r], canvas.tokens[s, r]).tolist()
            ),
            masked=tuple(canvas.masked[s, r].tolist()),
            confidences=tuple(canvas.confidence[s, r].tolist()),
            logprobs=tuple(canvas.logprob[s, r].tolist()),
            revealed_at=tuple(canvas.revealed_at[s, r].tolist()),
        )
        for s, r in zip(*np.nonzero(ran), strict=True)
    ]
