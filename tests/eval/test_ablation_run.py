"""Running and reporting: verdicts on made-up results, resumption, refusals, pages.

The model is replaced where only the bookkeeping counts; one slow test goes the whole way.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_jax import ablations, checkpoint
from clover_jax.ablations import Ablation, Arm, Claim
from clover_jax.cli.session import packaged_model
from clover_jax.errors import CloverError
from clover_jax.eval import ablation_plan, ablation_report, ablation_run, ablation_stats
from clover_jax.eval.ablation_run import Answers, Clock, OutOfTime, Result
from clover_jax.eval.ablation_stats import difference, outcome, outcomes, state, value, verdict
from clover_jax.params import named_leaves
from clover_jax.train import loop
from tests.cli.conftest import Clover, cache_home, clover, model
from tests.helpers.compilation import unoptimised

__all__ = ["cache_home", "clover", "model"]  # fixtures

TINY = Ablation(
    id="901_tiny",
    question="Is it?",
    expected="B is worse than A by far, since nothing else can be expected of B.",
    arms=(Arm("A"), Arm("B", ("sampler.threshold=0.5",)), Arm("C", ("decode.block_length=8",))),
    claims=(
        Claim("B", "lower", "accuracy", "A"),
        Claim("C", "same", "tokens", "A", margin=1.0),
        Claim("C", "higher", "tpf", "A", tasks=("gcd",)),
    ),
    kind="evaluate",
    axes=(("tpf", "accuracy"), ("tokens", "repetition")),
    settings=('measure.tasks=["chain_sum","gcd"]', "measure.n=4"),
)
TRAINED = dataclasses.replace(
    TINY, id="902_trained", kind="convert", seeds=(0, 1, 2), claims=(TINY.claims[0],)
)


def answers(right: str, tokens: int = 10, forwards: int = 5) -> Answers:
    n = len(right)
    return Answers(right, "1" * n, (tokens,) * n, (forwards,) * n, (3.5,) * n, (0.25,) * n)


def result(arm: str, found: dict[str, Answers], seed: int = 0, **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "ablation": "901_tiny", "arm": arm, "seed": seed, "hash": "", "answers": found,
        "losses": (), "seconds": 1.0, "commit": "c0ffee", "date": "2026-12-01 00:00",
        "machine": "abacus", "effective": {},
    }  # fmt: skip
    return Result(**fields | changes)


# --- what results say ---------------------------------------------------------------------------


def test_values_are_means_over_tasks_that_count_alike():
    found = [result("A", {"one": answers("10", 10, 5), "two": answers("111111", 30, 5)})]
    assert value(found, "accuracy") == pytest.approx(0.75)  # pooled it would be 7/8
    assert value(found, "tpf") == pytest.approx((2 + 6) / 2)
    assert value(found, "tpf", ("two",)) == pytest.approx(6)
    assert value(found, "repetition") == pytest.approx(0.25)
    assert np.isnan(value(found, "masked_loss"))


def test_a_difference_is_paired():
    """The same share of right answers: one discordant pair of each kind, or twenty."""
    alike = difference(
        [result("A", {"t": answers("0" + "1" * 20 + "0" * 19)})],
        [result("B", {"t": answers("1" * 20 + "0" * 20)})], "accuracy",
    )  # fmt: skip
    apart = difference(
        [result("A", {"t": answers("1" * 20 + "0" * 20)})],
        [result("B", {"t": answers("0" * 20 + "1" * 20)})], "accuracy",
    )  # fmt: skip
    assert alike is not None and apart is not None
    assert alike.value == apart.value == 0
    assert alike.high - alike.low < (apart.high - apart.low) / 2


def test_the_bootstrap_interval_of_a_mean():
    """Against the normal interval of a paired mean."""
    rng = np.random.default_rng(0)
    plus = rng.integers(0, 9, 200)
    of = lambda extra: {
        "t": dataclasses.replace(answers("1" * 200), tokens=tuple((20 + extra).tolist()))
    }
    d = difference([result("A", of(plus))], [result("B", of(0 * plus))], "tokens")
    assert d is not None and d.value == pytest.approx(plus.mean())
    half = 1.96 * plus.std(ddof=1) / np.sqrt(200)
    assert d.low == pytest.approx(plus.mean() - half, abs=0.1 * half)
    assert d.high == pytest.approx(plus.mean() + half, abs=0.1 * half)


def test_seeds_that_disagree_widen_the_interval():
    """Three trainings, each better by much or little: the t interval, 4.303 standard errors."""
    gains = {0: 9, 1: 2, 2: 1}
    arm = [result("A", {"t": answers("1" * 9, 10 + gain)}, seed) for seed, gain in gains.items()]
    base = [result("B", {"t": answers("1" * 9)}, seed) for seed in gains]
    d = difference(arm, base, "tokens")
    assert d is not None and d.seeds == 3 and d.value == pytest.approx(4)
    error = np.std([9, 2, 1], ddof=1) / np.sqrt(3)
    assert (d.low, d.high) == pytest.approx((4 - 4.303 * error, 4 + 4.303 * error))
    alone = difference(arm[:1], base, "tokens")
    assert alone is not None and (alone.seeds, alone.low, alone.high) == (1, 9, 9)
    assert difference(arm[:1], base[1:], "tokens") is None


@pytest.mark.parametrize(
    ("direction", "margin", "low", "high", "expected"),
    [
        ("lower", 0.0, -0.3, -0.1, "confirmed"),
        ("lower", 0.0, -0.3, 0.1, "undecided"),
        ("lower", 0.0, 0.1, 0.3, "refuted"),
        ("higher", 0.0, 0.1, 0.3, "confirmed"),
        ("higher", 0.0, -0.1, 0.3, "undecided"),
        ("higher", 0.0, 0.0, 0.3, "undecided"),
        ("higher", 0.0, -0.3, -0.1, "refuted"),
        ("same", 0.2, -0.1, 0.2, "confirmed"),
        ("same", 0.2, -0.1, 0.3, "undecided"),
        ("same", 0.2, 0.3, 0.4, "refuted"),
        ("same", 0.2, -0.4, -0.3, "refuted"),
        ("same", 0.2, -0.9, 0.9, "undecided"),
    ],
)
def test_what_decides_a_claim(direction, margin: float, low: float, high: float, expected: str):
    claim = Claim("A", direction, "tokens", "B", margin=margin)
    found = ablation_stats.Difference((low + high) / 2, low, high, seeds=1)
    assert outcome(claim, found, 1) == expected
    assert outcome(claim, found, 3) == "undecided"  # one seed of three
    assert outcome(claim, None, 1) == "not run"


def test_a_verdict_names_what_failed():
    right, wrong = "1" * 40, "0" * 40
    tasks = lambda r, tokens=10, forwards=5: {
        "chain_sum": answers(r), "gcd": answers(r, tokens, forwards)
    }  # fmt: skip
    found = [result("A", tasks(wrong)), result("B", tasks(right)), result("C", tasks(wrong, 10, 2))]
    assert [o for _, _, o in outcomes(TINY, found)] == ["refuted", "confirmed", "confirmed"]
    assert verdict(TINY, found) == (
        "2 of 3 expectations hold. refuted: accuracy with B lower than with A"
    )
    assert state(TINY, found) == "done" and state(TINY, found[:1]) == "1 of 3 runs"
    assert verdict(TINY, found[:1]).startswith("0 of 3 expectations hold. not run: accuracy")
    assert state(TINY, []) == "not run"


def test_trainings_need_three_seeds_to_claim():
    found = [
        result(arm, {"t": answers(right * 40)}, seed)
        for arm, right in (("A", "1"), ("B", "0"))
        for seed in (0, 1)
    ]
    [(_, d, decided)] = outcomes(TRAINED, found)
    assert d is not None and d.high < 0 and decided == "undecided"
    found += [result("A", {"t": answers("1" * 40)}, 2), result("B", {"t": answers("0" * 40)}, 2)]
    assert outcomes(TRAINED, found)[0][2] == "confirmed"


def test_repetition():
    assert ablation_run.repetition([1, 2, 3, 4, 5, 6]) == 0
    assert ablation_run.repetition([7, 7, 7]) == 0  # no 4-gram
    assert ablation_run.repetition([7] * 8) == pytest.approx(4 / 5)


# --- running ------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arms that were measured; B is always wrong."""
    names: list[str] = []

    def answer(plan: ablation_plan.Plan, _: Any) -> dict[str, Answers]:
        names.append(plan.arm)
        return {t: answers("0000" if plan.arm == "B" else "1101") for t in plan.measure.tasks}

    monkeypatch.setattr(ablation_run, "_answers", answer)
    return names


