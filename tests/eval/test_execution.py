"""Programs are run and judged: right ones, wrong ones, broken ones, and those that mean harm."""

import dataclasses
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from clover_jax.data import tasks
from clover_jax.data.tasks import Item
from clover_jax.errors import CloverError
from clover_jax.eval import execution, held_out
from clover_jax.eval.execution import Limits, Outcome, Program, Verdict, execute, judge

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are run on Linux only")


def body(*lines: str) -> str:
    return "\n    ".join(["def f(xs):", *lines])


def program(source: str) -> Program:
    return Program(source, "f", [[3, 1, 2]])


TOTAL = body("return sum(xs)")
# Sources and what becomes of them; 6 is expected. All of them go through one call.
JUDGED = {
    "right": (TOTAL, Verdict("passed")),
    "another way": (body("t = 0", "while xs:", "    t += xs.pop()", "return t"), Verdict("passed")),
    "lambda": ("f = lambda xs: sum(xs)", Verdict("passed")),
    "closure": (body("def g(x): return x + len(xs) - 3", "return sum(map(g, xs))"),
                Verdict("passed")),
    "caught": (body("try: return xs[9]", "except IndexError: return 6"), Verdict("passed")),
    "wrong": (body("return max(xs)"), Verdict("wrong")),
    "nothing": (body("pass"), Verdict("wrong")),
    "text": (body("return '6'"), Verdict("wrong")),
    "tuple": (body("return (6,)"), Verdict("error", "TypeError")),
    "tuple in a list": (body("return [(6,)]"), Verdict("error", "TypeError")),
    "generator": (body("yield 6"), Verdict("error", "TypeError")),
    "number key": (body("return {1: 2}"), Verdict("error", "TypeError")),
    "not a number": (body("return float('nan')"), Verdict("error", "output")),
    "no Python": ("def f(xs)", Verdict("error", "SyntaxError")),
    "empty": ("", Verdict("error", "KeyError")),
    "other name": ("def g(xs): return 6", Verdict("error", "KeyError")),
    "no function": ("f = 6", Verdict("error", "TypeError")),
    "null byte": (TOTAL + "\0", Verdict("error", "SyntaxError")),
    "half a surrogate": (TOTAL + "#\ud800", Verdict("error", "UnicodeEncodeError")),
    "division": (body("return 1 // 0"), Verdict("error", "ZeroDivisionError")),
    "loop": (body("while True: pass"), Verdict("timeout")),
    "loop at the start": ("while True: pass", Verdict("timeout")),
    "power": (body("return 9 ** 9 ** 9"), Verdict("timeout")),
    "memory": (body("return [0] * 10 ** 9"), Verdict("memory")),
    "memory bit by bit": (body("while True: xs = xs + xs"), Verdict("memory")),
    "recursion": (body("return f(xs)"), Verdict("error", "RecursionError")),
    "deep result": (body("for i in range(10**5): xs = [xs]", "return xs"),
                    Verdict("error", "RecursionError")),
    "huge output": (body("return [7] * 10 ** 6"), Verdict("error", "output")),
    "long number": (body("return 10 ** 10 ** 5"), Verdict("error", "output")),
    "exit": (body("exit()"), Verdict("error", "NameError")),
    "SystemExit": (body("raise SystemExit"), Verdict("error", "NameError")),
    "print": (body("print('{}')", "return 6"), Verdict("error", "NameError")),
    "open": (body("open('x', 'w')"), Verdict("error", "NameError")),
    "eval": (body("return eval('6')"), Verdict("error", "NameError")),
    "type": (body("return type(xs)"), Verdict("error", "NameError")),
    "getattr": (body("return getattr(xs, 'pop')"), Verdict("error", "NameError")),
    "class": ("class f: pass", Verdict("error", "NameError")),
    "import": ("import os\n" + TOTAL, Verdict("error", "ImportError")),
    "import inside": (body("from os import fork", "while True: fork()"),
                      Verdict("error", "ImportError")),
    "subclasses": (body("return xs.__class__.__base__.__subclasses__()"),
                   Verdict("error", "Refused")),
    "import by name": (body("return __import__('os')"), Verdict("error", "Refused")),
    "globals": (body("return f.__globals__"), Verdict("error", "Refused")),
    "frame": (body("return (x for x in xs).gi_frame.f_back"), Verdict("error", "Refused")),
    "code": (body("return (x for x in xs).gi_code"), Verdict("error", "Refused")),
    "traceback": (body("try: 1 / 0", "except Exception as e: return e.__traceback__"),
                  Verdict("error", "Refused")),
    "pattern": (body("match xs:", "    case list(__class__=c): return c"),
                Verdict("error", "Refused")),
    "wide letters": (body("return xs._＿class__"), Verdict("error", "Refused")),
    "formatted": (body("return f'{xs.__class__}'"), Verdict("error", "Refused")),
    "right again": (TOTAL, Verdict("passed")),
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    programs = [program(source) for source, _ in JUDGED.values()]
    return dict(zip(JUDGED, judge(programs, [[6]] * len(programs)), strict=True))


@pytest.mark.parametrize("name", JUDGED)
def test_judged(verdicts: dict[str, Verdict], name: str):
    assert verdicts[name] == JUDGED[name][1]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """Workers, as they are started."""
    found, popen = [], subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen:
        found.append(popen(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


def assert_gone(process: subprocess.Popen) -> None:
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):  # nor any other process of its group
        os.killpg(process.pid, 0)


def test_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: list):
    """No folder, no process; the clock ends what the CPU limit would let run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loop = program(body("while True: pass"))
    found = execute([program(TOTAL), loop, program(TOTAL)], Limits(60, wall_seconds=0.3))
    assert [o.status for o in found] == ["ran", "timeout", "ran"]
    assert list(tmp_path.iterdir()) == []
    assert len(started) == 1
    assert_gone(started[0])


@pytest.mark.parametrize("harm", (signal.SIGKILL, signal.SIGSTOP))
def test_a_lost_worker_is_replaced(monkeypatch: pytest.MonkeyPatch, started: list, harm: int):
    """As by a program that got out."""
    monkeypatch.setattr(execution, "_GRACE", 0.0)
    ask, asked = execution._Worker.ask, []

    def harmed(self: Any, what: Program, seconds: float) -> Any:
        asked.append(what)
        if asked.count(program(TOTAL)) == 1 and what == program(TOTAL):
            os.kill(started[-1].pid, harm)
        return ask(self, what, seconds)

    monkeypatch.setattr(execution._Worker, "ask", harmed)
    found = execute([program(TOTAL), program(TOTAL)], Limits(wall_seconds=1.0))
    assert [o.status for o in found] == ["timeout", "ran"]
    assert len(started) == 2
    for process in started:
        assert_gone(process)


def test_programs_do_not_meet():
    """Neither does one program see the last one's names, nor a call what the last one did."""
    leave = "y = 6\n" + body("xs.append(1)", "return len(xs)")
    found = execute([Program(leave, "f", [[1], [1]]), program(body("return y"))])
    assert found == [Outcome("ran", outputs=(2, 2)), Outcome("error", "NameError")]


def test_every_call_counts():
    programs = [Program(body("return xs[0]"), "f", [[1], [2]])] * 2
    assert judge(programs, [[1, 2], [1, 3]]) == [Verdict("passed"), Verdict("wrong")]
    assert execute([Program(body("return xs[0]"), "f", [[1], []])]) == [
        Outcome("error", "IndexError")
    ]


def test_limits_of_output():
    """JSON of the outcome, quotes and names included."""
    of = lambda n: [program(body(f"return 'x' * {n}"))]
    assert execute(of(100), Limits(output_bytes=200))[0].status == "ran"
    assert execute(of(201), Limits(output_bytes=200)) == [Outcome("error", "output")]


# What code that got past the table and the names would find.
BEHIND = """
import json, os, runpy, socket, resource
worker = runpy.run_path({worker!r})
null, (reader, writer) = os.open(os.devnull, os.O_RDWR), os.pipe()
reports = os.dup(1)
tries = {{
    "open": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "write": lambda: open("left", "w"),
    "socket": lambda: socket.socket(),
    "pipe": lambda: os.pipe(),
    "fork": lambda: os.fork() or os._exit(0),
    "raise a limit": lambda: resource.setrlimit(resource.RLIMIT_NPROC, (9, 9)),
    "old descriptors": lambda: os.fstat(reports),
    "root": lambda: os.setuid(0),
}}
limits = worker["Limits"](2, 9.0, 2**28, 1000)
worker["lock_down"](limits, null, writer)
found = {{}}
for name, what in tries.items():
    try:
        what()
    except (OSError, ValueError) as error:
        found[name] = type(error).__name__
print("to nobody")
os.write(worker["RESULT"], json.dumps(found).encode())
os._exit(0)
"""


def test_what_the_system_stops(tmp_path: Path):
    worker = Path(execution.__file__).with_name("execution_worker.py")
    # The result's descriptor is a pipe of the script's own: its other end stays open in a fork.
    script = f"""
import os, sys
reader, writer = os.pipe()
if os.fork() == 0:
    os.dup2(writer, 5)
    code = {BEHIND.format(worker=str(worker))!r}
    code = code.replace("null, (reader, writer) = os.open(os.devnull, os.O_RDWR), os.pipe()",
                        "null, writer = os.open(os.devnull, os.O_RDWR), 5")
    exec(code, {{}})
os.close(writer)
sys.stdout.write(os.read(reader, 10**6).decode())
"""
    ran = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    found = json.loads(ran.stdout)
    if os.getuid() != 0:
        assert found.pop("root") == "PermissionError"
    assert found.keys() >= {"open", "write", "socket", "pipe", "fork", "raise a limit"}, ran.stderr
    assert "old descriptors" in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("said", (b"", b"x", b"[]", b"{}", b'{"status": "passed"}', b"[" * 5000))
def test_what_else_comes_out_is_an_error(said: bytes):
    worker = runpy.run_path(str(Path(execution.__file__).with_name("execution_worker.py")))
    reader, writer = os.pipe()
    os.write(writer, said)
    os.close(writer)
    with subprocess.Popen(["true"]) as child:
        told = worker["outcome"](child.pid, reader, worker["Limits"](1, 9.0, 2**28, 10_000))
    os.close(reader)
    assert told == {"status": "error", "kind": "output"}


def test_300_references_pass():
    """By execution as by the interpreter, and on lists that neither has seen."""
    rng = random.Random(3)
    items = [tasks.generate("python_function", rng) for _ in range(300)]
    assert held_out.run_correctly([i.answer for i in items], items) == [True] * 300


def item(condition: str, value: str, reducer: str) -> Item:
    answer = body(f"return {reducer}([{value} for x in xs if {condition}])")
    return Item("python_function", "", "", answer, "")


ALIKE = ("0123456789", "<>=", "+-*%/", "xy", "([)]: ")


def test_agrees_with_the_interpreter():
    """On references with one letter exchanged for one like it: right, wrong, broken."""
    rng = random.Random(0)
    items, sources = [], []
    for _ in range(150):
        items.append(tasks.generate("python_function", rng))
        source = list(items[-1].answer)
        at = rng.choice([i for i, c in enumerate(source) if i > 10 and c in "".join(ALIKE)])
        source[at] = rng.choice(next(alike for alike in ALIKE if source[at] in alike))
        sources.append("".join(source))
    judged = [tasks.score(i, s) for i, s in zip(items, sources, strict=True)]
    ran = held_out.run_correctly(sources, items)
    assert [s.correct for s in judged] == [
        r and s.format_valid for r, s in zip(ran, judged, strict=True)
    ]
    assert 20 < sum(ran) < 130


# Where they differ Python is right: the interpreter's subset lacks much, and has only lists.
DIFFER = [
    (item("x > 3", "x", "sum"), body("return sum(x for x in xs if x > 3 and True)"), False),
    (item("x > 3", "x", "sum"), body("return sum(filter(lambda x: x > 3, xs))"), False),
    (item("x > 3", "x", "sum"), body("return+sum([x for x in xs if x > 3])"), False),
    (item("x > 3", "x", "len"), body("return len(x for x in xs if x > 3)"), True),
]


@pytest.mark.parametrize(("task", "source", "interpreter"), DIFFER)
def test_differs_from_the_interpreter(task: Item, source: str, interpreter: bool):
    assert tasks.score(task, source).correct == interpreter
    assert held_out.run_correctly([source], [task]) == [not interpreter]


def test_no_programs():
    assert execute([]) == []


@pytest.mark.parametrize(
    "change", [{"cpu_seconds": 0}, {"wall_seconds": 0.0}, {"memory_bytes": -1}, {"output_bytes": 0}]
)
def test_limits_are_positive(change: dict):
    with pytest.raises(CloverError, match="limits above 0"):
        dataclasses.replace(Limits(), **change)


def test_other_systems(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(CloverError, match=r"only run on Linux.*darwin"):
        execute([program(TOTAL)])


def test_a_broken_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CloverError, match="/bin/false ran no program"):
        execute([program(TOTAL)])
