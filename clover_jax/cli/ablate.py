"""`clover ablate`: list, run and report the registered ablations."""

import os
import sys
import time
from pathlib import Path

from clover_jax import ablations
from clover_jax.cli.commands import AblateList, AblateReport, AblateRun
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.cli.session import packaged_model
from clover_jax.errors import CloverError
from clover_jax.eval import ablation_report, ablation_run
from clover_jax.eval.ablation_stats import state, verdict


def ablate(flags: AblateList | AblateRun | AblateReport) -> int:
    """Does what was asked; returns the exit status."""
    match flags:
        case AblateList():
            _list(flags)
        case AblateRun():
            _run(flags)
        case AblateReport():
            for path in ablation_report.write(flags.experiments):
                print(path)
    return 0


def _list(flags: AblateList) -> None:
    for ablation in ablations.ABLATIONS:
        results = ablation_run.read_results(_results(flags.experiments, ablation))
        print(f"{ablation.id}  [{state(ablation, results)}]\n    {ablation.question}")
        if results:
            print(f"    {verdict(ablation, results)}")


def _run(flags: AblateRun) -> None:
    ablation = ablations.named(flags.name)
    parent = flags.parent or packaged_model()
    if not parent.is_dir():
        raise CloverError(f"{parent} is not a folder: expected a checkpoint folder")
    if flags.minutes is not None and not flags.minutes > 0:
        raise CloverError(f"--minutes is {flags.minutes}: expected a number above 0")
    if not flags.experiments.is_dir():
        raise CloverError(
            f"{flags.experiments} is not a folder: run this where the repository is, or say where "
            "its experiments are with --experiments"
        )
    deadline = None if flags.minutes is None else time.monotonic() + 60 * flags.minutes
    keep_compiled_programs()
    try:
        ablation_run.run(
            ablation,
            parent,
            flags.experiments / ablation.id,
            flags.trainings or _usual_trainings(),
            arms=flags.arm,
            seeds=flags.seed,
            clock=ablation_run.Clock(deadline),
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except ablation_run.OutOfTime:
        print("the time is over: the same command goes on", file=sys.stderr)
    path = _results(flags.experiments, ablation)
    results = ablation_run.read_results(path)
    print(f"{path}  [{state(ablation, results)}]")
    if results:
        print(verdict(ablation, results))


def _results(experiments: Path, ablation: ablations.Ablation) -> Path:
    return experiments / ablation.id / ablation_run.RESULTS


def _usual_trainings() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "clover_jax" / "ablations"
