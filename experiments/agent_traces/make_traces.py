"""Writes train.jsonl (200 agent traces) and held_out.jsonl (100 others) beside itself.

A shop assistant is asked about its stock, looks it up with the tool `stock`, computes in its
thoughts and answers. What is in stock differs from trace to trace, so no answer can be known
without the call. No trace lists its tools: their schema costs more tokens than all the rest.
Every problem (question and stock) is there once, so nothing held out was trained on.
"""

import json
import random
from pathlib import Path
from typing import Any

from clover_jax.files import whole_file

ITEMS = ("bolts", "cups", "hats", "keys", "lamps", "nails", "pens", "ropes")
TRAIN, HELD_OUT = 200, 100
SEED = 6


def trace(rng: random.Random) -> dict[str, Any]:
    """One conversation: a question, one message with calls, the results, the answer."""
    kind = rng.choice(("take", "take", "add", "add", "both", "none"))
    item, other = rng.sample(ITEMS, 2)
    have, more, change = rng.randint(10, 99), rng.randint(10, 99), rng.randint(1, 60)
    answer: dict[str, Any]
    if kind == "both":
        question, looked_up = f"How many {item} and {other} are there?", {item: have, other: more}
        answer = computed(f"{have} + {more}", have + more)
    elif kind == "add":
        question, looked_up = f"How many {item} are there if I add {change}?", {item: have}
        answer = computed(f"{have} + {change}", have + change)
    else:
        change = min(change, have)
        question = f"How many {item} are left if I take {change}?"
        looked_up = {item: have if kind == "take" else "none"}
        answer = computed(f"{have} - {change}", have - change)
        if kind == "none":
            answer = {"role": "assistant", "content": f"There are no {item}."}
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call(name) for name in looked_up]},
            *({"role": "tool", "content": str(n)} for n in looked_up.values()),
            answer,
        ],
        "enable_thinking": True,
    }


def computed(term: str, value: int) -> dict[str, Any]:
    """The answer, with the calculation as its thought."""
    return {
        "role": "assistant",
        "reasoning_content": f"{term} = {value}",
        "content": str(value),
    }


def call(item: str) -> dict[str, Any]:
    """A tool call as the OpenAI API writes it."""
    return {"type": "function", "function": {"name": "stock", "arguments": {"item": item}}}


def main() -> None:
    """Write both files."""
    rng = random.Random(SEED)
    lines: dict[str, None] = {}  # a set in the order of the draws
    while len(lines) < TRAIN + HELD_OUT:
        lines[json.dumps(trace(rng))] = None
    drawn = [f"{line}\n" for line in lines]
    parts = {"train.jsonl": drawn[:TRAIN], "held_out.jsonl": drawn[TRAIN:]}
    for name, part in parts.items():
        with whole_file(Path(__file__).parent / name) as path:
            path.write_text("".join(part))


if __name__ == "__main__":
    main()
