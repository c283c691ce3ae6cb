"""Whole runs of a small bfloat16 model: pre-training, conversion, interruption, resumption.

Compiling is what these tests cost: every run of a kind takes the same compiled step.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from clover_jax import checkpoint
from clover_jax.config import canonical_json
from clover_jax.data import tasks
from clover_jax.data.pipeline import DataConfig, TaskBatches, TraceConfig
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import NoiseConfig
from clover_jax.diffusion.loss import LossConfig, as_arrays
from clover_jax.errors import CloverError
from clover_jax.model.leaves import known_kinds
from clover_jax.model.lora import LoRAConfig, merge
from clover_jax.model.transformer import CleanInput, forward, param_specs, restack, unembed, unstack
from clover_jax.params import initialise, named_leaves
from clover_jax.presets import PRESETS, clover_tiny
from clover_jax.train import loop
from clover_jax.train.calibrate import SCALARS
from clover_jax.train.loop import ENV
from clover_jax.train.run_config import Evaluation, RunConfig
from clover_jax.train.step import OptimiserConfig, init_state, train_step

SMALL = clover_tiny().replace(
    vocab_size=300,
    hidden_size=32,
    num_layers=2,
    full_attention_interval=2,
    dtype="bfloat16",
    block_length=32,  # what conversion gives a base model
    **{"moe.num_experts": 4, "moe.intermediate": 16, "moe.shared_intermediate": 16},
)
FLOAT32 = {
    "A_log", "dt_bias", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm",
    "gate", *SCALARS,
}  # fmt: skip
ADAPTED = {"q_proj", "k_proj", "v_proj", "o_proj", "conv_right_weight", *SCALARS}
STEPS = 12
DATA = DataConfig(mix=tasks.Mix((("chain_sum", 1.0),)), rows=4, buckets=((72, 2),))
RUN = RunConfig(
    kind="pretrain",
    start="small",
    data=DATA,
    loss=LossConfig(diffusion=0.0),
    optimiser=OptimiserConfig(learning_rate=1e-2, steps=STEPS, warmup=2),
)


@pytest.fixture(scope="module", autouse=True)
def small_preset():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "small", lambda: SMALL)
        yield


def quiet(_: Any) -> None:
    """A report that nobody reads."""


def pretrain(folder: Path, run: RunConfig = RUN, *, report=quiet, save_seconds=1e6) -> Path:
    """No save before the end, or one after every step: which ones there are is up to the test."""
    return loop.train(run, folder, report=report, save_seconds=save_seconds)


def convert(folder: Path, run: RunConfig, *, calibrated) -> Path:
    return loop.train(run, folder, report=quiet, calibrated=calibrated, save_seconds=1e6)


@pytest.fixture(scope="module")
def base(small_preset, tmp_path_factory) -> Path:
    """The folder of a pre-training run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("run") / "base"
    assert pretrain(folder) == folder / "model"
    return folder


@pytest.fixture
def fresh(base, tmp_path) -> Path:
    """The same run before its first step, with its tokenizer trained."""
    folder = tmp_path / "again"
    folder.mkdir()
    shutil.copy(base / "run.json", folder)
    shutil.copytree(base / "tokenizer", folder / "tokenizer")
    return folder


def base_config():
    return SMALL.replace(bd_gdn=None, mask_token_id=None, **{"moe.coreset": None})


def start():
    """State before the first step."""
    params = initialise(param_specs(base_config()), jax.random.key(RUN.seed))
    return init_state(unstack(params), RUN.optimiser)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())


