"""Strict JSON of files that may be damaged or hostile."""

import json
import reprlib
from typing import Any


def parse(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: not UTF-8 or not JSON, a key given twice, NaN or Infinity, nested too deeply.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def show(value: object, limit: int = 160) -> str:
    """A value from a file on one printable line of at most `limit` characters."""
    text = value if isinstance(value, str) else reprlib.repr(value)  # however large or nested
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {show(twice)} is given twice")
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