def run(ablation: Ablation, folder: Path, **options: Any) -> list[Result]:
    usual: dict[str, Any] = {"clock": Clock(None), "progress": lambda _: None}
    parent = options.pop("parent", packaged_model())
    return ablation_run.run(ablation, parent, folder, folder / "runs", **usual | options)


def test_a_run_goes_on_where_it_was_killed(measured: list[str], tmp_path: Path):
    assert [r.arm for r in run(TINY, tmp_path, arms=["B"])] == ["B"]
    found = run(TINY, tmp_path)
    assert measured == ["B", "A", "C"] and {r.arm for r in found} == {"A", "B", "C"}
    path = tmp_path / "results.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-9])  # cut off in its last line
    assert [r.arm for r in ablation_run.read_results(path)] == ["B", "A"]
    again = run(TINY, tmp_path)
    assert measured == ["B", "A", "C", "C"] and len(path.read_text().splitlines()) == 3
    assert [r.arm for r in again] == ["B", "A", "C"] and run(TINY, tmp_path) == again
    line = json.loads(path.read_text().splitlines()[0])
    assert line["effective"]["sampler"]["threshold"] == 0.5
    assert line["effective"]["weights"] == ablation_plan.fingerprint(packaged_model())
    assert set(line) >= {"hash", "commit", "date", "machine", "seed", "answers"}


