"""Other frameworks as runners: on the same weights they write the same greedy tokens."""

from pathlib import Path

import pytest

from clover_jax.checkpoint import load
from clover_jax.diffusion.generate import Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.verify.rivals import opened

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-oracle" / "bin" / "python"
FOLDER = ROOT / "tests" / "goldens" / "qwen36_tiny"
PROMPT = (3, 5, 7, 11, 13)
COUNT = 12
needs_oracle = pytest.mark.skipif(
    not PYTHON.exists(), reason="no .venv-oracle: see oracles/README.md"
)


@pytest.mark.verify
@needs_oracle
def test_transformers_writes_our_greedy_tokens():
    """llama.cpp does in `tests/cli/test_bench.py`."""
    cfg, params, _ = load(FOLDER, dtype="float32")
    generator = Generator(cfg, params, tokenizer=None, env=Env())
    request = Request(prompt=PROMPT, max_tokens=COUNT, sampling=SamplerConfig(), seed=0)
    ours = generator.complete([request], mode="ar")[0].token_ids
    with opened(
        ["hf"], FOLDER, oracle_python=PYTHON, threads=1, capacity=len(PROMPT) + COUNT
    ) as rivals:
        (rival,) = rivals
        assert rival.versions and rival.prefill(PROMPT) > 0
        first, second = rival.write(PROMPT, COUNT), rival.write(PROMPT, COUNT)
    assert first.ids == second.ids == list(ours)  # nothing is left over from the prompt before
    assert first.seconds > 0


def test_a_missing_python_is_named(tmp_path: Path):
    with (
        pytest.raises(CloverError, match="nowhere cannot be run"),
        opened(["hf"], FOLDER, oracle_python=tmp_path / "nowhere", threads=1, capacity=8),
    ):
        raise AssertionError("it was opened")


@pytest.mark.verify
@needs_oracle
def test_a_folder_that_does_not_load_is_explained(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with (
        pytest.raises(CloverError, match=r"--oracle-python: OSError: .*; .*README\.md"),
        opened(["hf"], tmp_path, oracle_python=PYTHON, threads=1, capacity=8),
    ):
        raise AssertionError("it was opened")
