"""Collectives of a compiled program, counted from its text as XLA prints it.

Every collective is counted as often as it runs: those in the body of a loop are multiplied by the
loop's trip count. XLA notes it where it could prove it (`known_trip_count`). The TPU's compiler
does not print it, but its conditions compare a counter with a constant, and the counters of
`lax.scan` start at 0 and go up by 1. The limit: a loop that ends by its data has no count, so what
is in it counts once and is said to be of a loop of unknown length; and of a conditional all
branches count.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}


class Collective(NamedTuple):
    """All runs of one kind of collective on one device.

    Bytes sent are those of a ring, the least any algorithm needs: of n devices, (n - 1) / n of an
    all-gather's result, twice that of an all-reduce's, n - 1 times a reduce-scatter's result.
    """

    runs: int
    result_bytes: int
    sent_bytes: int


class Collectives(NamedTuple):
    """Of a program: by kind, and the runs among them that are in loops of unknown length."""

    by_kind: dict[str, Collective]
    in_unknown_loops: int


class _Instruction(NamedTuple):
    name: str
    op: str
    shape: str
    rest: str


def collectives(text: str) -> Collectives:
    """Count the collectives of `compiled.as_text()`."""
    computations, entry, devices = _computations(text)
    known: dict[str, Collectives] = {}

    def of(name: str) -> Collectives:
        if name not in known:
            known[name] = count(computations.get(name, []))
        return known[name]

    def count(body: list[_Instruction]) -> Collectives:
        sums: dict[str, Collective] = {}
        unknown = 0
        for one in body:
            kind = one.op.removesuffix("-start")
            if kind in KINDS:
                _add(sums, kind, _collective(kind, one, devices), 1)
            trips = _trips(one, computations)
            times = trips or 1
            for called in _called(one):
                inner = of(called)
                for k, c in inner.by_kind.items():
                    _add(sums, k, c, times)
                if one.op == "while" and trips is None:
                    unknown += sum(c.runs for c in inner.by_kind.values())
                else:
                    unknown += times * inner.in_unknown_loops
        return Collectives(sums, unknown)

    return of(entry)


def _add(sums: dict[str, Collective], kind: str, more: Collective, times: int) -> None:
    old = sums.get(kind, Collective(0, 0, 0))
    sums[kind] = Collective(*(a + times * b for a, b in zip(old, more, strict=True)))


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str, int]:
    """Instructions by computation, the entry's name, and the number of devices."""
    found: dict[str, list[_Instruction]] = {}
    entry, body = "", []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            body = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif " = " in line and line.startswith(" "):
            body.append(_parse(*line.split(" = ", 1)))
    devices = re.search(r"num_partitions=(\d+)", text)
    return found, entry, int(devices[1]) if devices else 1


def _parse(name: str, line: str) -> _Instruction:
    """Shape, then `op(operands), attributes`."""
    end, depth = 0, 0
    for end, letter in enumerate(line):  # noqa: B007
        depth += (letter == "(") - (letter == ")")
        if letter == " " and depth == 0:
            break
    op, _, rest = line[end + 1 :].partition("(")
    return _Instruction(name.split()[-1].lstrip("%"), op, line[:end], rest)


def _trips(one: _Instruction, computations: dict[str, list[_Instruction]]) -> int | None:
    """How often a loop runs, if the text says so."""
    if match := _TRIPS.search(one.rest):
        return int(match[1])
    if match := re.search(r"condition=%?([\w.\-]+)", one.rest):
        condition = computations.get(match[1], [])
        constants = {i.name: i.rest.partition(")")[0] for i in condition if i.op == "constant"}
        if condition and condition[-1].op == "compare" and "direction=LT" in condition[-1].rest:
            bound = condition[-1].rest.partition(")")[0].split("%")[-1]
            if constants.get(bound, "").isdigit():
                return int(constants[bound])
    return None


def _called(one: _Instruction) -> Iterator[str]:
    yield from _CALLED.findall(one.rest)
    for names in _CALLED_LISTS.findall(one.rest):
        yield from (name.strip().lstrip("%") for name in names.split(","))


def _collective(kind: str, one: _Instruction, devices: int) -> Collective:
    shape = one.shape
    if one.op in ("all-gather-start", "collective-permute-start", "reduce-scatter-start"):
        shape = _elements(shape)[1]  # (operands, results, ...)
    size, n = _bytes(shape), _group(one.rest, devices)
    sent = {
        "all-reduce": 2 * size * (n - 1) / n,
        "reduce-scatter": size * (n - 1),
        "collective-permute": size,
        "collective-broadcast": size,
    }.get(kind, size * (n - 1) / n)
    return Collective(1, size, round(sent))


def _elements(shape: str) -> list[str]:
    """The elements of a tuple's shape."""
    parts, depth, start = [], 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "({[") - (letter in ")}]")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            parts.append(shape[start:at])
            start = at + 1
    return parts


def _bytes(shape: str) -> int:
    bits = 0
    for kind, sizes in _ARRAY.findall(shape):
        digits = re.match(r"[a-z]+(\d+)", kind)
        width = _BITS.get(kind, int(digits[1]) if digits else 0)
        bits += width * math.prod(int(s.lstrip("<=")) for s in sizes.split(",") if s)
    return bits // 8


def _group(rest: str, devices: int) -> int:
    """Devices that take part together."""
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']+)'", match[2]))
    return devices
