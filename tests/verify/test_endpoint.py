"""`clover verify --endpoint` against a small server on this machine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_jax import checkpoint
from clover_jax.cli import main
from clover_jax.cli.session import packaged_model
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.verify.limits import log_softmax
from clover_jax.verify.ours import CausalPasses
from tests.helpers.server import serve

__all__ = ["serve"]  # a fixture

WIDTH = 64  # tokens of a served text, padded: one program
PROMPT = "3 + 4 = "


class Model:
    """Greedy completions of the model that ships, in the forms that servers use."""

    def __init__(self):
        self.folder = packaged_model()
        cfg, params, _ = checkpoint.load(self.folder, dtype="float32")
        self.tokenizer = Tokenizer.load(self.folder)
        self._passes = CausalPasses(params, cfg, 1, WIDTH)

    def logprobs(self, ids: list[int]) -> np.ndarray:
        padded = np.zeros((1, WIDTH), np.int32)
        padded[0, : len(ids)] = ids
        return log_softmax(np.asarray(self._passes.read(padded, [WIDTH])[0])[0])

    def complete(self, prompt: list[int], n: int) -> tuple[list[int], list[float]]:
        ids, values = list(prompt), []
        for _ in range(n):
            last = self.logprobs(ids)[len(ids) - 1]
            ids.append(int(last.argmax()))
            values.append(float(last.max()))
        return ids[len(prompt) :], values


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def verify(url: str, *options: str) -> int:
    words = ["verify", str(packaged_model()), "--endpoint", url, "--prompt", PROMPT]
    return main([*words, "--continuation", "4", *options])


def echoing(model: Model, request: dict, error: float = 0.0) -> dict:
    """vLLM's form: the prompt echoed, tokens named by id."""
    new, values = model.complete(request["prompt"], request["max_tokens"])
    prompt = model.logprobs(request["prompt"])
    own = [float(prompt[t - 1, token]) for t, token in enumerate(request["prompt"]) if t]
    tokens = [f"token_id:{i}" for i in (*request["prompt"], *new)]
    values = [None, *own, values[0] + error, *values[1:]]
    return {"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": values}}]}


def test_a_server_that_echoes_the_prompt(model: Model, serve, capsys):
    assert verify(serve(lambda request: echoing(model, request)), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    [row] = report["rows"]
    assert report["ok"]
    assert (row["prompt"], row["compared_prompt"], row["compared"]) == (
        row["prompt"], row["prompt"] - 1, 4,
    )  # fmt: skip
    assert row["max_gap"] < 1e-4
    assert row["not_greedy"] == 0


def test_a_server_that_is_off(model: Model, serve, capsys):
    url = serve(lambda request: echoing(model, request, error=0.2))
    assert verify(url, "--json") == 1
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["max_gap"] == pytest.approx(0.2, abs=1e-3)
    assert row["worst"] == row["prompt"]
    assert verify(url, "--max-gap", "0.3") == 0
    assert "limit 0.3" in capsys.readouterr().out


def test_a_server_that_refuses_to_echo_and_gives_texts(model: Model, serve, capsys):
    """llama.cpp's form: completion tokens only."""

    def answer(request: dict) -> dict:
        if "echo" in request:
            raise ValueError("echo is not supported")
        new, values = model.complete(request["prompt"], request["max_tokens"])
        content = [
            {"token": model.tokenizer.decode([i], skip_special=False), "logprob": value}
            for i, value in zip(new, values, strict=True)
        ]
        return {"choices": [{"logprobs": {"content": content}}]}

    assert verify(serve(answer), "--json") == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert (row["compared_prompt"], row["compared"]) == (0, 4)


@pytest.mark.parametrize(
    ("reply", "fragment"),
    [
        ({"choices": []}, "no log-probabilities"),
        ({"choices": [{"text": "7", "logprobs": None}]}, "no log-probabilities"),
        ({"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": []}}]}, "no log-prob"),
        ({"choices": [{"logprobs": {"tokens": [3], "token_logprobs": [-1]}}]}, "a text or an id"),
        ({"choices": [{"logprobs": {"tokens": ["Q7 "], "token_logprobs": [-1]}}]}, "without its"),
        (
            {"choices": [{"logprobs": {"tokens": ["token_id:9999"], "token_logprobs": [-1]}}]},
            "9999",
        ),
        ([], "no log-probabilities"),
    ],
)
def test_a_server_that_answers_nonsense(serve, capsys, reply: Any, fragment: str):
    assert verify(serve(lambda _request: reply)) == 2
    assert fragment in capsys.readouterr().err


def test_a_server_that_refuses_or_is_not_there(serve, capsys):
    def refuse(_request: dict) -> dict:
        raise ValueError("no such model")

    assert verify(serve(refuse)) == 2
    assert "status 400" in capsys.readouterr().err
    assert verify("http://127.0.0.1:9/v1") == 2
    assert "cannot be asked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ((), "one of --against and --endpoint"),
        (("--against", "hf", "--endpoint", "http://x"), "one of --against and --endpoint"),
        (("--against", "golden"), "--golden FILE"),
        (("--against", "hf", "--golden", "x"), "--golden FILE"),
        (("--against", "hf", "--length", "0"), "--length"),
        (("--against", "hf", "--rows", "0"), "--rows"),
        (("--against", "hf", "--positions-from", "128"), "--positions-from"),
        (("--against", "hf", "--oracle-python", "nowhere"), "nowhere"),
        (("--against", "hf", "--token-ids", "5 9999"), "9999"),
        (("--against", "hf", "--token-ids", " "), "empty"),
        (("--against", "golden", "--golden", "nowhere"), "nowhere"),
        (("--endpoint", "http://x", "--max-gap", "0"), "--max-gap"),
    ],
)
def test_refusals(capsys, arguments: tuple[str, ...], fragment: str):
    assert main(["verify", str(packaged_model()), *arguments]) == 2
    error = capsys.readouterr().err
    assert fragment in error
    assert "Traceback" not in error


def test_logits_refusals(capsys, tmp_path: Path):
    out, lost = tmp_path / "x.safetensors", tmp_path / "nowhere" / "x.safetensors"
    for place, ids, *more, fragment in (
        (out, "5 x", "integers"), (out, "5 9999", "9999"), (out, "", "empty"),
        (out, "5 6", "--positions-from", "2", "0 to 1"), (lost, "5 6", "nowhere"),
        (tmp_path, "5 6", "not a file"),
    ):  # fmt: skip
        words = ["logits", packaged_model(), "--out", place, "--token-ids", ids, *more]
        assert main([str(word) for word in words]) == 2
        assert fragment in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
