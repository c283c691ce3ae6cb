"""What a run may be asked, and `NAME=VALUE` settings."""

import dataclasses

import pytest

from clover_jax.config import canonical_json, from_canonical_json, override
from clover_jax.errors import CloverError
from clover_jax.train.run_config import Evaluation, RunConfig, default_run


@pytest.mark.parametrize("kind", ("pretrain", "convert", "sft"))
def test_defaults_round_trip(kind):
    run = default_run(kind, "somewhere")
    assert (run.kind, run.start) == (kind, "somewhere")
    assert (run.loss.diffusion == 0) == (kind == "pretrain")
    assert from_canonical_json(canonical_json(run), RunConfig) == run


def test_settings_reach_everything():
    run = override(
        default_run("convert", "x"),
        [
            "optimiser.steps=20",
            "optimiser.kind=adamw",
            "data.buckets=[[48,1],[80,2]]",
            'data.mix.weights=[["gcd",2]]',
            "loss.diffusion_weighting=inverse_t",
            "evaluation.every=40",
            "remat=true",
        ],
    )
    assert (run.optimiser.steps, run.optimiser.kind) == (20, "adamw")
    assert run.data.buckets == ((48, 1), (80, 2))
    assert run.data.mix.weights == (("gcd", 2.0),)
    assert run.loss.diffusion_weighting == "inverse_t"
    assert run.evaluation == Evaluation(every=40)
    assert run.remat is True
    assert override(run, ["evaluation=null"]).evaluation is None


BAD = {
    "steps": "expected NAME=VALUE",
    "optimizer.steps=3": "no part 'optimizer'",
    "optimiser.step=3": "no field optimiser.step",
    "seed.x=3": "no part 'seed'",
    "optimiser.steps=many": "does not fit",
    "optimiser.steps=2.5": "does not fit",
    "optimiser.steps=0": "steps is 0",
    "remat=1": "does not fit",
    "loss.diffusion_weighting=twice": "does not fit",
    "evaluation.every=15": "multiple of 10",
    "evaluation.n=0": "n is 0",
    'evaluation.tasks=["cooking"]': "cooking",
    "seed=-1": "seed -1",
    'data.mix.weights=[["cooking",2]]': "cooking",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_settings_are_named(text):
    with pytest.raises(CloverError, match=BAD[text].replace("(", "[(]")):
        override(default_run("convert", "x"), [text])


def test_pretraining_has_no_blocks():
    run = default_run("pretrain", "x")
    for changes in (
        {"calibration_steps": 3},
        {"loss": dataclasses.replace(run.loss, diffusion=1.0)},
    ):
        with pytest.raises(CloverError, match="no blocks"):
            dataclasses.replace(run, **changes)


def test_following_needs_two_views():
    with pytest.raises(CloverError, match="two views"):
        override(
            default_run("convert", "x"), ["data.noise.complementary=false", "loss.follow_above=0.9"]
        )
