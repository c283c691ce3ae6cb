"""Runs programs for `execution`, each in a fork of this bare interpreter. Never imported by it.

A job is a line of JSON on standard input (source, function, inputs), its outcome a line on standard
output. The fork gives up its descriptors, its user where that is root, and every limit below before
it looks at the source, so that parsing is bounded, too.
"""

import ast
import builtins
import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
import unicodedata  # noqa: F401  the parser imports it for names that are not ASCII
from typing import Any, NamedTuple

NOBODY = 65534
STATUSES = ("ran", "error", "timeout", "memory", "unconfined")
RESULT = 3  # the fork's only descriptor beside 0 to 2, which are /dev/null

ALLOWED = (
    "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "filter", "float", "frozenset",
    "int", "isinstance", "iter", "len", "list", "map", "max", "min", "next", "pow", "range", "repr",
    "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip",
    "ArithmeticError", "AssertionError", "AttributeError", "Exception", "IndexError", "KeyError",
    "LookupError", "NameError", "NotImplementedError", "OverflowError", "RecursionError",
    "RuntimeError", "StopIteration", "TypeError", "ValueError", "ZeroDivisionError",
)  # fmt: skip
# Roads from an object to its class, its globals or its frame.
REFUSED = ("__", "ag_", "co_", "cr_", "f_", "gi_", "tb_")


class Refused(Exception):
    """The program asks for what no program gets."""


class Limits(NamedTuple):
    """Of one program; see `execution.Limits`."""

    cpu_seconds: int
    wall_seconds: float
    memory_bytes: int
    output_bytes: int


def serve(limits: Limits) -> None:
    """Answer jobs until standard input ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for line in sys.stdin.buffer:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            confined(json.loads(line), limits, null, writer)
        os.close(writer)
        told = outcome(child, reader, limits)
        os.close(reader)
        sys.stdout.buffer.write(json.dumps(told).encode() + b"\n")
        sys.stdout.buffer.flush()


def outcome(child: int, reader: int, limits: Limits) -> dict[str, Any]:
    """What a fork says, or what ends it."""
    answer = b""
    told: Any = None
    deadline = time.monotonic() + limits.wall_seconds
    while told is None:
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            told = {"status": "timeout"}
        elif not (part := os.read(reader, 65536)):
            break
        elif len(answer := answer + part) > limits.output_bytes:
            told = {"status": "error", "kind": "output"}
    if told is not None:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if told is not None:
        return told
    if os.WIFSIGNALED(status):
        ended = os.WTERMSIG(status)
        if ended == signal.SIGXCPU:
            return {"status": "timeout"}
        return {"status": "error", "kind": signal.Signals(ended).name}
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(answer)
    if isinstance(told, dict) and told.get("status") in STATUSES:
        return told
    return {"status": "error", "kind": "output"}  # a program that got out wrote something else


def confined(job: dict[str, Any], limits: Limits, null: int, writer: int) -> None:
    """The fork's whole life."""
    try:
        lock_down(limits, null, writer)
    except OSError as error:
        told = {"status": "unconfined", "kind": str(error)}
    else:
        told = run(job)
    try:
        text = json.dumps(told, allow_nan=False).encode()
    except (MemoryError, RecursionError, ValueError):  # NaN, or a number too long to print
        text = b'{"status": "error", "kind": "output"}'
    while text:
        text = text[os.write(RESULT, text) :]
    os._exit(0)


def lock_down(limits: Limits, null: int, writer: int) -> None:
    """Only the result's descriptor, no other user's rights, and limits that cannot be raised."""
    for standard in range(3):
        os.dup2(null, standard)
    os.dup2(writer, RESULT)  # which was `null`, the first that the worker opened
    os.closerange(RESULT + 1, 1024)
    if os.getuid() == 0:  # root has no limit on processes
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    for kind, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),  # nothing can be opened, no socket or pipe made
    ):
        resource.setrlimit(kind, (most, most))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a job."""
    try:
        return {"status": "ran", "outputs": call(job)}
    except MemoryError:
        return {"status": "memory"}
    except BaseException as error:
        return {"status": "error", "kind": type(error).__name__}


def call(job: dict[str, Any]) -> list[Any]:
    """What the job's function returns for each input."""
    tree = ast.parse(job["source"])
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            # Every string in a tree is a name, but for the value of a constant.
            if not (isinstance(node, ast.Constant) and name == "value"):
                check_names(value if isinstance(value, list) else [value])
    scope: dict[str, Any] = {"__builtins__": {name: getattr(builtins, name) for name in ALLOWED}}
    exec(compile(tree, "program", "exec"), scope)
    outputs = [scope[job["function"]](value) for value in job["inputs"]]
    for output in outputs:
        check_plain(output)
    return outputs


def check_names(values: list[Any]) -> None:
    """No name leads out of the table of builtins."""
    if any(isinstance(value, str) and value.startswith(REFUSED) for value in values):
        raise Refused


def check_plain(value: Any) -> None:
    """JSON would turn a tuple into a list, and call any subclass of them the same."""
    if type(value) is list:
        for element in value:
            check_plain(element)
    elif type(value) is dict:
        check_plain(list(value.values()))
        if any(type(key) is not str for key in value):
            raise TypeError
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError


if __name__ == "__main__":
    serve(Limits(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
