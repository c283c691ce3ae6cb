"""`clover generate`."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from rich.console import Console

from clover_jax.cli import view
from clover_jax.cli.commands import Generate
from clover_jax.cli.session import (
    Session,
    decode_input,
    exit_status,
    follow,
    open_session,
    parse_token_ids,
    stats_line,
)
from clover_jax.data.chat import thinking_state, tokenize_prompt
from clover_jax.diffusion.generate import CanvasEvent, Completion, Event
from clover_jax.errors import CloverError


def generate(flags: Generate) -> int:
    """Answers one prompt; returns the exit status."""
    if flags.samples < 1:
        raise CloverError(f"--samples is {flags.samples}: expected at least 1")
    if flags.screen is not None and not flags.screen.absolute().parent.is_dir():
        raise CloverError(f"{flags.screen} cannot be written: its folder does not exist")
    given = _read_prompt(flags)
    with contextlib.ExitStack() as stack:
        observers: list[Callable[[Event], None]] = []
        if flags.trace is not None:
            observers.append(stack.enter_context(_trace(flags.trace)))
        session = open_session(flags)
        cfg, tokenizer = session.generator.cfg, session.tokenizer
        prompt = given if isinstance(given, list) else _prompt_ids(session, flags, given)
        thinking = tokenizer is not None and thinking_state(tokenizer, prompt)
        canvases: list[CanvasEvent] = []
        if flags.screen is not None:
            observers.append(lambda event: _keep_canvas(canvases, event))
        console = Console(highlight=False)
        streams = flags.samples == 1 and not flags.json
        live = streams and view.in_terminal()
        if live:
            block = cfg.block_length if flags.mode == "block" else 1
            shown = view.LiveView(console, tokenizer, block=block, thinking=thinking)
            observers.append(stack.enter_context(shown))
        elif streams:
            observers.append(view.plain_ids if tokenizer is None else view.plain)
        room = cfg.max_position_embeddings
        events = session.generator.stream(
            [session.request(prompt, flags, room=room, sample=i) for i in range(flags.samples)],
            mode=flags.mode,
            driver="step" if live else "block",
            trace=live or flags.trace is not None or flags.screen is not None,
        )
        completions = follow(events, observers)
    lines = [stats_line(completion, cfg.moe.num_experts) for completion in completions]
    if flags.json:
        _print_json(completions)
    elif live:
        console.print(lines[0], style="dim")
    else:
        _print_plain(completions, lines, streamed=streams)
    if flags.screen is not None:
        answer = view.completion_text(completions[0], thinking=thinking)
        asked = given if isinstance(given, str) else str(flags.token_ids)
        picture = view.screen(asked, canvases, answer, lines[0], tokenizer)
        view.save_screen(picture, flags.screen)
    return exit_status(completions)


def _read_prompt(flags: Generate) -> str | list[int]:
    """The prompt's text, or its ids."""
    if flags.token_ids is not None:
        if flags.prompt:
            raise CloverError("a prompt and --token-ids are both given: choose one")
        return parse_token_ids(flags.token_ids)
    text = " ".join(flags.prompt)
    if not flags.prompt:
        if sys.stdin.isatty():
            raise CloverError("there is no prompt: give one as argument or on standard input")
        text = decode_input(sys.stdin.buffer.read())
    if not text:
        raise CloverError("the prompt is empty: expected a text")
    return text


def _prompt_ids(session: Session, flags: Generate, text: str) -> list[int]:
    tokenizer = session.tokenizer
    if tokenizer is None:
        raise CloverError("the folder has no tokenizer.json: give the prompt by --token-ids")
    if flags.raw:
        return tokenizer.encode(text, special=True)
    messages = [{"role": "user", "content": text}]
    if flags.system is not None:
        messages.insert(0, {"role": "system", "content": flags.system})
    return tokenize_prompt(tokenizer, messages, enable_thinking=session.enable_thinking)


@contextlib.contextmanager
def _trace(path: Path) -> Iterator[Callable[[Event], None]]:
    """Writes canvas events to a file, one JSON object a line."""

    def write(file: BinaryIO, event: Event) -> None:
        if isinstance(event, CanvasEvent):
            file.write(msgspec.json.encode(event) + b"\n")

    try:
        opened = path.open("wb")
    except OSError as error:
        raise CloverError(f"{path} cannot be written: {error}") from None
    with opened as file:
        yield lambda event: write(file, event)


def _keep_canvas(canvases: list[CanvasEvent], event: Event) -> None:
    if isinstance(event, CanvasEvent) and event.row == 0:
        canvases.append(event)


def _print_json(completions: Sequence[Completion]) -> None:
    """One line per sample; what is not finite is null."""
    for i, completion in enumerate(completions):
        print(msgspec.json.encode({"sample": i, **dataclasses.asdict(completion)}).decode())


def _print_plain(completions: Sequence[Completion], lines: list[str], *, streamed: bool) -> None:
    """Texts to standard output, figures to standard error."""
    for i, (completion, line) in enumerate(zip(completions, lines, strict=True)):
        if streamed:
            print()  # the text itself is there already
        else:
            print(
                f"[{i}] {completion.text if completion.text is not None else completion.token_ids}"
            )
        sys.stdout.flush()
        print(line, file=sys.stderr)
