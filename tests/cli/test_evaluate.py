"""`clover eval`: its suites on a small random model, and what they refuse."""

import dataclasses
import gzip
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from clover_jax.data import tasks
from clover_jax.diffusion.generate import Completion, Generator, Stats
from clover_jax.eval import infilling, likelihood
from clover_jax.eval.likelihood import Likelihood
from tests.cli.conftest import Clover, Ran, model
from tests.eval.test_likelihood import installed
from tests.helpers.server import serve

__all__ = ["model", "serve"]  # fixtures
ROWS = [{"prompt": "two cats", "canonical_solution": " the ants"} for _ in range(3)]


def lines(ran: Ran) -> list[dict]:
    assert ran.status == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


def answered(text: str, **changes) -> Completion:
    stats = Stats(1, 0, 8, 2, 2, 4.0, 4.0, 1.0, 1.0, (), ())
    done = Completion((1, 2), text, "stop", (), (), (), stats)
    return dataclasses.replace(done, **changes)


def test_functions_are_run(model: Path, clover: Clover, monkeypatch: pytest.MonkeyPatch):
    """By default; the interpreter does not know a conditional expression."""
    (item,) = tasks.eval_set("python_function", "test", 1)
    done = answered(item.answer.replace("return ", "return 0 if False else "))
    monkeypatch.setattr(Generator, "complete", lambda _, requests, **__: [done] * len(requests))
    arguments = ("eval", "--checkpoint", model, "--task", "python_function", "--n", 1, "--json",
                 "--mode", "ar")  # fmt: skip
    (ran,), (read,) = lines(clover(*arguments)), lines(clover(*arguments, "--judge", "interpreter"))
    assert (ran["accuracy"], read["accuracy"]) == (1, 0)
    assert ran["format_valid"] == read["format_valid"] == 1


def test_a_run_is_kept_and_goes_on(
    model: Path, clover: Clover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serve
):
    """Ours in two modes and a server, on the same two problems; then nothing is asked again."""
    modes = []

    def complete(_, requests, mode):
        modes.append(mode)
        return [answered("1</think>\n\n2" if mode == "ar" else "5")] * len(requests)

    monkeypatch.setattr(Generator, "complete", complete)
    url = serve(lambda _: {"choices": [{"message": {"content": "0"}, "finish_reason": "stop"}]})
    out = tmp_path / "out"
    arguments = ("eval", "--checkpoint", model, "--task", "gcd", "--n", 2, "--out", out,
                 "--oracle", 0, "--backend", "ar", "--backend", "block:threshold=0.5")  # fmt: skip
    ran = clover(*arguments, "--endpoint", f"{url},model=rival")
    assert ran.status == 0 and modes == ["ar", "block"], ran.err
    right = sum(item.answer == "2" for item in tasks.eval_set("gcd", "test", 2))
    assert f"| ar | 2 | {50 * right:.1f} % |" in ran.out and "| rival | 2 | 0.0 % |" in ran.out
    assert (out / "report.md").read_text() == ran.out and (out / "report.png").exists()
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(r["backend"], r["index"]) for r in records] == [
        (b, i) for b in ("ar", "block:threshold=0.5", "rival") for i in (0, 1)
    ]
    assert records[0]["reply"]["token_ids"] == [1, 2] and records[0]["seed"] == 0
    again = clover(*arguments)  # without the server
    assert again.status == 0 and len(modes) == 2
    other = clover(*arguments, "--n", 3)
    assert other.status == 2 and "other settings (task gcd)" in other.err
    unknown = clover(*arguments[:-4], "--endpoint", "http://127.0.0.1:9/v1,attempts=1")
    assert unknown.status == 2 and "cannot be asked" in unknown.err


@pytest.mark.slow
def test_the_quick_suite(model: Path, clover: Clover, tmp_path: Path):
    arguments = ("eval", "--checkpoint", model, "--suite", "quick", "--n", 2, "--batch", 2,
                 "--max-tokens", 12, "--oracle", 1, "--out", tmp_path)  # fmt: skip
    ran = clover(*arguments)
    assert ran.status == 0, ran.err
    assert "| block:close=unsure | 20 |" in ran.out and "Oracle" in ran.out
    assert clover(*arguments).out == ran.out  # all of it from the folder, times included


