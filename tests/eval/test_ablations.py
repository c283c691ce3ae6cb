"""The registry: complete, and every setting of every arm fits the model in the package."""

from collections.abc import Callable
from typing import Any

import pytest

from clover_jax import ablations
from clover_jax.ablations import ABLATIONS, Ablation, Arm, Claim
from clover_jax.cli.session import packaged_model
from clover_jax.config import override
from clover_jax.errors import CloverError
from clover_jax.eval import ablation_plan
from clover_jax.eval.ablation_plan import LONG, Measurement, Plan

# What issue 8 lists, by what shows that an ablation asks it.
LISTED: dict[str, Callable[[str], bool]] = {
    "001_block_operator": lambda s: "bd_gdn.operator=" in s,
    "002_calibration": lambda s: "calibration_steps=0" in s,
    "003_right_conv": lambda s: "right_conv=false" in s,
    "004_frontier": lambda s: "threshold=" in s,
    "005_coreset": lambda s: "coreset.top_p=" in s,
    "006_coreset_frozen": lambda s: "frozen" in s,
    "007_penalties_long": lambda s: "presence=" in s,
    "008_thinking_ramp": lambda s: "thinking_ramp" in s,
    "009_ar_loss": lambda s: "loss.ar=0" in s,
    "010_from_ar": lambda s: "logits_position" in s,
}


@pytest.fixture(scope="module")
def planned() -> dict[str, list[Plan]]:
    parent = packaged_model()
    return {a.id: ablation_plan.plans(a, parent) for a in ABLATIONS}


def test_every_listed_question_is_registered():
    by_id = {a.id: a for a in ABLATIONS}
    for id, asks in LISTED.items():
        assert any(asks(s) for arm in by_id[id].arms for s in by_id[id].settings_of(arm, 0)), id
    assert any(arm.scratch for arm in by_id["010_from_ar"].arms)
    operators = {s for arm in by_id["001_block_operator"].arms for s in arm.settings}
    rivals = ("causal", "two_direction", "added", "no_history")
    assert operators == {f"model.bd_gdn.operator={o}" for o in rivals}


@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda a: a.id)
def test_an_ablation_is_whole(ablation: Ablation):
    assert ablation.question.endswith("?") and len(ablation.expected) > 60
    names = [arm.name for arm in ablation.arms]
    assert len(set(names)) == len(names) >= 2
    assert ablation.claims
    for claim in ablation.claims:
        assert claim.arm != claim.base
        assert {claim.arm, claim.base} <= set(names)
        if claim.metric == "masked_loss":
            assert any("loss_batches=" in s for s in ablation.settings)
    assert len(ablation.axes) == len({claim.tasks for claim in ablation.claims})
    # A claim on trainings needs seeds to decide it.
    assert len(ablation.seeds) == (3 if ablation.kind == "convert" else 1)
    number, _, slug = ablation.id.partition("_")
    assert ablations.named(number) is ablations.named(slug) is ablation


def test_every_setting_fits_and_every_arm_differs(planned: dict[str, list[Plan]]):
    for id, found in planned.items():
        assert len({plan.hash for plan in found}) == len(found), id
        # Problems are shared, or nothing is paired.
        assert len({(p.measure.tasks, p.measure.n, p.measure.split) for p in found}) == 1, id
        assert all(p.measure.split == "val" for p in found)


def test_switches_reach_the_configs(planned: dict[str, list[Plan]]):
    def plan(id: str, arm: str, seed: int = 0) -> Any:
        return next(p for p in planned[id] if (p.arm, p.seed) == (arm, seed))

    rival = plan("001_block_operator", "two_direction", 2)
    assert rival.training.start.bd_gdn.operator == "two_direction" == rival.model.bd_gdn.operator
    assert (rival.training.run.seed, rival.training.run.data.seed) == (2, 2)
    short = plan("002_calibration", "mixed lengths, block 8")
    assert (short.model.block_length, short.training.start.block_length) == (8, 32)
    assert short.training.run.data.noise.lengths == (8, 16, 32)
    bare = plan("005_coreset", "no coreset")
    assert bare.model.moe.coreset is None and bare.training is None
    ramp = plan("008_thinking_ramp", "ar, from 8")
    assert (ramp.sampler.thinking_ramp.start, ramp.measure.mode) == (8, "ar")


def test_equal_trainings_are_shared(planned: dict[str, list[Plan]]):
    base = {p.training_hash for p in planned["001_block_operator"] if p.arm == "state slot"}
    alike = (
        ("002_calibration", "calibrated, block 8"),
        ("003_right_conv", "right taps"),
        ("009_ar_loss", "AR loss kept, AR mode"),
        ("010_from_ar", "from AR"),
        ("012_block_bias", "state slot"),
        ("013_frontier_noise", "anywhere"),
    )
    for id, arm in alike:
        assert {p.training_hash for p in planned[id] if p.arm == arm} == base
    trained = {p.training_hash for found in planned.values() for p in found if p.training}
    assert len(trained) == 39  # of the 40 that the issue allows


@pytest.mark.parametrize("name", ["", "999", "frontiers", "004_", "_"])
def test_a_name_that_is_none(name: str):
    with pytest.raises(CloverError, match="001_block_operator"):
        ablations.named(name)


def test_no_such_arm():
    with pytest.raises(CloverError, match="no arm 'x': expected one of 'right taps'"):
        ablations.named("003").arm("x")


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        (("threshold=0.5",), "evaluate", "has no place"),
        (("run.seed=1",), "evaluate", "has no place"),
        (("model.bd_gdn.right_conv=false",), "evaluate", "has no place"),
        (("sampler.treshold=0.5",), "evaluate", "treshold"),
        (("decode.block_length=0",), "evaluate", "block_length is 0"),
        (("measure.n=0",), "evaluate", "n 0"),
        (('measure.tasks=["chess"]',), "evaluate", "'chess'"),
        (("run.optimiser.step=5",), "convert", "step"),
    ],
)
def test_settings_that_do_not_fit(settings: tuple[str, ...], kind, message: str):
    bad = Ablation(
        id="999_bad", question="?", expected="", arms=(Arm("a", settings), Arm("b")), claims=(),
        kind=kind,
    )  # fmt: skip
    with pytest.raises(CloverError, match=message):
        ablation_plan.plans(bad, packaged_model())


@pytest.mark.parametrize(("direction", "margin"), [("same", 0.0), ("lower", 0.1)])
def test_margins_are_of_equality(direction, margin: float):
    with pytest.raises(CloverError, match="margin"):
        Claim("a", direction, "accuracy", "b", margin=margin)


def test_long_problems_are_long_and_fixed():
    measure = override(Measurement(), ['tasks=["long_sum","long_sorting"]', "n=20"])
    for task in LONG:
        items = measure.items(task)
        assert items == measure.items(task) and len({item.prompt for item in items}) == 20
    for item in measure.items("long_sum"):
        numbers = [int(x) for x in item.problem.split(" + ")]
        assert 8 <= len(numbers) <= 12 and int(item.answer) == sum(numbers)
        assert item.thinking.splitlines()[-1].endswith(f"= {item.answer}")
    for item in measure.items("long_sorting"):
        numbers = [int(x) for x in item.prompt.partition(": ")[2].split()]
        assert 16 <= len(numbers) <= 24
        assert [int(x) for x in item.answer.split()] == sorted(numbers)
