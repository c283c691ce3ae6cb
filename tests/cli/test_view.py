"""What a terminal shows of an answer."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from clover_jax.cli import view
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.generate import CanvasEvent, TextEvent


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


def canvas(
    tokens: list[int], masked: list[bool], confidences: list[float], step: int = 0, start: int = 0
) -> CanvasEvent:
    n = len(tokens)
    return CanvasEvent(
        row=0,
        start=start,
        step=step,
        tokens=tuple(tokens),
        masked=tuple(masked),
        confidences=tuple(confidences),
        logprobs=(0.0,) * n,
        revealed_at=(-1,) * n,
    )


def test_colours_run_from_red_over_yellow_to_green():
    channel = lambda c: view.confidence_color(c).get_truecolor()[:2]
    assert channel(0.0) == (255, 0)
    assert channel(0.5) == (255, 215)
    assert channel(1.0) == (0, 215)
    assert channel(float("nan")) == channel(0.0)
    assert channel(7.0) == channel(1.0)


def test_cells_tell_masked_guessed_and_revealed_apart(tokenizer: Tokenizer):
    [cat] = tokenizer.encode("c", special=False)
    event = canvas([cat, cat, cat], [True, True, False], [0.05, 0.6, 0.99])
    text = view.canvas_text(event, tokenizer)
    assert text.plain == view.MASKED + "cc"
    styles = [span.style for span in text.spans]
    assert [(s.dim, s.italic, s.bold) for s in styles] == [
        (True, None, None), (True, True, None), (None, None, True),
    ]  # fmt: skip
    assert [s.color for s in styles] == [view.confidence_color(c) for c in event.confidences]


def test_nothing_is_shown_after_a_stop(tokenizer: Tokenizer):
    [cat] = tokenizer.encode("c", special=False)
    stop = tokenizer.stop_ids[0]
    event = canvas([cat, stop, cat, cat], [False, False, True, False], [0.9] * 4)
    assert view.canvas_text(event, tokenizer).plain == "c<|im_end|>"
    guessed = canvas([cat, stop, cat, cat], [False, True, True, False], [0.9] * 4)
    assert view.canvas_text(guessed, tokenizer).plain == "c<|im_end|>cc"


def test_cells_stay_on_one_line(tokenizer: Tokenizer):
    ids = [*tokenizer.encode("\n\x1b", special=False), tokenizer.vocab_size, 320]
    event = canvas(ids, [False] * len(ids), [0.9] * len(ids))
    assert view.canvas_text(event, tokenizer).plain == "↵·" + 2 * view.MASKED
    assert view.canvas_text(event, None).plain == "".join(f"{i} " for i in ids)


def test_thoughts_are_dim_and_controls_harmless():
    text, open_ = view.answer_text("hm\x1b[2J</think>\n42", thinking=True)
    assert text.plain == "hm·[2J</think>\n42" and not open_
    assert [(span.start, span.end) for span in text.spans] == [(0, text.plain.index("\n"))]
    assert view.answer_text("hm", thinking=True)[1]
    assert view.answer_text("42", thinking=False)[0].spans == []


def test_live_view_moves_whole_lines_up(tokenizer: Tokenizer):
    file = io.StringIO()
    console = Console(file=file, width=40, force_terminal=True, color_system=None)
    [cat] = tokenizer.encode("c", special=False)
    with view.LiveView(console, tokenizer, block=4, thinking=False) as live:
        live(canvas([cat] * 4, [True] * 4, [0.9] * 4))
        live(TextEvent(0, "one\ntwo\nthr", (cat,)))
        live(TextEvent(0, "ee", (cat,)))
    shown = file.getvalue()
    assert shown.index(view.MASKED * 4) < shown.index("cccc") < shown.index("one")
    # A line that has left is printed once; the last line is repainted as it grows.
    assert shown.count("one") == shown.count("two") == 1
    assert shown.count("three") >= 1


def test_picture_shows_some_steps_of_the_first_block(tokenizer: Tokenizer, tmp_path: Path):
    [cat] = tokenizer.encode("c", special=False)
    events = [canvas([cat] * 8, [i > s for i in range(8)], [0.1] * 8, s) for s in range(8)]
    events += [canvas([cat] * 8, [False] * 8, [0.9] * 8, 0, start=8)]
    answer = view.answer_text("forty-two", thinking=False)[0]
    picture = view.screen("how many", events, answer, "8 tokens", tokenizer, steps=3)
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(picture)
    lines = [line.strip() for line in console.export_text().splitlines() if line.strip()]
    assert lines == [
        "$ clover generate 'how many'",
        "preview 1  c" + 7 * view.MASKED,
        "preview 5  ccccc" + 3 * view.MASKED,
        "preview 8  cccccccc",
        "forty-two",
        "8 tokens",
    ]
    view.save_screen(picture, tmp_path / "screen.svg")
    assert "preview&#160;5" in (tmp_path / "screen.svg").read_text()


def test_picture_without_canvases(tokenizer: Tokenizer):
    picture = view.screen("hm", [], view.answer_text("", thinking=False)[0], "", tokenizer)
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(picture)
    assert "hm" in console.export_text()
