"""`clover chat`: turns that go on from cached prefixes.

A template may drop the thoughts of earlier turns, so an answer as it was generated is not what the
next prompt holds. What does stay is everything up to the last question: a copy of the cache is
taken there, before each answer, and the next turn goes on from the longest copy whose ids begin its
own prompt. A GDN state cannot be cut back, so a cache is never shortened.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
from rich.console import Console

from clover_jax.cache import DecodeCache, empty_cache, snapshot
from clover_jax.cli import view
from clover_jax.cli.commands import Chat
from clover_jax.cli.session import (
    Session,
    decode_input,
    exit_status,
    follow,
    open_session,
    stats_line,
)
from clover_jax.data.chat import render_chat, split_thinking, thinking_state, tokenize_prompt
from clover_jax.diffusion.generate import Completion, Event, Generator, compiled_prefill
from clover_jax.errors import CloverError

KEPT = 4  # cached prefixes; each takes the memory of the whole context


def chat(flags: Chat) -> int:
    """Answers until the input ends; returns the exit status."""
    session = open_session(flags)
    conversation = Conversation(session, flags)
    console = Console(highlight=False)
    interactive = sys.stdin.isatty()
    completions = []
    for message in _messages(console, interactive):
        if message == "/quit":
            break
        if message == "/reset":
            conversation.reset()
            continue
        try:
            completions.append(_turn(conversation, message, console, len(completions)))
        except CloverError as error:
            if not interactive:
                raise
            print(f"error: {error}", file=sys.stderr)
    return exit_status(completions)


def _messages(console: Console, interactive: bool) -> Iterator[str]:
    """Lines that are not blank, typed or piped in."""
    if interactive:
        with contextlib.suppress(EOFError):
            while True:
                yield from filter(None, [console.input("[bold]> [/bold]").strip()])
    else:
        yield from filter(None, (decode_input(line).strip() for line in sys.stdin.buffer))


def _turn(conversation: "Conversation", message: str, console: Console, turn: int) -> Completion:
    flags, session = conversation.flags, conversation.session
    live = view.in_terminal() and not flags.json
    with contextlib.ExitStack() as stack:

        def observers(thinking: bool) -> list[Callable[[Event], None]]:
            if not live:
                return [] if flags.json else [view.plain]
            cfg = session.generator.cfg
            block = cfg.block_length if flags.mode == "block" else 1
            shown = view.LiveView(console, session.tokenizer, block=block, thinking=thinking)
            return [stack.enter_context(shown)]

        completion = conversation.ask(message, observers, live=live)
    line = stats_line(completion, session.generator.cfg.moe.num_experts)
    if flags.json:
        print(msgspec.json.encode({"turn": turn, **dataclasses.asdict(completion)}).decode())
    elif live:
        console.print(line, style="dim")
    else:
        print(flush=True)
        print(line, file=sys.stderr)
    return completion


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A cache and the ids that it holds."""

    ids: list[int]
    cache: DecodeCache


class Conversation:
    """The messages so far, and cached prefixes of their prompts."""

    def __init__(self, session: Session, flags: Chat) -> None:
        if session.tokenizer is None:
            raise CloverError("the folder has no tokenizer.json: a chat needs one")
        if flags.context < 1:
            raise CloverError(f"--context is {flags.context}: expected at least 1")
        cfg = session.generator.cfg
        self.session = session
        self.flags = flags
        self._tokenizer = session.tokenizer
        self._context = min(flags.context, cfg.max_position_embeddings)
        # A block more, so that the last one is as long as in a conversation without a cache.
        self._empty = Prefix([], empty_cache(cfg, 1, self._context + cfg.block_length))
        self._prefixes: list[Prefix] = []
        self.reset()

    def reset(self) -> None:
        """Forget the messages. The prefixes stay: a new conversation may begin like an old one."""
        system = self.flags.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(
        self,
        question: str,
        observers: Callable[[bool], list[Callable[[Event], None]]],
        *,
        live: bool,
    ) -> Completion:
        """One turn; the messages grow only if it succeeds.

        Args:
            question: what the user says.
            observers: what watches the events, given whether thoughts come first.
            live: yield an event after every denoising step.

        Raises:
            CloverError: the conversation does not fit the context any more.
        """
        messages = [*self._messages, {"role": "user", "content": question}]
        session, tokenizer = self.session, self._tokenizer
        prompt = tokenize_prompt(tokenizer, messages, enable_thinking=session.enable_thinking)
        if len(prompt) >= self._context:
            raise CloverError(
                f"the conversation has {len(prompt)} tokens, its context holds {self._context}: "
                "start over with /reset, or with a larger --context"
            )
        request = session.request(prompt, self.flags, room=self._context)
        prefix, reused = self._prefix(prompt, messages)
        thinking = thinking_state(tokenizer, prompt)
        events = session.generator.stream(
            [request],
            mode=self.flags.mode,
            driver="step" if live else "block",
            cache=snapshot(prefix.cache),
            trace=live,
        )
        [completion] = follow(events, observers(thinking))
        thoughts, answer = split_thinking(completion.text or "", opened=thinking)
        reply = {"role": "assistant", "content": answer, "reasoning_content": thoughts}
        self._messages = [*messages, reply]
        stats = dataclasses.replace(completion.stats, reused_tokens=reused)
        return dataclasses.replace(completion, stats=stats)

    def _prefix(self, prompt: list[int], messages: list[dict[str, Any]]) -> tuple[Prefix, int]:
        """The cache of the prompt up to the end of its last message, and how much of it is old."""
        usable = (p for p in self._prefixes if prompt[: len(p.ids)] == p.ids)
        old = max(usable, key=lambda p: len(p.ids), default=self._empty)
        stable = self._stable_ids(prompt, messages)
        if len(stable) <= len(old.ids):
            return old, len(old.ids)
        new = stable[len(old.ids) :]
        prefix = Prefix(stable, _extend(self.session.generator, new, snapshot(old.cache)))
        if self.flags.reuse:
            self._prefixes = [*self._prefixes, prefix][-KEPT:]
        return prefix, len(old.ids)

    def _stable_ids(self, prompt: list[int], messages: list[dict[str, Any]]) -> list[int]:
        """The beginning of the prompt that the next turn's prompt will have, too."""
        text = render_chat(
            self._tokenizer.chat_template or "",
            messages,
            add_generation_prompt=False,
            enable_thinking=self.session.enable_thinking,
            variables=self._tokenizer.special_texts,
        )
        pairs = zip(prompt, self._tokenizer.encode(text, special=True), strict=False)
        return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _extend(generator: Generator, ids: list[int], cache: DecodeCache) -> DecodeCache:
    """The cache with more ids committed; few widths, so few compiled programs."""
    chunk = generator.prefill_chunk
    width = chunk << (-(-len(ids) // chunk) - 1).bit_length()
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(ids)] = ids
    return compiled_prefill(
        generator.params,
        jnp.asarray(tokens),
        jnp.asarray([len(ids)], jnp.int32),
        cache,
        chunk=chunk,
        cfg=generator.cfg,
        env=generator.env,
    )
