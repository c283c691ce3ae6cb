"""The card's cells: resumed, refused, told and drawn, on a small random model."""

import json
from pathlib import Path

import pytest

from clover_jax.config import canonical_json
from clover_jax.data import tasks
from clover_jax.errors import CloverError
from clover_jax.eval import card, card_report
from clover_jax.eval.card import Arm, CardConfig
from tests.cli.conftest import model
from tests.helpers.compilation import unoptimised

__all__ = ["model"]  # a fixture
SIZES = CardConfig(n=2, frontier_n=1, replay_n=2, split="val", batch=2)
ARMS = (Arm("AR parent", "parent", "ar"), Arm("AR mode", "model", "ar"),
        Arm("block 32", "model", "block", 8, frontier=(0.95,)))  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with unoptimised():
        yield


@pytest.fixture(autouse=True)
def small_card(monkeypatch: pytest.MonkeyPatch):
    for module in (card, card_report):
        monkeypatch.setattr(module, "ARMS", ARMS)
    monkeypatch.setattr(card, "MAX_TOKENS", 8)
    monkeypatch.setattr(card, "EXPERT_BATCHES", 1)
    monkeypatch.setattr(tasks, "TASKS", ("chain_sum",))
    monkeypatch.setattr(tasks, "SCRATCHPAD_TASKS", ("chain_sum",))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("card")


@pytest.mark.slow
def test_card(model: Path, measured: Path, monkeypatch: pytest.MonkeyPatch):
    """Measured once; then read back, drawn, and refused for other settings or weights."""
    folders = {"model": model, "parent": model}
    cells = card.measure(folders, SIZES, measured)
    assert set(cells) == {
        "answers/AR parent/chain_sum", "answers/AR mode/chain_sum", "answers/block 32/chain_sum",
        "frontier/block 32, 0.95/chain_sum", "replay/threshold/chain_sum",
        "replay/oracle/chain_sum", "experts",
    }  # fmt: skip
    # The parent is the same folder: the same answers.
    assert cells["answers/AR parent/chain_sum"] == cells["answers/AR mode/chain_sum"]
    for row in cells["experts"]:
        assert sum(row) == pytest.approx(1)
    _resumes_after_a_crash(folders, measured, cells, monkeypatch)
    _is_told_and_drawn(cells, measured)
    with pytest.raises(CloverError, match="other weights or settings"):
        card.measure(folders, CardConfig(n=3, split="val"), measured)
    (measured / "cells.jsonl").write_text("{")
    with pytest.raises(CloverError, match=r"cells\.jsonl"):
        card.measure(folders, SIZES, measured)


def _resumes_after_a_crash(folders, out, cells, monkeypatch):
    """The last line is cut off in the middle: only its cell is computed again."""
    path = out / "cells.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-9])
    loaded = []
    load = card._load
    monkeypatch.setattr(card, "_load", lambda folder: loaded.append(folder) or load(folder))
    assert card.measure(folders, SIZES, out) == cells
    assert path.read_text() == whole
    assert len(loaded) == 1  # the parent's cells were all there
    monkeypatch.setattr(card, "_load", None)
    assert card.measure(folders, SIZES, out) == cells


def _is_told_and_drawn(cells, out):
    text = card_report.markdown(cells)
    share = 50 * cells["answers/AR mode/chain_sum"]["right"].count("1")
    assert f"| chain_sum, thinking | 2 | {share:.1f} (+0.0; " in text
    assert text.count("### ") == 8
    run = out / "run"
    run.mkdir()
    with pytest.raises(CloverError, match="training run"):
        card_report.plot(cells, {"ar": run}, out)
    lines = [{"step": s, "ar_loss": 1 / s, "diffusion_loss": 2 / s} for s in (1, 2)]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = {path.name for path in card_report.plot(cells, {"ar": run}, out)}
    assert names == {"loss.png", "experts.png", "frontier.png"}
    for name in names:
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_parts_of_a_card(model: Path, tmp_path: Path):
    """Without the converted model there is neither a frontier nor a replay, and a table still.

    Weights may join later; those that are known already must be the same.
    """
    cells = card.measure({"parent": model}, SIZES, tmp_path)
    assert "### Accuracy" in card_report.markdown(cells)
    settings, known = canonical_json(SIZES), json.loads(card._fingerprints({"parent": model}))
    joined = card._Store(tmp_path, settings, json.dumps({"control": "b"}))
    assert joined.cells == cells
    head = json.loads((tmp_path / "cells.jsonl").read_text().splitlines()[0])
    assert head["weights"] == {**known, "control": "b"}
    with pytest.raises(CloverError, match="other weights"):
        card._Store(tmp_path, settings, json.dumps({"control": "c"}))


def test_refusals(tmp_path: Path):
    with pytest.raises(CloverError, match="safetensors"):
        card.measure({"model": tmp_path}, SIZES, tmp_path / "out")
    with pytest.raises(CloverError, match="at least 1"):
        CardConfig(n=0)
