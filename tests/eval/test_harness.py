"""The harness with a scripted backend: folders, resuming, figures by hand, and the report."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from clover_jax.data import tasks
from clover_jax.errors import CloverError
from clover_jax.eval import harness, harness_report, metrics, suites
from clover_jax.eval.harness import Problem, Record, Reply, Task, Verdict, read_records, run


def judge(problems, texts):
    return [Verdict(p.reference == t, t.isdigit()) for p, t in zip(problems, texts, strict=True)]


def doubling(n=5, name="double", max_tokens=9):
    problems = tuple(Problem(f"2 * {i}", str(2 * i)) for i in range(n))
    return Task(name, problems, judge, max_tokens)


def reply(text, **changes):
    usual = Reply(
        text=text, prompt_ids=(1,), token_ids=(2, 3), finish="stop", tokens=2, previews=1,
        forwards=1, seconds=0.5,
    )  # fmt: skip
    return dataclasses.replace(usual, **changes)


@dataclasses.dataclass
class Scripted:
    """Doubles a number, wrongly from `wrong_from` on; may break at its nth call."""

    name: str = "scripted"
    batch: int = 2
    wrong_from: int = 10**6
    breaks_at: int = -1
    asked: list = dataclasses.field(default_factory=list)

    def settings(self):
        return {"kind": "scripted", "wrong_from": self.wrong_from}

    def answer(self, questions):
        if len(self.asked) == self.breaks_at:
            raise CloverError("broken")
        self.asked.append([q.index for q in questions])
        numbers = [int(q.prompt.split()[-1]) for q in questions]
        return [reply(str(2 * n) if n < self.wrong_from else "?") for n in numbers]


def test_every_backend_answers_every_problem():
    records = run(
        [doubling(), doubling(3, "other")], [Scripted(), Scripted("b", wrong_from=2)], None
    )
    assert [(r.backend, r.task, r.index) for r in records] == [
        (b, t, i) for b in ("scripted", "b") for t, n in (("double", 5), ("other", 3))
        for i in range(n)
    ]  # fmt: skip
    assert [r.verdict.correct for r in records[8:13]] == [True, True, False, False, False]


def test_an_interrupted_run_goes_on(tmp_path: Path):
    whole = run([doubling()], [Scripted()], tmp_path / "whole")
    with pytest.raises(CloverError, match="broken"):
        run([doubling()], [Scripted(breaks_at=2)], tmp_path / "out")
    results = tmp_path / "out" / harness.RESULTS_FILE
    lines = results.read_bytes()
    results.write_bytes(lines[:-10])  # as a crash in the middle of a line
    assert len(read_records(tmp_path / "out")) == 3
    backend = Scripted()
    assert run([doubling()], [backend], tmp_path / "out") == whole
    assert backend.asked == [[2, 3], [4]]  # the batch that lost a line is asked as a whole
    assert results.read_bytes() == (tmp_path / "whole" / harness.RESULTS_FILE).read_bytes()
    again = Scripted(breaks_at=0)
    assert run([doubling()], [again], tmp_path / "out") == whole


def test_a_backend_joins_later_and_another_configuration_is_refused(tmp_path: Path):
    first = run([doubling()], [Scripted()], tmp_path)
    both = run([doubling()], [Scripted(), Scripted("b", wrong_from=2)], tmp_path)
    assert both[:5] == first
    assert run([doubling()], [Scripted(breaks_at=0)], tmp_path) == first  # the other one stays
    assert len(read_records(tmp_path)) == 10
    for change, word in (
        (dict(tasks=[doubling(6)]), "task double"),
        (dict(tasks=[doubling(max_tokens=8)]), "task double"),
        (dict(backends=[Scripted("b", wrong_from=3)]), "backend b"),
        (dict(seed=1), "seed"),
    ):
        usual = {"tasks": [doubling()], "backends": [Scripted()], "out": tmp_path, "seed": 0}
        with pytest.raises(CloverError, match=f"other settings .*{word}"):
            run(**(usual | change))
    assert len(read_records(tmp_path)) == 10


def test_bad_folders_and_names(tmp_path: Path):
    with pytest.raises(CloverError, match="'double' twice"):
        run([doubling(), doubling()], [Scripted()], None)
    with pytest.raises(CloverError, match="none"):
        run([doubling()], [], None)
    with pytest.raises(CloverError, match="at least one of each"):
        doubling(0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CloverError, match="cannot be a folder"):
        run([doubling()], [Scripted()], tmp_path / "file")
    for name, text, words in (
        (harness.RUN_FILE, "{}", "not of a harness run"),
        (harness.RESULTS_FILE, '{"x": 1}\n', "no result"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(text)
        with pytest.raises(CloverError, match=words):
            run([doubling()], [Scripted()], folder)
    with pytest.raises(CloverError, match="cannot be read"):
        read_records(tmp_path)


# --- figures ------------------------------------------------------------------------------------


def record(correct, **changes):
    return Record("b", "t", 0, 0, reply("a", **changes), Verdict(correct, True))


def test_summary_by_hand():
    records = [
        record(True, tokens=6, forwards=3, previews=2, seconds=1.0, experts=(2.0, 4.0)),
        record(False, tokens=2, forwards=5, previews=4, seconds=3.0, experts=(8.0, 1.0)),
        record(False, tokens=4, forwards=0, previews=0, seconds=0.0, finish="length"),
    ]
    records[1] = dataclasses.replace(
        records[1], verdict=Verdict(False, False, {"steps valid": 0.25})
    )
    s = metrics.summarise(records)
    assert (s.n, s.accuracy, s.format_valid) == (3, 1 / 3, 2 / 3)
    assert (s.tokens, s.tpf, s.tpf_previews, s.tokens_per_s) == (4, 12 / 8, 12 / 6, 3)
    assert s.experts == (6.0, 2.0)  # (2·2 + 8·4)/6, (4·2 + 1·4)/6
    assert (s.early_stop, s.cut, s.details) == (1 / 3, 1 / 3, {"steps valid": 0.25})
    assert s.low < s.accuracy < s.high
    server = metrics.summarise([record(True, forwards=None, previews=None)])
    assert (server.tpf, server.tpf_previews, server.experts) == (None, None, ())


def test_repetition_by_hand():
    assert metrics.repetition(["a b c a b c a"]) == 2 / 5  # abc bca cab abc bca
    assert metrics.repetition(["a b c", "a b c"]) == 0  # only within an answer
    assert metrics.repetition(["a b", ""]) == 0


def test_mcnemar():
    """Values of R's binom.test(2, 12), binom.test(0, 6), and no discordant pair."""
    assert metrics.mcnemar(10, 2) == pytest.approx(0.03857421875)
    assert metrics.mcnemar(0, 6) == pytest.approx(0.03125)
    assert metrics.mcnemar(3, 3) == metrics.mcnemar(0, 0) == 1.0


