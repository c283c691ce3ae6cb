"""`clover card`: the figures of a model card."""

import sys
from pathlib import Path

from clover_jax.cli.commands import Card
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.cli.session import packaged_model
from clover_jax.errors import CloverError
from clover_jax.eval import card_report
from clover_jax.eval.card import CardConfig, measure


def card(flags: Card) -> int:
    """Measures what is missing, writes `card.md` and pictures, prints the tables."""
    folders = {"model": flags.checkpoint or packaged_model()}
    folders |= {k: v for k, v in (("parent", flags.parent), ("control", flags.control)) if v}
    for folder in folders.values():
        if not folder.is_dir():
            raise CloverError(f"{folder} is not a folder: expected a checkpoint folder")
    runs = {}
    for text in flags.run:
        name, sign, folder = text.partition("=")
        if not sign or not name:
            raise CloverError(f"--run is {text!r}: expected NAME=DIR, the folder of a training run")
        runs[name] = Path(folder)
    card_report.require_pyplot()  # before hours of measuring
    if flags.out.exists() and not flags.out.is_dir():
        raise CloverError(f"{flags.out} is a file: choose a folder for the card's figures")
    config = CardConfig(
        n=flags.n, frontier_n=flags.frontier_n, replay_n=flags.replay_n, split=flags.split,
        batch=flags.batch,
    )  # fmt: skip
    keep_compiled_programs()
    cells = measure(
        folders, config, flags.out, progress=lambda line: print(line, file=sys.stderr)
    )  # fmt: skip
    text = card_report.markdown(cells)
    card_report.plot(cells, runs, flags.out)
    (flags.out / "card.md").write_text(text)
    print(text, end="")
    return 0