def test_configurations_are_never_mixed(measured: list[str], tmp_path: Path, model: Path):
    run(TINY, tmp_path)
    changed = dataclasses.replace(TINY, settings=(*TINY.settings, "sampler.presence=0.5"))
    with pytest.raises(CloverError, match=r"another configuration \(.*sampler.presence"):
        run(changed, tmp_path)
    with pytest.raises(CloverError, match="which the registry has not"):
        run(dataclasses.replace(TINY, arms=TINY.arms[:2]), tmp_path)
    with pytest.raises(CloverError, match="another configuration"):
        run(TINY, tmp_path, parent=model)
    assert len(measured) == 3


def test_a_field_that_the_code_had_not_then_is_no_difference(measured: list[str], tmp_path: Path):
    """A later version adds a field with a default: old lines stay good. A lost one is refused."""
    run(TINY, tmp_path)
    path = tmp_path / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[0]["effective"]["sampler"]["policy"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(TINY, tmp_path)
    lines[0]["effective"]["sampler"]["lost"] = 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CloverError, match=r"sampler\.lost"):
        run(TINY, tmp_path)


def test_refusals_before_anything_runs(measured: list[str], tmp_path: Path):
    with pytest.raises(CloverError, match="no arm 'D'"):
        run(TINY, tmp_path, arms=["D"])
    with pytest.raises(CloverError, match="no seed 7"):
        run(TINY, tmp_path, seeds=[7])
    with pytest.raises(CloverError, match=r"config\.json"):
        run(TINY, tmp_path, parent=tmp_path)
    (tmp_path / "results.jsonl").write_text('{"arm": 1}\n')
    with pytest.raises(CloverError, match=r"results\.jsonl line 1 is no result"):
        run(TINY, tmp_path)
    assert not measured


def test_the_clock(measured: list[str], tmp_path: Path):
    with pytest.raises(OutOfTime):
        run(TINY, tmp_path, clock=Clock(time.monotonic() - 1))
    assert not measured


