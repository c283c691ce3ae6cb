"""Entry point: parses, runs one command, and turns what can go wrong into a line and a status."""

import contextlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from clover_jax.cli import commands
from clover_jax.errors import CloverError

DESCRIPTION = "Clover block-diffusion language models. `clover --version` shows the version."
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `clover` with these arguments (default: the process's) and returns its exit status.

    0 is success, 1 a finished command whose result is bad (NaN logits, a folder that would not
    load), 2 wrong input, 130 Ctrl-C, 141 a reader that went away.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a letter
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except CloverError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"\n{str(interrupt) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def _run(argv: list[str]) -> int:
    if argv == ["--version"]:
        print(f"clover {importlib.metadata.version('clover-jax')}")
        return 0
    command = parse(argv)
    if getattr(command, "distributed", None) is None:
        return _dispatch(command)
    from clover_jax.cli.devices import joined

    with joined(command):
        return _dispatch(command)


def _dispatch(command: Any) -> int:
    match command:
        case commands.Generate():
            from clover_jax.cli.generate import generate

            return generate(command)
        case commands.Chat():
            from clover_jax.cli.chat import chat

            return chat(command)
        case commands.Eval():
            from clover_jax.cli.evaluate import evaluate

            return evaluate(command)
        case commands.Bench():
            from clover_jax.cli.bench import bench

            return bench(command)
        case commands.Card():
            from clover_jax.cli.card import card

            return card(command)
        case commands.Info():
            from clover_jax.cli.info import info

            return info(command)
        case commands.Plan():
            from clover_jax.cli.plan import plan

            return plan(command)
        case commands.Verify():
            from clover_jax.cli.verify import verify

            return verify(command)
        case commands.Logits():
            from clover_jax.cli.verify import logits

            return logits(command)
        case commands.CheckpointConvert():
            from clover_jax.cli.info import convert

            return convert(command)
        case commands.CheckpointMerge():
            from clover_jax.cli.info import merge

            return merge(command)
        case commands.CheckpointExport():
            from clover_jax.cli.info import export

            return export(command)
        case commands.DataCheck():
            from clover_jax.cli.data import check

            return check(command)
        case commands.TrainPretrain() | commands.TrainConvert() | commands.TrainSft():
            from clover_jax.cli.train import train

            return train(command)
        case commands.AblateList() | commands.AblateRun() | commands.AblateReport():
            from clover_jax.cli.ablate import ablate

            return ablate(command)
    return 0  # help was shown


def parse(argv: list[str]) -> Any:
    """The command that the arguments name, or None if help was asked for and shown.

    Raises:
        CloverError: the arguments are not a command.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(commands.COMMANDS, prog="clover", description=DESCRIPTION, args=argv)
    except SystemExit as end:
        if end.code == 0:
            return None
        raise CloverError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """The message inside the box that tyro draws: its first section, a guess, and where to look."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines()[1:]:  # the first is a title
        text = line.strip("│╭╮╰╯ ")
        if set(text) <= {"─", "-"}:
            sections.append([])
        else:
            sections[-1].append(text)
    first, *others = (" ".join(section) for section in sections if section)
    guesses = [o.split()[3] for o in others if o.startswith("Perhaps you meant: --")]
    guess = f" (did you mean {guesses[0]}?)" if guesses else ""
    where = others[-1].removeprefix("For full helptext, ").replace("run:", "run")
    return f"{first.rstrip('.')}{guess}; {where}"