def test_compare():
    pattern = [(True, True), (True, False), (False, True), (True, False), (False, False)]
    records, base = ([record(pair[k]) for pair in pattern] for k in (0, 1))
    found = metrics.compare(records, base)
    assert (found.only_backend, found.only_base, found.p) == (2, 1, 1.0)
    assert found.difference.difference == pytest.approx(1 / 5)


def test_aup_by_hand():
    assert metrics.aup([(1.0, 80.0)], 80.0) == 80
    # Of equal accuracy: the area under a flat line.
    assert metrics.aup([(1.0, 80.0), (3.0, 80.0)], 80.0) == pytest.approx(240)
    w = math.exp(-3 * (1 - 76 / 80))
    expected = 80 + 2 * (76 * w + 80) / 2
    assert metrics.aup([(3.0, 76.0), (1.0, 80.0), (9.0, 74.0)], 80.0) == pytest.approx(expected)
    assert metrics.aup([(1.0, 0.0)], 0.0) == 0


def test_series_join_thresholds_and_schedules_only():
    summary = metrics.summarise([record(True, tokens=2, forwards=1)])
    names = ("a", "b", "c", "d")
    sampling = [
        {"threshold": 0.9, "steps": 0, "policy": "x"},
        {"threshold": 0.5, "steps": 4, "policy": "x"},
        {"threshold": 0.9, "steps": 0, "policy": "y"},
        None,
    ]
    settings = {n: {"sampling": s} if s else {} for n, s in zip(names, sampling, strict=True)}
    summaries = [dataclasses.replace(summary, backend=n) for n in names]
    summaries[3] = dataclasses.replace(summaries[3], tpf=None)  # a server
    found = metrics.series(summaries, settings)
    assert [s.backends for s in found] == [("a", "b"), ("c",)]


def test_report(tmp_path: Path):
    backends = [Scripted(), Scripted("b", wrong_from=2)]
    records = run([doubling(), doubling(3, "other")], backends, None)
    found = harness_report.report(records, {b.name: {} for b in backends}, ["Oracle: none."])
    assert found.by_task == {
        "scripted": {"double": (5, 5), "other": (3, 3)}, "b": {"double": (2, 5), "other": (2, 3)},
    }  # fmt: skip
    text = harness_report.markdown(found)
    assert "| scripted | 8 | 100.0 % |" in text and "| b | -50.0 |" in text
    assert "| 0 / 4 | 0.12 |" in text  # 2 · 2^-4 = 0.125
    assert "| double | 5 | 100 % | 40 % |" in text and text.endswith("Oracle: none.\n")
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1
    harness_report.plot(found, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    harness_report.plot(  # servers only: no tokens per forward
        dataclasses.replace(
            found,
            series=(),
            summaries=tuple(dataclasses.replace(s, tpf=None) for s in found.summaries),
        ),
        tmp_path / "servers.png",
    )


# --- suites -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", suites.FAMILIES)
def test_suites_accept_their_references(name):
    for task in suites.suite(name, n=2, judge="interpreter"):
        references = [p.reference for p in task.problems]
        if name == "B":
            texts = [" ".join(item.worlds[-1]) for item in references]
        else:
            texts = [tasks.response_text(item, task.thinking) for item in references]
        assert task.thinking == (task.name in tasks.SCRATCHPAD_TASKS)
        assert all(v.correct and v.format_valid for v in task.judge(task.problems, texts))
        wrong = task.judge(task.problems, ["nonsense, surely"] * len(texts))
        assert not any(v.correct for v in wrong)
        json.dumps(task.settings())


def test_suite_choices():
    plain = suites.suite("A", n=1, families=["gcd"], thinking=False, judge="interpreter")
    assert [(t.name, t.thinking) for t in plain] == [("gcd", False)]
    with pytest.raises(CloverError, match="'text' is not of suite A"):
        suites.suite("A", families=["text"])
    with pytest.raises(CloverError, match="n is 0"):
        suites.suite("B", n=0)