# --- trainings ----------------------------------------------------------------------------------

SHORT = (
    "model.logits_position=shifted", "run.optimiser.steps=20", "run.data.rows=2",
    "run.data.buckets=[[80,10]]", 'run.data.mix.weights=[["chain_sum",1]]',
    "run.calibration_steps=0", 'measure.tasks=["chain_sum"]', "measure.n=2", "measure.batch=2",
    "measure.max_tokens=8", "measure.loss_batches=1",
)  # fmt: skip
CONVERSION = Ablation(
    id="903_conversion",
    question="Does it run?",
    expected="It does, whatever comes of twenty steps of a random model on two rows.",
    arms=(Arm("A"), Arm("scratch", scratch=True)),
    claims=(Claim("scratch", "higher", "masked_loss", "A"),),
    kind="convert",
    settings=SHORT,
    seeds=(0, 1, 2),
)


@pytest.mark.slow
def test_a_conversion_is_stopped_and_resumed(measured: list[str], model: Path, tmp_path: Path):
    """By the clock in mid-training; then its loss is measured. Another process is kept out."""
    steps: list[int] = []

    class OneLine(Clock):
        def check(self) -> None:
            if steps:
                raise OutOfTime
            steps.append(1)

    with unoptimised():
        ends_early = OneLine(None)
        with pytest.raises(OutOfTime):  # asked before the arm, then after its first line
            run(CONVERSION, tmp_path, parent=model, clock=ends_early, seeds=[0], arms=["A"])
        [folder] = (tmp_path / "runs").iterdir()
        assert not (folder / "run" / "model").exists()
        log = (folder / "run" / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in log] == [10]
        with ablation_run._alone(folder), pytest.raises(CloverError, match="another process"):
            run(CONVERSION, tmp_path, parent=model, seeds=[0], arms=["A"])
        [done] = run(CONVERSION, tmp_path, parent=model, seeds=[0], arms=["A"])
    log = (folder / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [10, 20, 20]  # the last: validation
    cfg, params, _ = checkpoint.load(folder / "run" / "model", dtype="float32")
    assert cfg.logits_position == "shifted"
    _, parent, _ = checkpoint.load(model, dtype="float32")
    moved = named_leaves(params)["embed_tokens"] - named_leaves(parent)["embed_tokens"]
    assert np.abs(np.asarray(moved)).max() > 0
    assert len(done.losses) == 1 and done.effective["training"]["run"]["start"] == ""


@pytest.mark.slow
def test_the_start_keeps_the_causal_weights(model: Path, tmp_path: Path):
    """Only the block operator is new, and the mask's row the mean of the others."""
    [plan, other] = [p for p in ablation_plan.plans(CONVERSION, model) if p.seed == 0]
    assert plan.training is not None and other.training is not None
    ablation_run._make_start(plan.training, model, tmp_path / "start")
    ablation_run._make_start(other.training, model, tmp_path / "scratch")
    folders = (model, tmp_path / "start", tmp_path / "scratch")
    loaded = [checkpoint.load(folder, dtype="float32")[1] for folder in folders]
    old, new, random = (
        {k: np.asarray(v) for k, v in named_leaves(params).items()} for params in loaded
    )
    changed = {k for k in old if not np.array_equal(old[k], new[k])}
    block = {k for k in old if "bd_softmax" in k or "conv_right" in k}
    assert changed == block | {"embed_tokens"}
    mask = plan.model.mask_token_id
    rows = np.flatnonzero((old["embed_tokens"] != new["embed_tokens"]).any(-1))
    assert rows.tolist() == [mask]
    assert all(not new[k].any() for k in block if "conv_right" in k)
    untouched = {k for k in old if np.array_equal(old[k], random[k])}
    assert not any("proj" in k for k in untouched)


def test_a_finished_training_is_not_repeated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = ablation_plan.plans(CONVERSION, model)[0]
    (tmp_path / "run" / "model").mkdir(parents=True)
    monkeypatch.setattr(loop, "train", None)
    quiet = lambda _: None
    found = ablation_run.train(plan, model, tmp_path, Clock(None), quiet)
    assert found == tmp_path / "run" / "model"


# --- pages and the command line -----------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> tuple[Ablation, ...]:
    found = (TINY, CONVERSION)
    monkeypatch.setattr(ablations, "ABLATIONS", found)
    monkeypatch.setattr(ablation_report, "ABLATIONS", found)
    return found


def test_the_command_runs_lists_and_reports(
    clover: Clover, measured: list[str], registry: tuple[Ablation, ...], tmp_path: Path
):
    at = ("--experiments", tmp_path)
    (tmp_path / "README.md").write_text("# Experiments\n\nOld text.\n")
    assert "901_tiny  [not run]\n    Is it?" in clover("ablate", "list", *at).out
    ran = clover("ablate", "run", "901", *at)
    assert ran.status == 0 and "[done]" in ran.out and measured == ["A", "B", "C"]
    assert "901_tiny: B, seed 0" in ran.err
    assert "expectations hold" in clover("ablate", "list", *at).out
    reported = clover("ablate", "report", *at)
    assert reported.status == 0 and str(tmp_path / "901_tiny" / "README.md") in reported.out
    page = (tmp_path / "901_tiny" / "README.md").read_text()
    assert page.startswith("# 901_tiny: Is it?\n") and TINY.expected in page
    assert "| B | 0.0 | 2.00 | 10.0 | 3.5 | 25.0 | 100.0 |" in page
    row = next(x for x in page.splitlines() if x.startswith("| accuracy with B lower"))
    assert row.split(" | ")[1].startswith("-75.0 (") and "of 3 expectations hold" in page
    assert (tmp_path / "901_tiny" / "figure.png").read_bytes().startswith(b"\x89PNG")
    unrun = (tmp_path / "903_conversion" / "README.md").read_text()
    assert "6 trainings" in unrun and "clover ablate run 903_conversion --parent" in unrun
    _index_is_replaced_notes_are_kept(clover, tmp_path)


def _index_is_replaced_notes_are_kept(clover: Clover, experiments: Path):
    index = (experiments / "README.md").read_text()
    assert index.startswith("# Experiments\n\nOld text.\n") and index.count("[901_tiny]") == 1
    assert "| not run | - | - |" in index and '901_tiny/figure.png" width' in index
    (experiments / "901_tiny" / "notes.md").write_text("Seen by a human.\n")
    assert clover("ablate", "report", "--experiments", experiments).status == 0
    assert (experiments / "README.md").read_text() == index
    assert "Seen by a human." in (experiments / "901_tiny" / "README.md").read_text()
    path = experiments / "901_tiny" / "results.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    line["effective"]["settings"] = ["sampler.threshold=0.1"]
    path.write_text(json.dumps(line) + "\n")
    refused = clover("ablate", "report", "--experiments", experiments)
    assert refused.status == 2 and "other settings than the registry" in refused.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("run", "nothing"), "expected one of 901_tiny"),
        (("run", "901", "--parent", "nowhere"), "nowhere is not a folder"),
        (("run", "901", "--minutes", "0"), "--minutes is 0.0"),
        (("run", "901", "--arm", "Z"), "no arm 'Z'"),
        (("report",), "does not exist"),
    ],
)
def test_bad_commands(
    clover: Clover, registry: tuple[Ablation, ...], tmp_path: Path, flags, message: str
):
    ran = clover("ablate", *flags, "--experiments", tmp_path)
    assert ran.status == 2 and message in ran.err and "Traceback" not in ran.err
    lost = clover("ablate", "run", "901", "--experiments", tmp_path / "lost")
    assert lost.status == 2 and "--experiments" in lost.err


def test_no_time_left(clover: Clover, registry: tuple[Ablation, ...], tmp_path: Path):
    ran = clover("ablate", "run", "901", "--minutes", "1e-9", "--experiments", tmp_path)
    assert ran.status == 0 and "the same command goes on" in ran.err and "[not run]" in ran.out