def saved_state(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Every leaf of a checkpoint by name: parameters, optimiser, step."""
    template = jax.eval_shape(start)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), template
    )
    with ocp.CheckpointManager((folder / "checkpoints").absolute()) as manager:
        kept = manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(template))
        )
    return {name: np.asarray(leaf) for name, leaf in named_leaves(kept.state).items()}


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def assert_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, a in want.items():
        assert got[name].dtype == a.dtype, name
        assert got[name].tobytes() == a.tobytes(), name


def assert_same_end(folder: Path, want: Path) -> None:
    """State, log and model folder of two finished runs."""
    assert_same_bits(saved_state(folder, STEPS), saved_state(want, STEPS))
    assert log_of(folder) == log_of(want)
    for file in sorted(p.name for p in (want / "model").iterdir()):
        assert (folder / "model" / file).read_bytes() == (want / "model" / file).read_bytes(), file


class Interrupter:
    """Counts calls of a function and raises Ctrl-C around one of them."""

    def __init__(self, function: Any, call: int, *, after: bool) -> None:
        self._function, self._left, self._after = function, call, after

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise KeyboardInterrupt
        result = self._function(*args, **options)
        if self._left == 0:
            raise KeyboardInterrupt
        return result


# --- pre-training -------------------------------------------------------------------------------


def test_a_run_folder(base):
    """Everything that the module's docstring lists, and nothing else."""
    found = {path.name for path in base.iterdir()}
    assert found == {"run.json", "tokenizer", "checkpoints", "log.jsonl", "model"}
    assert saved_steps(base)[-1] == STEPS
    log = log_of(base)
    assert log[-1]["step"] == log[-2]["step"] == STEPS
    assert {name for name in log[-1] if name.startswith("val_")} >= {"val_loss", "val_ar_loss"}
    assert all(np.isfinite(list(line.values())).all() for line in log)
    assert log[-1]["val_ar_loss"] < 5.6 < np.log(300)


def test_the_model_folder_is_the_last_state(base):
    """In bfloat16, but for the weights that stay float32; loads as it is and knows its tokens."""
    cfg, params, _ = checkpoint.load(base / "model")
    assert cfg.dtype == "bfloat16"
    assert (cfg.bd_gdn, cfg.moe.coreset, cfg.mask_token_id) == (None, None, None)
    saved = saved_state(base, STEPS)
    tree = jax.tree.unflatten(
        jax.tree.structure(jax.eval_shape(start).params),
        [jnp.asarray(a) for name, a in saved.items() if name.startswith("params.")],
    )
    want, got = named_leaves(restack(tree, base_config())), named_leaves(params)
    assert want.keys() == got.keys()
    for name, leaf in want.items():
        exact = name.rsplit(".", 1)[-1] in FLOAT32
        assert got[name].dtype == (jnp.float32 if exact else jnp.bfloat16), name
        cast = np.asarray(leaf) if exact else np.asarray(leaf).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(got[name]), cast, err_msg=name)
    assert Tokenizer.load(base / "model").vocab_size <= cfg.vocab_size


def test_training_keeps_the_float32_weights(base):
    """N2: decays, norms, router and their Adam moments are float32 in a bfloat16 model."""
    for name, leaf in saved_state(base, STEPS).items():
        if leaf.ndim:
            exact = name.rsplit(".", 1)[-1] in FLOAT32 | {"ns_coeffs"}  # of muon's iteration
            assert leaf.dtype == (np.float32 if exact else ml_dtypes.bfloat16), name


def test_every_weight_moves_but_the_mask_tokens(base):
    before = {name: np.asarray(leaf) for name, leaf in named_leaves(start()).items()}
    after = saved_state(base, STEPS)
    for name, leaf in before.items():
        if name.startswith("params."):
            assert (leaf != after[name]).any(), name
    mask = Tokenizer.load(base / "tokenizer").mask_id
    assert (optax_mu(after, "lm_head")[:, mask] == 0).all()
    assert (optax_mu(after, "embed_tokens")[mask] == 0).all()


def optax_mu(state: dict[str, np.ndarray], leaf: str) -> np.ndarray:
    """Adam's first moment of a leaf."""
    return next(a for name, a in state.items() if name.endswith(f"mu.{leaf}"))


@pytest.mark.slow
def test_the_loss_falls_on_a_repeated_batch(base):
    """The run's own compiled step, one batch over and over."""
    tokenizer = Tokenizer.load(base / "tokenizer")
    batch = as_arrays(TaskBatches(tokenizer, DATA, block=32).batch(0))
    forbidden = np.arange(300) >= tokenizer.vocab_size
    forbidden[tokenizer.mask_id] = True
    # Committed to a device, as the run's state is: or the step would be compiled again.
    state, losses = jax.device_put(start(), jax.devices()[0]), []
    for _ in range(STEPS):
        state, metrics = train_step(
            state,
            batch,
            jnp.asarray(forbidden),
            jnp.float32(RUN.optimiser.rate(int(state.step))),
            cfg=base_config(),
            env=ENV,
            loss=RUN.loss,
            optimiser=RUN.optimiser.rule,
        )
        losses.append(float(metrics["ar_loss"]))
        assert float(metrics["gradient_norm"]) > 0
    assert abs(losses[0] - np.log(300)) < 0.5  # a new model knows nothing
    assert losses[-1] < losses[0] - 1
    assert int(state.step) == STEPS
    counts = [leaf for leaf in jax.tree.leaves(state.optimiser) if leaf.ndim == 0]
    assert all(int(count) == STEPS for count in counts)


