"""How an answer looks: live in a terminal, plain in a pipe, as a picture in a file."""

import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from clover_jax.data.tokenizer import THINK_CLOSE, Tokenizer
from clover_jax.diffusion.generate import CanvasEvent, Completion, DoneEvent, Event, TextEvent
from clover_jax.errors import CloverError

MASKED = "░"
UNSURE = 0.2  # a guess below this confidence still shows as masked
_DIM = Style(dim=True)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal would obey them


def in_terminal() -> bool:
    """Whether standard output is one."""
    return sys.stdout.isatty()


def confidence_color(confidence: float) -> Color:
    """Red at 0, yellow at a half, green at 1."""
    c = min(max(confidence, 0.0), 1.0) if confidence == confidence else 0.0
    return Color.from_rgb(255 * min(1.0, 2 * (1 - c)), 215 * min(1.0, 2 * c), 60)


def canvas_text(event: CanvasEvent, tokenizer: Tokenizer | None) -> Text:
    """One block after one step: masked, guessed (italic) and revealed (bold) cells.

    What stands right of a revealed stop token will never be text, and is left out.
    """
    stops = () if tokenizer is None else tokenizer.stop_ids
    text = Text()
    cells = zip(event.tokens, event.masked, event.confidences, strict=True)
    for token, masked, confidence in cells:
        if masked and confidence < UNSURE:
            text.append(MASKED, Style(dim=True, color=confidence_color(confidence)))
        elif masked:
            style = Style(dim=True, italic=True, color=confidence_color(confidence))
            text.append(_cell(token, tokenizer), style)
        else:
            style = Style(bold=True, color=confidence_color(confidence))
            text.append(_cell(token, tokenizer), style)
            if token in stops:
                break
    return text


def _cell(token: int, tokenizer: Tokenizer | None) -> str:
    """A token on one line; bytes that are no whole character show as a dot."""
    if tokenizer is None:
        return f"{token} "
    if not 0 <= token < tokenizer.vocab_size:
        return MASKED
    text = tokenizer.decode([token], skip_special=False)
    shown = text.replace("\n", "↵").replace("\t", "→").replace("\ufffd", "·")
    return "".join(c if c.isprintable() else "·" for c in shown)


def printable(text: str) -> str:
    """The text with a dot for whatever a terminal would obey; line breaks and tabs stay."""
    return _CONTROLS.sub("·", text)


def answer_text(text: str, *, thinking: bool) -> tuple[Text, bool]:
    """The text with its thoughts dim, and whether it ends inside them."""
    text = printable(text)
    if not thinking:
        return Text(text), False
    thoughts, tag, rest = text.partition(THINK_CLOSE)
    return Text.assemble((thoughts + tag, _DIM), rest), not tag


def plain(event: Event) -> None:
    """Writes text to standard output as it becomes final."""
    if isinstance(event, TextEvent):
        sys.stdout.write(event.text)
        sys.stdout.flush()


def plain_ids(event: Event) -> None:
    """The same for a model without a tokenizer."""
    if isinstance(event, TextEvent):
        sys.stdout.write("".join(f"{token} " for token in event.token_ids))
        sys.stdout.flush()


class LiveView:
    """One answer in a terminal: text, then the block that is being denoised."""

    def __init__(
        self, console: Console, tokenizer: Tokenizer | None, *, block: int, thinking: bool
    ) -> None:
        """`thinking`: the prompt leaves a think block open."""
        self._tokenizer = tokenizer
        self._blank = Text(MASKED * block, _DIM)
        self._canvas = self._blank
        self._tail = Text()
        self._thinking = thinking
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis")

    def __enter__(self) -> "LiveView":
        self._live.start()
        self._paint()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        match event:
            case CanvasEvent():
                self._canvas = canvas_text(event, self._tokenizer)
            case TextEvent():
                self._append(event)
                self._canvas = self._blank
            case DoneEvent():
                self._canvas = Text()
        self._paint()

    def _append(self, event: TextEvent) -> None:
        """Whole lines leave the live region upwards, so that it never outgrows the screen."""
        if self._tokenizer is None:
            self._tail.append("".join(f"{token} " for token in event.token_ids))
            return
        piece, self._thinking = answer_text(event.text, thinking=self._thinking)
        lines = Text.assemble(self._tail, piece).split("\n", allow_blank=True)
        for line in lines[:-1]:
            self._live.console.print(line)
        self._tail = lines[-1]

    def _paint(self) -> None:
        self._live.update(Text.assemble(self._tail, self._canvas), refresh=True)


def screen(
    prompt: str,
    events: Sequence[CanvasEvent],
    answer: Text,
    stats: str,
    tokenizer: Tokenizer | None,
    *,
    steps: int = 5,
) -> RenderableType:
    """A still picture of an answer: some steps of the first block, then the text.

    Args:
        prompt: what was asked.
        events: canvases of one row, of which those of the first block are shown.
        answer: the final text.
        stats: line of figures.
        tokenizer: None shows token ids.
        steps: at most so many canvases, the first and the last among them.
    """
    first = [event for event in events if event.start == 0]
    last = len(first) - 1
    shown = sorted({round(i * last / max(steps - 1, 1)) for i in range(steps)}) if first else []
    table = Table.grid(padding=(0, 2))
    for i in shown:
        table.add_row(Text(f"preview {first[i].step + 1}", _DIM), canvas_text(first[i], tokenizer))
    command = Text.assemble(("$ clover generate ", _DIM), (repr(prompt), Style(bold=True)))
    return Group(command, Text(), table, Text(), answer, Text(), Text(stats, _DIM))


def save_screen(picture: RenderableType, path: Path, *, width: int = 100) -> None:
    """Save a picture as SVG.

    Raises:
        CloverError: the file cannot be written.
    """
    console = Console(record=True, file=io.StringIO(), width=width, force_terminal=True)
    console.print(picture)
    svg = console.export_svg(title="clover")
    # The font would be fetched from elsewhere; without it a viewer takes its own monospace.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise CloverError(f"{path} cannot be written: {error}") from None


def completion_text(completion: Completion, *, thinking: bool) -> Text:
    """A finished answer as it is shown."""
    if completion.text is None:
        return Text(" ".join(map(str, completion.token_ids)))
    return answer_text(completion.text, thinking=thinking)[0]