def test_infill(model: Path, clover: Clover, monkeypatch: pytest.MonkeyPatch):
    """Every arm's fill is the reference's."""
    monkeypatch.setattr(
        infilling, "_fill", lambda _, holes, *__: [(h.response[h.first : h.end], 3) for h in holes]
    )
    arguments = ("eval", "--checkpoint", model, "--suite", "infill", "--n", 3, "--hole", 2)
    told = lines(clover(*arguments, "--json"))
    assert [t["arm"] for t in told] == ["block", "block, left only", "ar"]
    assert all((t["n"], t["right"], t["exact"], t["forwards"]) == (3, 1, 1, 3) for t in told)
    header, _, *rows = clover(*arguments).out.splitlines()
    assert len(rows) == 3 and {row.count("|") for row in rows} == {header.count("|")}
    assert rows[0].startswith("| block | 3 | 100.0 % |") and rows[0].endswith("| - |")
    assert "+0.0 (" in rows[1]


def test_humaneval_loss(
    model: Path, clover: Clover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    installed(monkeypatch, tmp_path).write_bytes(gzip.compress(data))
    nats = lambda *_, draws, **__: Likelihood(4, 8.0, tuple(float(10 + d) for d in range(draws)))
    monkeypatch.setattr(likelihood, "likelihood", nats)
    arguments = ("eval", "--checkpoint", model, "--suite", "humaneval-loss", "--n", 2,
                 "--draws", 3)  # fmt: skip
    (told,) = lines(clover(*arguments, "--json"))
    assert (told["texts"], told["left_out"], told["bytes"], told["draws"]) == (2, 0, 18, 3)
    ran = clover(*arguments)
    bits = 16 / math.log(2) / 18
    assert ran.out.splitlines()[2:] == [
        f"| causal | 2.000 | {bits:.3f} |",
        f"| diffusion bound, 3 draws | 2.750 | {bits * 22 / 16:.3f} "
        f"± {bits * 2 / math.sqrt(3) / 16:.3f} |",
    ]
    assert "2 solutions of 8 tokens and 18 bytes" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--suite other", "--suite"),
        ("--suite infill --task gcd", "choose one"),
        ("--suite infill --n 0", "--n is 0"),
        ("--suite infill --hole 0", "length is 0"),
        ("--suite infill --hole 99", "room for a hole of 99 tokens"),
        ("--suite infill --hole 2 --batch 0", "batch is 0"),
        ("--suite humaneval-loss --draws 0", "draws is 0"),
        ("--task none", "'none'"),
        ("--suite B --task gcd", "'gcd'"),
        ("--backend me", "expected ar or block"),
        ("--backend block:speed=1", "speed"),
        ("--suite infill --backend ar", "--backend"),
        ("--suite quick --n 0", "--n is 0"),
        ("--oracle -1", "--oracle is -1"),
        ("--endpoint http://x,api=completions,batch=0", "batch 0"),
        ("--judge me", "--judge"),
    ],
)
def test_refusals(
    model: Path, clover: Clover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str,
    message: str,
):  # fmt: skip
    data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    installed(monkeypatch, tmp_path).write_bytes(gzip.compress(data))
    ran = clover("eval", "--checkpoint", model, *arguments.split())
    assert ran.status == 2 and ran.out == "" and message in ran.err, ran


def test_other_systems(model: Path, clover: Clover, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    for arguments in ("--task python_function", "--suite infill"):
        ran = clover("eval", "--checkpoint", model, *arguments.split())
        assert ran.status == 2 and "--judge interpreter" in ran.err


def test_no_humaneval(model: Path, clover: Clover, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ran = clover("eval", "--checkpoint", model, "--suite", "humaneval-loss")
    assert ran.status == 2 and ran.out == "" and "experiments" in ran.err