@pytest.mark.slow
def test_a_folder_is_trained_further(base, tmp_path):
    """The second run starts with the first one's weights and tokenizer, and ends better."""
    model, more = tmp_path / "run" / "model", dataclasses.replace(RUN, start=str(base / "model"))
    assert pretrain(tmp_path / "run", more) == model
    first, again = log_of(base), log_of(tmp_path / "run")
    assert again[0]["ar_loss"] < 0.8 * first[0]["ar_loss"]
    assert again[-1]["val_ar_loss"] < first[-1]["val_ar_loss"]
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (model / name).read_bytes() == (base / "model" / name).read_bytes()


# --- interruption -------------------------------------------------------------------------------


INTERRUPTIONS = {
    "while a batch is made": (TaskBatches, "batch", False),
    "before a step": (loop, "train_step", False),
    "in a step, whose result is lost": (loop, "train_step", True),
}


@pytest.mark.parametrize("where", INTERRUPTIONS.values(), ids=INTERRUPTIONS)
def test_an_interrupted_run_resumes_exactly(base, fresh, monkeypatch, where):
    """T3: stopped after 5 of 12 steps, wherever it resumes: state, log, model to the last bit."""
    owner, name, after = where
    with monkeypatch.context() as patch:
        interrupter = Interrupter(getattr(owner, name), 6, after=after)
        # A plain function, so that it also serves as a method.
        patch.setattr(owner, name, lambda *args, **options: interrupter(*args, **options))
        with pytest.raises(KeyboardInterrupt):
            pretrain(fresh)
    assert not (fresh / "model").exists()
    assert pretrain(fresh) == fresh / "model"
    assert_same_end(fresh, base)


def test_a_report_may_end_the_run(base, fresh):
    """What the command line does on Ctrl-C: the state of the reported step is saved."""
    lines = []

    def report(line: loop.Progress) -> None:
        lines.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(fresh, report=report)
    assert len(lines) == 1
    assert (lines[0].steps, lines[0].tokens_per_second > 0) == (STEPS, True)
    assert saved_steps(fresh) == [lines[0].step]
    assert log_of(fresh) == log_of(base)[:1]
    pretrain(fresh)
    assert_same_end(fresh, base)


def test_files_that_a_kill_cut_short(base, fresh):
    """A line of the log without its end, and a run.json that never got its name."""

    def stop(line: loop.Progress) -> None:
        raise KeyboardInterrupt

    (fresh / "run.json").rename(fresh / "run.json.123.part")
    shutil.rmtree(fresh / "tokenizer")
    with pytest.raises(KeyboardInterrupt):
        pretrain(fresh, report=stop)
    with (fresh / "log.jsonl").open("a") as file:
        file.write('{"step": 12, "ar_lo')
    pretrain(fresh)
    assert_same_end(fresh, base)


def test_a_finished_run_stays_as_it_is(base, fresh):
    shutil.copytree(base, fresh, dirs_exist_ok=True)
    assert pretrain(fresh) == fresh / "model"
    assert_same_end(fresh, base)


@pytest.fixture
def saved_often(base, fresh) -> Path:
    """A run that saved whenever it could, so that it still has a checkpoint before the last."""
    pretrain(fresh, save_seconds=0.0)
    steps = saved_steps(fresh)
    assert len(steps) >= 2
    assert steps[-1] == STEPS
    shutil.rmtree(fresh / "model")
    return fresh


def kill_while_writing(step: Path) -> None:
    """What is there before the rename that completes a checkpoint."""
    step.rename(step.with_name(f"{step.name}.orbax-checkpoint-tmp"))


def cut_a_copy_short(step: Path) -> None:
    """The marks come last, so a part of a checkpoint has none."""
    for mark in ("commit_success.txt", "state/commit_success.txt", "_CHECKPOINT_METADATA"):
        (step / mark).unlink()
    lose_the_arrays(step)


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def lose_the_arrays(step: Path) -> None:
    shutil.rmtree(step / "state" / "d")


