"""The registered ablations: questions, with the answers that were expected before any run.

Data only. Settings are NAME=VALUE texts as `config.override` reads them, with a first part that
says what they change:

    model.    the model's config before training (operator, convolution, reading of the logits)
    run.      the training run
    decode.   the model's config when it answers (block length, coreset)
    sampler.  threshold, penalties, ramps
    measure.  problems, mode, limits

Claims are frozen once results exist: a wrong expectation is a result and stays.
"""

import dataclasses
from typing import Literal

from clover_jax.errors import CloverError

type Metric = Literal[
    "accuracy", "tpf", "tokens", "experts", "repetition", "stopped", "masked_loss"
]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of doing it.

    Attributes:
        name: unique in its ablation.
        settings: NAME=VALUE over the ablation's own.
        scratch: training starts from random weights, not from the parent.
        line: arms of one line are joined in the figure.
        point: what the figure writes beside the arm's point.
    """

    name: str
    settings: tuple[str, ...] = ()
    scratch: bool = False
    line: str = ""
    point: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """An expectation about `metric` of `arm` minus that of `base`.

    Attributes:
        arm: name of the arm.
        direction: `lower`, `higher`, or `same` (within `margin`).
        metric: of the difference.
        base: arm it is compared with.
        margin: half-width of `same`, in the metric's unit.
        tasks: only these, all if empty.
    """

    arm: str
    direction: Literal["lower", "higher", "same"]
    metric: Metric
    base: str
    margin: float = 0.0
    tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.direction == "same") != (self.margin > 0):
            raise CloverError(
                f"claim {self} has margin {self.margin}: expected one above 0 with the direction "
                "`same`, and 0 otherwise"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation:
    """A question that arms answer.

    Attributes:
        id: NNN_slug, the name of its folder.
        question: in a sentence.
        expected: the answer written before the run, with its reason.
        arms: at least two.
        claims: `expected` as comparisons that results decide.
        kind: `evaluate` measures the parent itself, `convert` trains from it first.
        settings: of all arms.
        seeds: of training; answers at temperature 0 have no randomness.
        axes: metrics (x, y) of the figure's panels, one for each set of tasks that claims name.
    """

    id: str
    question: str
    expected: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    kind: Literal["evaluate", "convert"]
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    axes: tuple[tuple[Metric, Metric], ...] = (("tpf", "accuracy"),)

    def arm(self, name: str) -> Arm:
        """The arm of that name.

        Raises:
            CloverError: there is none.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        known = ", ".join(repr(arm.name) for arm in self.arms)
        raise CloverError(f"{self.id} has no arm {name!r}: expected one of {known}")

    def settings_of(self, arm: Arm, seed: int) -> tuple[str, ...]:
        """All settings of an arm in the order in which they apply."""
        seeds = (f"run.seed={seed}", f"run.data.seed={seed}") if self.kind == "convert" else ()
        return (*self.settings, *arm.settings, *seeds)


# Short answers of three families: 300 steps move these, and not all ten, in a nano model. Thirty
# trainings of them fit a night of two cores.
_CONVERSION = (
    "model.logits_position=shifted",
    "run.optimiser.steps=300",
    "run.optimiser.learning_rate=0.004",
    "run.optimiser.warmup=30",
    "run.optimiser.decay_share=0.4",
    "run.data.rows=16",
    "run.data.buckets=[[64,2],[112,3]]",
    'run.data.mix.weights=[["chain_sum",1],["basic_arithmetic",1],["products",1]]',
    "run.data.mix.thinking_share=1.0",
    "run.loss.diffusion=1.0",
    "run.calibration_steps=40",
    "measure.loss_batches=16",
    "measure.n=64",
)
_SEEDS = (0, 1, 2)
_MIXED = ("run.data.noise.lengths=[8,16,32]", "run.data.buckets=[[64,6],[112,10]]")

_FRONTIER = ("run.data.noise.frontier_share=0.7", "run.loss.follow_above=0.9")


def _thresholds(block: int) -> tuple[Arm, ...]:
    return tuple(
        Arm(
            f"block {block}, threshold {threshold:g}",
            (f"decode.block_length={block}", f"sampler.threshold={threshold}"),
            line=f"block {block}",
            point=f"{threshold:g}",
        )
        for threshold in (0.5, 0.8, 0.95, 0.99)
    )


