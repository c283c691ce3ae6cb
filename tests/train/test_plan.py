"""What a dry run says: sizes against the state that a run really has."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from clover_jax import checkpoint
from clover_jax.cli.train import setting_lines
from clover_jax.config import override
from clover_jax.data.pipeline import DataConfig, TraceConfig
from clover_jax.diffusion.corrupt import NoiseConfig
from clover_jax.errors import CloverError
from clover_jax.model import lora
from clover_jax.model.lora import LoRAConfig
from clover_jax.model.transformer import unstack
from clover_jax.train.plan import plan
from clover_jax.train.run_config import Evaluation, default_run
from clover_jax.train.step import init_state
from tests.cli.conftest import config
from tests.helpers.compilation import unoptimised
from tests.model.small import random_params

ADAPTER = LoRAConfig(rank=2, targets=("attention",), train=("block",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "clover"
    checkpoint.save(folder, config(), random_params(config()))
    return folder


def bytes_of(tree) -> int:
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_sizes_are_those_of_the_state(folder):
    """Of an adapter: its own numbers and state, beside all weights in float32."""
    run = override(
        default_run("convert", str(folder)),
        ["calibration_steps=0", "data.rows=2", "data.buckets=[[16,1],[24,2]]", "optimiser.ema=0.9"],
    )
    run = dataclasses.replace(run, lora=ADAPTER)
    with unoptimised():
        found = plan(run)
    _, params, _ = checkpoint.load(folder, dtype="float32")
    weights = unstack(params)
    state = init_state(lora.init(weights, ADAPTER, jax.random.key(0)), run.optimiser)
    assert found.total == sum(leaf.size for leaf in jax.tree.leaves(weights))
    assert found.trained == sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert found.weights_bytes == bytes_of(weights) + bytes_of(state.params)
    assert found.optimiser_bytes == bytes_of((state.optimiser, state.ema))
    block = config().block_length
    assert [tuple(s) for s in found.shapes] == [
        ((2, 16), (2, 2, block)),
        ((2, 24), (2, 4, block)),
    ]
    assert (found.steps, found.largest_tokens) == (1000, 48)
    # The step needs at least a gradient of the adapter and the merged weights.
    assert found.work_bytes > found.weights_bytes - bytes_of(weights)
    assert found.flops > 2 * 48 * 32 * 32


def test_a_missing_start_is_an_error(tmp_path):
    with pytest.raises(CloverError, match="nowhere"):
        plan(default_run("convert", str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    "run",
    (
        default_run("pretrain", "clover_nano"),
        default_run("convert", "123"),
        dataclasses.replace(
            default_run("sft", "x", traces=TraceConfig(train="a b.jsonl", val="null")),
            lora=ADAPTER, evaluation=Evaluation(every=20), accumulate=4, seed=3,
        ),
        dataclasses.replace(
            default_run("convert", "x"), data=DataConfig(noise=NoiseConfig(lengths=(4, 8)))
        ),
    ),
    ids=("pretrain", "convert", "sft", "noise"),
)  # fmt: skip
def test_printed_settings_can_be_set(run):
    """From defaults of the same kind and source they give the run."""
    start = default_run(run.kind, "?", traces=run.traces and TraceConfig(train="?"))
    assert override(start, setting_lines(run)) == run