@pytest.mark.parametrize("ruin", (kill_while_writing, cut_a_copy_short, empty))
def test_a_half_written_checkpoint_is_skipped(base, saved_often, ruin):
    """K4: the one before it is taken, and the ruin is replaced.

    The older one was written while training went on with the memory of its arrays.
    """
    ruin(saved_often / "checkpoints" / str(STEPS))
    pretrain(saved_often)
    assert_same_end(saved_often, base)


# The checkpoint library leaves unfinished reads behind when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_named(saved_often):
    """Complete by its marks, but not readable: the user decides, nothing is trained over it."""
    lose_the_arrays(saved_often / "checkpoints" / str(STEPS))
    with pytest.raises(CloverError, match=f"checkpoints.*{STEPS}"):
        pretrain(saved_often)


# --- whose folder it is -------------------------------------------------------------------------


def test_another_runs_folder_is_refused(base):
    other = dataclasses.replace(RUN, seed=1)
    before = sorted(p.name for p in base.rglob("*"))
    with pytest.raises(CloverError, match="another run"):
        pretrain(base, other)
    assert sorted(p.name for p in base.rglob("*")) == before


def test_a_folder_of_other_things_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CloverError, match="not empty"):
        pretrain(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(CloverError, match="run"):
        pretrain(tmp_path / "run")


def test_an_unknown_start_claims_no_folder(tmp_path):
    with pytest.raises(CloverError, match=r"start is 'huge'.*small"):
        pretrain(tmp_path / "run", dataclasses.replace(RUN, start="huge"))
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_is_too_small_claims_no_folder(tmp_path):
    with pytest.raises(CloverError, match="vocab_size"):
        pretrain(tmp_path / "run", dataclasses.replace(RUN, start="clover_tiny"))
    assert not (tmp_path / "run").exists()


def test_a_missing_source_claims_no_folder(tmp_path):
    run = dataclasses.replace(CONVERT, start=str(tmp_path / "nowhere"))
    with pytest.raises(CloverError, match="nowhere"):
        convert(tmp_path / "run", run, calibrated=quiet)
    assert not (tmp_path / "run").exists()


def test_the_sampler_is_asked_on_the_way(base, fresh):
    """At every tenth step that `every` divides and at the last one, with the weights of then."""
    run = dataclasses.replace(RUN, evaluation=Evaluation(every=10))
    (fresh / "run.json").write_text(canonical_json(run))
    seen = []

    def evaluate(cfg, params, tokenizer) -> dict[str, float]:
        assert cfg == base_config() and tokenizer.vocab_size == 300
        seen.append(np.asarray(params.norm))
        return {"eval_ar_gcd": 0.25}

    loop.train(run, fresh, report=quiet, evaluate=evaluate, save_seconds=1e6)
    lines = [line for line in log_of(fresh) if "eval_ar_gcd" in line]
    assert [(line["step"], line["eval_ar_gcd"]) for line in lines] == [(10, 0.25), (12, 0.25)]
    assert (seen[0] != seen[1]).any()
    np.testing.assert_array_equal(seen[1], checkpoint.load(fresh / "model")[1].norm)
    without = [{k: v for k, v in line.items() if k != "eval_ar_gcd"} for line in log_of(fresh)]
    assert without == log_of(base)


def test_settings_that_do_not_fit_the_model_claim_no_folder(base, tmp_path):
    """They can be corrected and tried again in the same folder."""
    noise = NoiseConfig(lengths=(64,))
    for run in (
        dataclasses.replace(CONVERT, data=dataclasses.replace(DATA, noise=noise)),
        dataclasses.replace(RUN, data=dataclasses.replace(DATA, noise=noise)),
        dataclasses.replace(CONVERT, data=None, traces=TraceConfig(train="none.jsonl")),
    ):
        with pytest.raises(CloverError, match=r"block length, 32|none\.jsonl"):
            loop.train(
                dataclasses.replace(run, start=str(base / "model")), tmp_path / "run", report=quiet
            )
        assert not (tmp_path / "run").exists()


# --- conversion ---------------------------------------------------------------------------------

CONVERT = RunConfig(
    kind="convert",
    start="",
    data=DATA,
    loss=LossConfig(),
    optimiser=OptimiserConfig(learning_rate=3e-3, steps=4, warmup=1),
    calibration_steps=8,
)


@dataclasses.dataclass
class CalibratedRun:
    """A conversion that was interrupted before its first step, and its files at that time."""

    folder: Path
    run: RunConfig
    residuals: list
    files_when_stopped: set[str]


@pytest.fixture(scope="module")
def calibrated_run(base, tmp_path_factory) -> CalibratedRun:
    """Calibrated, nothing trained yet."""
    folder = tmp_path_factory.mktemp("convert") / "run"
    run = dataclasses.replace(CONVERT, start=str(base / "model"))
    residuals = []
    with pytest.MonkeyPatch.context() as patch:
        interrupter = Interrupter(TaskBatches.batch, CONVERT.calibration_steps + 1, after=False)
        patch.setattr(TaskBatches, "batch", lambda *args: interrupter(*args))
        with pytest.raises(KeyboardInterrupt):
            convert(folder, run, calibrated=residuals.append)
    return CalibratedRun(folder, run, residuals, {p.name for p in folder.iterdir()})


@pytest.mark.slow
def test_calibration_fits_the_block_operator(calibrated_run):
    """In every GDN layer the residual on its batch falls, over all lengths together."""
    (found,) = calibrated_run.residuals
    assert found.lengths == (1, 2, 4, 8, 16, 32)
    assert found.before.shape == found.after.shape == (1, 6)
    seen = np.isfinite(found.before)
    assert seen.sum() >= 3
    assert found.after[seen].mean() < 0.97 * found.before[seen].mean()
    kept = json.loads((calibrated_run.folder / "calibration.json").read_text())
    assert kept["lengths"] == [1, 2, 4, 8, 16, 32]
    np.testing.assert_allclose(np.asarray(kept["after"], float), found.after, atol=1e-6)


@pytest.mark.slow
def test_conversion_leaves_the_causal_model_alone(base, calibrated_run):
    """Before training, the AR logits are the parent's to the last bit, the mask's own aside."""
    parent, parent_params, _ = checkpoint.load(base / "model", dtype="float32")
    cfg, params, _ = checkpoint.load(calibrated_run.folder / "source")
    assert (cfg.dtype, cfg.block_length, cfg.logits_position) == ("float32", 32, "same")
    assert cfg.bd_gdn is not None
    assert cfg.moe.coreset is not None
    mask = Tokenizer.load(base / "model").mask_id
    assert cfg.mask_token_id == mask
    tokens = np.random.default_rng(0).integers(10, 290, (2, 6)).astype(np.int32)
    logits = []
    for c, p in ((parent, parent_params), (cfg, params)):
        clean = CleanInput(jnp.asarray(tokens), jnp.asarray([6, 4], jnp.int32))
        run = jax.jit(
            lambda p, clean, c=c: unembed(
                p, forward(p, clean, None, None, cfg=c, env=ENV).hidden.clean
            )
        )
        logits.append(np.asarray(run(p, clean)))
    others = np.arange(300) != mask
    np.testing.assert_array_equal(logits[0][..., others], logits[1][..., others])


@pytest.mark.slow
def test_conversion_adds_the_mask_row_and_the_scalars(base, calibrated_run):
    """The mask's rows are the mean of the tokens' rows; calibration changed its scalars only."""
    parent = named_leaves(checkpoint.load(base / "model", dtype="float32")[1])
    params = named_leaves(checkpoint.load(calibrated_run.folder / "source")[1])
    tokenizer = Tokenizer.load(base / "model")
    tokens = [i for i in range(tokenizer.vocab_size) if i != tokenizer.mask_id]
    for name, leaf in parent.items():
        got, want = np.asarray(params[name]), np.array(leaf)
        if name in ("embed_tokens", "lm_head"):
            got, want = (a.T if name == "lm_head" else a for a in (got, want))
            mean = want[tokens].astype(np.float64).mean(axis=0)
            np.testing.assert_allclose(got[tokenizer.mask_id], mean, rtol=2**-8, atol=1e-9)
            got, want = (np.delete(a, tokenizer.mask_id, axis=0) for a in (got, want))
        np.testing.assert_array_equal(got, want, err_msg=name)
    for name in params.keys() - parent.keys():
        value = np.asarray(params[name])
        kind = name.rsplit(".", 1)[-1]
        if kind == "conv_right_weight":
            assert not value.any()
        else:
            assert kind in SCALARS
            start = 0 if kind == "bd_softmax_history_bias" else 1
            assert (value != start).all()
            assert np.abs(value - start).max() < 1


@pytest.mark.slow
def test_a_resumed_conversion_keeps_its_source(calibrated_run):
    """The folder loses its scaffolding, is not calibrated again, and goes on where it stopped."""
    folder, run = calibrated_run.folder, calibrated_run.run
    assert "source" in calibrated_run.files_when_stopped
    assert "uncalibrated" not in calibrated_run.files_when_stopped
    source = (folder / "source" / "model.safetensors").read_bytes()
    again = []
    model = convert(folder, run, calibrated=again.append)
    assert again == []
    assert (folder / "source" / "model.safetensors").read_bytes() == source
    assert saved_steps(folder)[-1] == 4
    cfg, params, _ = checkpoint.load(model)
    assert cfg == checkpoint.load(folder / "source", dtype="bfloat16")[0]
    before = named_leaves(checkpoint.load(folder / "source")[1])
    for name, leaf in named_leaves(params).items():
        exact = name.rsplit(".", 1)[-1] in FLOAT32
        assert leaf.dtype == (jnp.float32 if exact else jnp.bfloat16), name
        assert (np.asarray(leaf, np.float32) != np.asarray(before[name])).any(), name
    log = log_of(folder)
    assert log[-1]["step"] == 4
    assert {"val_diffusion_loss", "val_history_share"} <= log[-1].keys()
    assert all(np.isfinite(list(line.values())).all() for line in log)
    assert Tokenizer.load(model).mask_id == cfg.mask_token_id


@pytest.mark.slow
def test_a_clover_folder_is_trained_on_as_it_is(calibrated_run, tmp_path):
    """Conversion of what is Clover already, without calibration: the same weights to start from."""
    source = calibrated_run.folder / "source"
    run = dataclasses.replace(CONVERT, start=str(source), calibration_steps=0)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskBatches, "batch", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "run", run, calibrated=stop)
    first = (tmp_path / "run" / "source" / "model.safetensors").read_bytes()
    assert first == (source / "model.safetensors").read_bytes()