def _at_lengths(name: str, *settings: str) -> tuple[Arm, ...]:
    return tuple(
        Arm(
            f"{name}, block {block}",
            (*settings, f"decode.block_length={block}"),
            line=name,
            point=str(block),
        )
        for block in (32, 16, 8)
    )


def _coresets(mass: str, pool: str, *shares: float) -> tuple[Arm, ...]:
    rule = f"{pool} of {'top-k' if mass == 'top_k' else 'full'} mass"
    return tuple(
        Arm(
            f"{rule}, {share:g}",
            (
                f"decode.moe.coreset.top_p={share}",
                f"decode.moe.coreset.mass={mass}",
                f"decode.moe.coreset.pool={pool}",
            ),
            line=rule,
            point=f"{share:g}",
        )
        for share in shares
    )


def _ramp(name: str, start: int, slope: float) -> str:
    return f'sampler.{name}={{"start":{start},"slope":{slope}}}'


_LONG = ("long_sorting", "long_sum")
_SHORT = ("chain_sum", "products")
_RIVALS = ("causal", "two_direction", "added", "no_history")

ABLATIONS = (
    Ablation(
        id="001_block_operator",
        question="What does the history slot in one softmax give over its rivals in the block?",
        expected="The causal recurrence lacks what stands to the right and has the largest masked "
        "loss. Two directions see it and keep the base's decays, so they end close to the slot. "
        "Adding state read and block softmax has no shared scale and ends slightly worse. Without "
        "the slot only the attention layers (one in four) see the prefix: worse.",
        arms=(
            Arm("state slot"),
            *(Arm(name, (f"model.bd_gdn.operator={name}",)) for name in _RIVALS),
        ),
        claims=(
            Claim("causal", "higher", "masked_loss", "state slot"),
            Claim("two_direction", "same", "masked_loss", "state slot", margin=0.05),
            Claim("added", "higher", "masked_loss", "state slot"),
            Claim("no_history", "higher", "masked_loss", "state slot"),
            Claim("causal", "lower", "accuracy", "state slot"),
            Claim("no_history", "lower", "accuracy", "state slot"),
        ),
        kind="convert",
        settings=_CONVERSION,
        seeds=_SEEDS,
    ),
    Ablation(
        id="002_calibration",
        question="Is calibration worth its steps, and does a model trained at block 32 work at 16 "
        "and 8?",
        expected="300 steps train the three scalars anyway: at block 32 calibration changes "
        "nothing that can be measured. Trained at 32 alone, shorter blocks get worse by the "
        "masked loss; trained at mixed lengths they do not, at a small price at 32.",
        arms=(
            *_at_lengths("calibrated"),
            *_at_lengths("not calibrated", "run.calibration_steps=0"),
            *_at_lengths("mixed lengths", *_MIXED),
        ),
        claims=(
            Claim(
                "not calibrated, block 32",
                "same",
                "masked_loss",
                "calibrated, block 32",
                margin=0.05,
            ),
            Claim("mixed lengths, block 8", "lower", "masked_loss", "calibrated, block 8"),
            Claim("mixed lengths, block 16", "lower", "masked_loss", "calibrated, block 16"),
            Claim("mixed lengths, block 32", "higher", "masked_loss", "calibrated, block 32"),
        ),
        kind="convert",
        settings=_CONVERSION,
        seeds=_SEEDS,
    ),
    Ablation(
        id="003_right_conv",
        question="Does the block operator need the right-hand taps of the convolution?",
        expected="The block softmax has no order of its own, so the taps are the only place where "
        "a GDN layer learns which token comes next in the block: without them the masked loss is "
        "higher.",
        arms=(
            Arm("right taps"),
            Arm("no right taps", ("model.bd_gdn.right_conv=false",)),
        ),
        claims=(
            Claim("no right taps", "higher", "masked_loss", "right taps"),
            Claim("no right taps", "lower", "accuracy", "right taps"),
        ),
        kind="convert",
        settings=_CONVERSION,
        seeds=_SEEDS,
    ),
    Ablation(
        id="004_frontier",
        question="Which accuracy does which number of tokens per forward cost, over block length "
        "and threshold?",
        expected="A lower threshold gives tokens per forward and costs accuracy at every length. "
        "The model was trained at 32: shorter blocks are no more accurate at 0.95 and take fewer "
        "tokens per forward, so the frontier is made of block 32.",
        arms=(*_thresholds(32), *_thresholds(16), *_thresholds(8)),
        claims=(
            *(
                Claim(
                    f"block {block}, threshold 0.5",
                    "lower",
                    "accuracy",
                    f"block {block}, threshold 0.95",
                )
                for block in (32, 16, 8)
            ),
            *(
                Claim(f"block {block}, threshold 0.95", "lower", "tpf", "block 32, threshold 0.95")
                for block in (16, 8)
            ),
            Claim("block 8, threshold 0.95", "lower", "accuracy", "block 32, threshold 0.95"),
        ),
        kind="evaluate",
        settings=("measure.n=48",),
    ),
    Ablation(
        id="005_coreset",
        question="How many experts may a block share before answers get worse, and by which rule?",
        expected="Down to a share of 0.8 of the top-k mass nothing is lost (trained at 0.9). At "
        "0.5 a block touches less than half of the experts and accuracy falls. At one share, full "
        "mass has a long tail to cover and so touches more experts; max instead of sum does, too, "
        "since it keeps one position's specialist.",
        arms=(
            Arm("no coreset", ("decode.moe.coreset=null",)),
            *_coresets("top_k", "sum", 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
            *_coresets("softmax", "sum", 0.5, 0.7, 0.9),
            *_coresets("top_k", "max", 0.5, 0.7, 0.9),
        ),
        claims=(
            Claim("sum of top-k mass, 1", "same", "accuracy", "no coreset", margin=0.02),
            Claim("sum of top-k mass, 0.9", "same", "accuracy", "no coreset", margin=0.08),
            Claim("sum of top-k mass, 0.8", "same", "accuracy", "no coreset", margin=0.08),
            Claim("sum of top-k mass, 0.5", "lower", "accuracy", "no coreset"),
            Claim("sum of top-k mass, 0.9", "lower", "experts", "no coreset"),
            Claim("sum of full mass, 0.7", "higher", "experts", "sum of top-k mass, 0.7"),
            Claim("max of top-k mass, 0.7", "higher", "experts", "sum of top-k mass, 0.7"),
        ),
        kind="evaluate",
        settings=("measure.n=48",),
        axes=(("experts", "accuracy"),),
    ),
    Ablation(
        id="006_coreset_frozen",
        question="Can a block keep the coreset of its first step?",
        expected="Early steps see masks, whose routing is alike: a frozen coreset misses experts "
        "that later tokens want and costs accuracy; it touches fewer experts over a block.",
        arms=(
            Arm("per step"),
            Arm("per block", ("decode.moe.coreset.frozen=true",)),
        ),
        claims=(
            Claim("per block", "lower", "accuracy", "per step"),
            Claim("per block", "lower", "experts", "per step"),
        ),
        kind="evaluate",
        settings=("measure.n=48",),
        axes=(("experts", "accuracy"),),
    ),
    Ablation(
        id="007_penalties_long",
        question="Do penalties and the response ramp end long, repetitive answers, and what do "
        "they cost on ordinary ones?",
        expected="Lists and sums longer than any in training loop in block mode. The release's "
        "penalties (presence 0.9, repetition 1.05) make loops rarer; in a vocabulary where every "
        "digit is a token they also forbid right digits and cost accuracy on ordinary problems. "
        "The ramp ends answers, touches nothing before its start, and so costs nothing there.",
        arms=(
            Arm("neutral"),
            Arm("presence 0.9", ("sampler.presence=0.9",)),
            Arm("repetition 1.05", ("sampler.repetition=1.05",)),
            Arm("repetition 1.3", ("sampler.repetition=1.3",)),
            Arm("frequency 0.2", ("sampler.frequency=0.2",)),
            Arm("ramp from 96", (_ramp("response_ramp", 96, 0.25),)),
            Arm(
                "release's penalties and ramp",
                (
                    "sampler.presence=0.9",
                    "sampler.repetition=1.05",
                    _ramp("response_ramp", 96, 0.25),
                ),
            ),
        ),
        claims=(
            Claim("presence 0.9", "lower", "repetition", "neutral", tasks=_LONG),
            Claim("repetition 1.3", "lower", "repetition", "neutral", tasks=_LONG),
            Claim("ramp from 96", "higher", "stopped", "neutral", tasks=_LONG),
            Claim("ramp from 96", "lower", "tokens", "neutral", tasks=_LONG),
            Claim("presence 0.9", "lower", "accuracy", "neutral", tasks=_SHORT),
            Claim("repetition 1.3", "lower", "accuracy", "neutral", tasks=_SHORT),
            Claim("ramp from 96", "same", "accuracy", "neutral", margin=0.05, tasks=_SHORT),
        ),
        kind="evaluate",
        settings=(
            f'measure.tasks=["{'","'.join((*_LONG, *_SHORT))}"]',
            "measure.n=32",
            "measure.max_tokens=320",
        ),
        axes=(("tokens", "repetition"), ("tpf", "accuracy")),
    ),
    Ablation(
        id="008_thinking_ramp",
        question="Can the ramp on `</think>` buy shorter thinking, and what does it cost?",
        expected="A cut scratchpad was never trained: each token that the ramp saves costs "
        "accuracy, in AR mode as in block mode, and a model that must answer at once (thinking "
        "off, which was trained) beats one whose thinking is cut early.",
        arms=tuple(
            Arm(
                f"{mode}, {name}",
                (f"measure.mode={mode}", *settings),
                line="AR mode" if mode == "ar" else "block 32",
                point=name,
            )
            for mode in ("ar", "block")
            for name, settings in (
                ("no ramp", ()),
                ("from 24", (_ramp("thinking_ramp", 24, 1.0),)),
                ("from 8", (_ramp("thinking_ramp", 8, 1.0),)),
                ("from 0, steep", (_ramp("thinking_ramp", 0, 4.0),)),
                ("thinking off", ("measure.thinking=false",)),
            )
        ),
        claims=tuple(
            claim
            for mode in ("ar", "block")
            for claim in (
                Claim(f"{mode}, from 24", "lower", "tokens", f"{mode}, no ramp"),
                Claim(f"{mode}, from 8", "lower", "accuracy", f"{mode}, no ramp"),
                Claim(f"{mode}, from 0, steep", "lower", "accuracy", f"{mode}, thinking off"),
            )
        ),
        kind="evaluate",
        settings=("measure.n=48",),
        axes=(("tokens", "accuracy"),),
    ),
    Ablation(
        id="009_ar_loss",
        question="Does the AR loss have to stay while blocks are learnt?",
        expected="Without it the causal pass forgets: AR mode gets worse. Block mode reads states "
        "that nobody protects any more, but has the whole gradient: no measurable difference.",
        arms=(
            Arm("AR loss kept"),
            Arm("AR loss dropped", ("run.loss.ar=0",)),
            Arm("AR loss kept, AR mode", ("measure.mode=ar",)),
            Arm("AR loss dropped, AR mode", ("run.loss.ar=0", "measure.mode=ar")),
        ),
        claims=(
            Claim("AR loss dropped, AR mode", "lower", "accuracy", "AR loss kept, AR mode"),
            Claim("AR loss dropped", "same", "masked_loss", "AR loss kept", margin=0.05),
        ),
        kind="convert",
        settings=_CONVERSION,
        seeds=_SEEDS,
    ),
    Ablation(
        id="010_from_ar",
        question="Is conversion from an AR parent better than blocks from nothing, at as many "
        "steps?",
        expected="By far: 300 steps from nothing learn the form of an answer and little of its "
        "arithmetic.",
        arms=(Arm("from AR"), Arm("from scratch", scratch=True)),
        claims=(
            Claim("from scratch", "higher", "masked_loss", "from AR"),
            Claim("from scratch", "lower", "accuracy", "from AR"),
        ),
        kind="convert",
        settings=_CONVERSION,
        seeds=_SEEDS,
    ),
    Ablation(
        id="011_lesions",
        question="Which parts of its block operator does the shipped nano use when it answers?",
        expected="Trained with all of them, it needs all of them: without right taps or slot "
        "accuracy is gone. Running the base's causal recurrence in the block breaks it as much. "
        "Dropping the slot at an empty prefix changes nothing, since a prompt is never empty: "
        "that arm is the control.",
        arms=(
            Arm("whole"),
            Arm("no right taps", ("decode.bd_gdn.right_conv=false",)),
            Arm("no history slot", ("decode.bd_gdn.operator=no_history",)),
            Arm("causal recurrence", ("decode.bd_gdn.operator=causal",)),
            Arm("slot dropped if empty", ("decode.bd_gdn.empty_history=drop",)),
        ),
        claims=(
            Claim("no right taps", "lower", "accuracy", "whole"),
            Claim("no history slot", "lower", "accuracy", "whole"),
            Claim("causal recurrence", "lower", "accuracy", "whole"),
            Claim("no right taps", "higher", "masked_loss", "whole"),
            Claim("no history slot", "higher", "masked_loss", "whole"),
            Claim("slot dropped if empty", "same", "masked_loss", "whole", margin=1e-6),
        ),
        kind="evaluate",
        settings=("measure.n=48", "measure.loss_batches=8"),
        axes=(("masked_loss", "accuracy"),),
    ),
    Ablation(
        id="012_block_bias",
        question="Does the block softmax do better with the base's decays and write strengths in "
        "its logits?",
        expected="Asked after the first seed of 001, where operators that keep the recurrence "
        "answered 21 points more. The softmax has no order of its own; -|c_i - c_j| ranks the "
        "block's tokens by nearness and log beta mutes those the base would not write. So answers "
        "get better than with the plain slot, not as good as with the recurrence (weights stay "
        "positive, right is as near as left), at a masked loss no higher.",
        arms=(
            Arm("state slot"),
            Arm("decay bias", ("model.bd_gdn.block_bias=decay",)),
            Arm("causal", ("model.bd_gdn.operator=causal",)),
        ),
        claims=(
            Claim("decay bias", "higher", "accuracy", "state slot"),
            Claim("decay bias", "lower", "accuracy", "causal"),
            Claim("decay bias", "same", "masked_loss", "state slot", margin=0.05),
        ),
        kind="convert",
        settings=_CONVERSION,
        seeds=_SEEDS,
    ),
    Ablation(
        id="013_frontier_noise",
        question="Does noise that looks like decoding close the gap between the slot and the "
        "recurrence?",
        expected="Masks that fall anywhere weigh the next token little, and that token decides an "
        "answer. With most samples masked as decoding leaves them, the slot learns it: more right "
        "answers, most of the gap to the recurrence gone, at a higher masked loss over masks that "
        "fall anywhere.",
        arms=(
            Arm("anywhere"),
            Arm("frontier", _FRONTIER),
            Arm("anywhere, causal", ("model.bd_gdn.operator=causal",)),
            Arm("frontier, causal", ("model.bd_gdn.operator=causal", *_FRONTIER)),
        ),
        claims=(
            Claim("frontier", "higher", "accuracy", "anywhere"),
            Claim("frontier", "higher", "masked_loss", "anywhere"),
            Claim("frontier, causal", "same", "accuracy", "frontier", margin=0.1),
        ),
        kind="convert",
        settings=_CONVERSION,
        seeds=_SEEDS,
    ),
    Ablation(
        id="014_closing",
        question="What does it give to end a block before its first mask where nothing is sure, "
        "and to hold it against the causal pass?",
        expected="Written after a try of 32 problems. A frontier that no confidence passes is "
        "where most wrong tokens come from; from there on, a new block knows by the causal state "
        "what the old one knew by its own rows. So answers get better for some more forwards. Held "
        "against the causal pass the text is AR mode's; then one preview a block is enough, since "
        "a wrong guess costs nothing but its place.",
        arms=(
            Arm("AR mode", ("measure.mode=ar",)),
            *(
                Arm(
                    f"{close}, {threshold:g}",
                    (f"sampler.close={close}", f"sampler.threshold={threshold}"),
                    line=close,
                    point=f"{threshold:g}",
                )
                for close, thresholds in (
                    ("resolved", (0.8, 0.95, 0.99)),
                    ("unsure", (0.8, 0.95, 0.99)),
                    ("verified", (0.8, 0.95, 1.0)),
                )
                for threshold in thresholds
            ),
        ),
        claims=(
            Claim("unsure, 0.95", "higher", "accuracy", "resolved, 0.95"),
            Claim("unsure, 0.95", "lower", "tpf", "resolved, 0.95"),
            Claim("unsure, 0.95", "lower", "accuracy", "AR mode"),
            Claim("verified, 0.95", "same", "accuracy", "AR mode", margin=0.01),
            Claim("verified, 1", "same", "accuracy", "AR mode", margin=0.01),
            Claim("verified, 1", "higher", "tpf", "verified, 0.95"),
        ),
        kind="evaluate",
        settings=("measure.n=48",),
    ),
)


def named(name: str) -> Ablation:
    """The ablation with that id; its number or its slug will do.

    Raises:
        CloverError: there is none.
    """
    for ablation in ABLATIONS:
        number, _, slug = ablation.id.partition("_")
        if name in (ablation.id, number, slug):
            return ablation
    known = ", ".join(ablation.id for ablation in ABLATIONS)
    raise CloverError(f"ablation is {name!r}: expected one of {known}")
