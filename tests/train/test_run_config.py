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
    "seed=4294967296": "below 2.32",
    "loss.ar=-1": "loss ar is -1",
    "loss.chunk=0": "chunk is 0",
    "loss.follow_above=7": "follow_above is 7",
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


FRONTIER, FOLLOW = "data.noise.frontier_share=0.5", "loss.follow_above=0.9"


@pytest.mark.parametrize(
    "settings",
    [
        (FOLLOW,),  # nothing to follow
        (FRONTIER,),  # the second view would be the first once more
        ("data.noise.complementary=false", FRONTIER, FOLLOW),
    ],
)
def test_following_needs_frontier_noise_and_two_views(settings):
    with pytest.raises(CloverError, match=r"frontier_share .*expected"):
        override(default_run("convert", "x"), settings)
    override(default_run("convert", "x"), ["data.noise.complementary=false", FRONTIER])


@pytest.mark.parametrize("order", [1, -1])
def test_settings_that_are_right_only_together(order):
    pair = ['optimiser.freeze=["mlp.gate"]', "optimiser.freeze_steps=5"][::order]
    assert override(default_run("convert", "x"), pair).optimiser.freeze_steps == 5
    assert override(default_run("convert", "x"), [FOLLOW, FRONTIER][::order]).loss.follow_above
    traces = ["data=null", 'traces={"train": "a.jsonl"}'][::order]
    assert override(default_run("sft", "x"), traces).traces.train == "a.jsonl"


def test_of_several_settings_the_bad_one_is_named():
    with pytest.raises(CloverError, match=r"^setting 'remat=1' does not fit"):
        override(default_run("convert", "x"), ["seed=3", "remat=1", "optimiser.steps=9"])
    with pytest.raises(CloverError, match=r"'remat=1', 'seed=x' does not fit"):
        override(default_run("convert", "x"), ["remat=1", "seed=x"])