# --- fine-tuning --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> TraceConfig:
    """Twelve short conversations, several of which share a row."""
    path = tmp_path_factory.mktemp("traces") / "train.jsonl"
    line = lambda i: {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": f"{i} " * (1 + i % 5)},
        ],
        "enable_thinking": False,
    }
    path.write_text("".join(json.dumps(line(i)) + "\n" for i in range(12)))
    return TraceConfig(
        train=str(path), val=str(path), rows=2, buckets=((96, 4),), packed=True,
        noise=NoiseConfig(complementary=False),
    )  # fmt: skip


@pytest.mark.slow
def test_an_adapter_is_tuned_on_packed_traces(calibrated_run, traces, tmp_path):
    """T3: a run that is interrupted between two lines and one that is not end alike; the adapter
    merged into the start is the model; what it does not change keeps every bit."""
    source = calibrated_run.folder / "source"
    run = RunConfig(
        kind="sft",
        start=str(source),
        traces=traces,
        loss=LossConfig(),
        optimiser=OptimiserConfig(learning_rate=1e-2, steps=20, warmup=1),
        lora=LoRAConfig(rank=2, alpha=4.0, targets=("attention",), train=("block",)),
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    loop.train(run, whole, report=quiet, save_seconds=1e6)

    def stop(line: loop.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.train(run, parts, report=stop, save_seconds=1e6)
    assert saved_steps(parts) == [10]
    loop.train(run, parts, report=quiet, save_seconds=1e6)
    assert log_of(parts) == log_of(whole)
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    log = log_of(whole)
    assert log[1]["loss"] < log[0]["loss"]
    assert "val_diffusion_loss" in log[-1]
    cfg, params, _ = checkpoint.load(source)
    adapter, config = checkpoint.load_adapter(whole / "adapter", cfg)
    assert (config.rank, config.alpha) == (2, 4.0)
    assert config.select(known_kinds()) == run.lora.select(known_kinds())
    merged = named_leaves(merge(params, adapter, config))
    model = named_leaves(checkpoint.load(whole / "model")[1])
    for name, leaf in named_leaves(params).items():
        want = np.asarray(merged[name].astype(model[name].dtype), np.float32)
        np.testing.assert_array_equal(np.asarray(model[name], np.float32), want, err_msg=name)
        kind = name.rsplit(".", 1)[-1]
        changed = (np.asarray(merged[name]) != np.asarray(leaf)).any()
        assert changed == (kind in ADAPTED), name
