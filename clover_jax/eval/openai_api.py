"""A JSON client of OpenAI-compatible servers, from the standard library."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from clover_jax.errors import CloverError

SHOWN = 300  # characters of a server's complaint that are shown
KEY_VARIABLE = "OPENAI_API_KEY"  # sent as a bearer token where it is set; never stored
_AGAIN = (408, 429, 500, 502, 503, 504)  # the server may do better in a moment


class RefusedError(Exception):
    """The server answered with an error."""


def post(url: str, body: dict[str, Any], *, seconds: float, attempts: int = 1) -> Any:
    """The decoded answer to a JSON body.

    Args:
        url: of the call, such as http://localhost:30000/v1/completions.
        body: JSON object.
        seconds: until an attempt is given up.
        attempts: of a call that cannot be made, takes too long, or meets a busy or broken server;
            1, 2, 4, ... seconds apart.

    Raises:
        RefusedError: the server answers with an error status.
        CloverError: the server cannot be asked, what it answers is no JSON, or the key cannot be
            sent.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if not (key.isascii() and (key.isprintable() or not key)):
        raise CloverError(
            f"{KEY_VARIABLE} holds a character that no header can (a line's end, perhaps): "
            "expected printable ASCII"
        )
    for attempt in range(attempts):
        last = attempt == attempts - 1
        try:
            return _post_once(url, body, seconds, key)
        except urllib.error.HTTPError as error:
            text = _body(error)
            if last or error.code not in _AGAIN:
                raise RefusedError(f"status {error.code}: {text}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            if last or isinstance(error, ValueError):
                reason = getattr(error, "reason", error)
                raise CloverError(
                    f"{url} cannot be asked: {reason}; expected the base of an OpenAI-compatible "
                    "API, such as http://localhost:30000/v1"
                ) from None
        time.sleep(2**attempt)
    raise CloverError(f"attempts is {attempts}: expected at least 1")


def _body(error: urllib.error.HTTPError) -> str:
    """The start of what an error says, if it can be read."""
    try:
        return error.read().decode(errors="replace")[:SHOWN]
    except (OSError, http.client.HTTPException):
        return "(the connection ended before its text did)"


def _post_once(url: str, body: dict[str, Any], seconds: float, key: str) -> Any:
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=seconds) as reply:
        return json.loads(reply.read())
