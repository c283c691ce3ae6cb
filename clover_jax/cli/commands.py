"""The commands and their flags, as dataclasses that tyro turns into a command line."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg, subcommand

from clover_jax.cli.flags import (
    Checkpoint,
    DeviceFlags,
    ModelFlags,
    Norms,
    OptionalFile,
    OptionalText,
    OraclePython,
    Switch,
    none,
    own,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(ModelFlags):
    """Answer one prompt.

    In a terminal the block forms live: masked cells, guesses coloured by confidence, then text.
    Into a pipe goes plain text. A last line gives tokens, forward passes, tokens per forward pass,
    tokens per second, and experts touched.

    Attributes:
        prompt: The question; read from standard input if it is not given.
        token_ids: The prompt as token ids, such as "3 5 7": no tokenizer or template is needed.
        raw: The prompt as it is, without the chat template. Control tokens in it count.
        samples: Answers to draw; they differ if the temperature is above 0.
        trace: Write the block after every step to this file, as JSON lines.
        screen: Save a picture (SVG) of the first block's steps and the answer.
    """

    prompt: Annotated[
        Positional[tuple[str, ...]], arg(metavar="[PROMPT]", help_behavior_hint="")
    ] = ()
    token_ids: OptionalText = None
    raw: Switch = False
    samples: int = 1
    trace: OptionalFile = None
    screen: OptionalFile = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(ModelFlags):
    """Talk to the model, one message a line; /reset starts over, /quit ends.

    What the next turn's prompt shares with earlier ones is not computed again; the number of
    reused tokens is shown after each answer.

    Attributes:
        context: Tokens that the conversation may reach; memory for them is taken at the start.
        reuse: Go on from cached prefixes.
    """

    context: int = 8192
    reuse: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval(ModelFlags):
    """Ask several decoders, and servers, the same problems: accuracy, tokens per forward, speed.

    Suites: `quick` has 16 problems of every built-in family, A chat and reasoning, B linked
    judgements, C text and code. Results go to DIR/results.jsonl with seeds and token ids, the
    report to report.md and report.png; the same command goes on with an interrupted run, and adds
    further backends to a finished one.

    Three more suites look at one model each. `infill` fills holes in held-out Python functions,
    with and without what follows the hole, and runs them. `humaneval-loss` gives the loss on
    HumanEval's solutions, causal and as the bound by denoising; their tests are never run (needs
    the extra `experiments`). `traces` gives the share of a file's conversations that are right.

    Attributes:
        suite: What to measure.
        backend: A mode with settings, such as ar, block, block:threshold=0.8,block_length=16 or
            ar:checkpoint=DIR,name=parent. Settings are those of the sampler (threshold, policy,
            steps, window, close, ...), block_length, fuse_commit, coreset, checkpoint and name. By
            default ar and block (quick: also a lower threshold and other ways to close a block),
            or ar alone with --mode ar.
        endpoint: OpenAI-compatible server, such as http://localhost:30000/v1,model=NAME. Further
            settings: api=completions, batch, seconds, attempts, temperature; OPENAI_API_KEY is
            sent if it is set.
        out: Folder of the results; without it they are only printed.
        oracle: Reference answers of each family that bound what any reveal rule could reach.
        task: Family to ask (all of the suite by default).
        n: Problems per family, or of the suite.
        split: Held-out part.
        batch: Problems answered together.
        judge: Of Python functions: run them in a confined process (Linux only), or read them with
            an interpreter of a small subset.
        hole: Tokens of a hole (infill only).
        place: Where in the body the hole is (infill only).
        draws: Masks per block (humaneval-loss only).
        file: JSONL file of traces: right calls and answers in every turn (traces only).
    """

    suite: Literal["quick", "A", "B", "C", "infill", "humaneval-loss", "traces"] = "quick"
    backend: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="MODE[:NAME=VALUE,...]")] = ()
    endpoint: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="URL[,NAME=VALUE,...]")] = ()
    out: Annotated[Path | None, none("DIR")] = None
    oracle: int = 8
    file: OptionalFile = None
    task: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    n: Annotated[
        int | None,
        arg(metavar="INT", help_behavior_hint="(default: 16 quick, 300 A B C, else 100)"),
    ] = None
    split: Literal["val", "test"] = "test"
    batch: int = 16
    judge: Literal["execution", "interpreter"] = "execution"
    hole: int = 8
    place: Literal["anywhere", "start"] = "anywhere"
    draws: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(ModelFlags):
    """Wall time of block decoding against AR decoding of the same weights, in one run.

    Answers held-out problems of the built-in tasks in both modes, with and without fused commits
    and coreset; medians over rounds. Without a tokenizer the prompts are random ids.

    Attributes:
        preset: A named config with random float32 weights in place of a checkpoint.
        batch: Batch sizes to measure (1 and 8 by default).
        rounds: Rounds after the warm-up.
        against: Frameworks to take turns with, on the same weights in float32 and as many threads:
            transformers (needs --oracle-python) or llama.cpp (needs the extra `verify`).
        oracle_python: Python that has torch and transformers.
    """

    preset: Annotated[str | None, none("NAME")] = None
    batch: Annotated[UseAppendAction[tuple[int, ...]], arg(metavar="ROWS")] = ()
    rounds: int = 7
    against: Annotated[
        UseAppendAction[tuple[Literal["hf", "llama.cpp"], ...]], arg(metavar="{hf,llama.cpp}")
    ] = ()
    oracle_python: OraclePython = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """Measure the figures of a model card: accuracy, tokens per forward, calibration, expert use.

    Block decoding is compared with AR decoding of the same weights on the same held-out problems,
    and, where they are given, with the AR parent and with an AR control trained as long. What is
    in the folder already is not measured again.

    Attributes:
        out: Folder of the figures; the tables go to `card.md` in it, and to standard output.
        checkpoint: The converted model.
        parent: The AR model it was converted from.
        control: That parent, trained further without blocks.
        n: Problems per task.
        frontier_n: Problems per task at each threshold of the frontier.
        replay_n: Reference answers per task for calibration and oracle.
        split: Held-out part.
        batch: Problems answered together.
        run: Training run to draw the losses of, as NAME=DIR.
    """

    out: Annotated[Path, arg(metavar="DIR")]
    checkpoint: Checkpoint = None
    parent: Annotated[Path | None, none("DIR")] = None
    control: Annotated[Path | None, none("DIR")] = None
    n: int = 300
    frontier_n: int = 100
    replay_n: int = 100
    split: Literal["val", "test"] = "test"
    batch: int = 32
    run: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=DIR")] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info:
    """Show a model's config, sizes, and what of a folder would not load.

    Attributes:
        folder: Checkpoint folder.
        preset: A named config instead of a folder.
        norms: How the files store norms that scale by 1 + w; their mean decides if not given.
        json: Print JSON.
    """

    folder: Annotated[
        Positional[Path | None],
        arg(metavar="[DIR]", help_behavior_hint="(default: the model in the package)"),
    ] = None
    preset: Annotated[str | None, none("NAME")] = None
    norms: Norms = None
    json: Switch = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a model needs on a mesh of devices, and the least time of its passes; nothing runs.

    Weights, caches and optimiser state are counted from their shapes; activations and collectives
    come from ahead-of-time compilation of the real passes, in processes of their own.

    Attributes:
        preset: A named config.
        mesh: Devices, as data x expert x tensor.
        mode: Decoding, or training of all weights (float32 masters, bfloat16 passes).
        context: Cells of the cache, prompt and answer together; in training, tokens of a row.
        batch: Rows.
        rules: How the mesh splits arrays, see `clover_jax/sharding.py`; by default fsdp to train
            and tensor to serve.
        chunk: Prompt tokens of a prefill pass.
        optimiser: Of training.
        accumulate: Parts that a training batch runs in.
        target: What to compile for: cpu (fake devices), v5p:4x4x4, v6e:8x8, h200:8 (the last ones
            need the dependency group `aot` and minutes).
        compile: Compile. Without it, only what can be counted is printed, at once.
        tpf: Tokens that a preview fixes, in the mean, for the speed floor.
        experts: Experts of a layer that a preview touches, for the speed floor (by default those
            that its tokens would touch if they chose evenly).
        plot: Draw what a device holds (PNG; extra `experiments`).
        json: Print JSON.
    """

    preset: str = "clover_35b_a3b"
    mesh: str = "1x1x1"
    mode: Literal["serve", "train"] = "serve"
    context: int = 4096
    batch: int = 1
    rules: OptionalText = None
    chunk: int = 2048
    optimiser: Literal["muon", "adamw"] = "muon"
    accumulate: int = 1
    target: str = "cpu"
    compile: bool = True
    tpf: float = 4.0
    experts: Annotated[float | None, none("N")] = None
    plot: OptionalFile = None
    json: Switch = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """How far our numbers are from another implementation's, layer by layer; 1 past the limits.

    Attributes:
        folder: Checkpoint folder.
        against: transformers' causal path, the torch oracle of a preview or of a training step,
            llama.cpp on an export of the causal trunk, or a trace that someone wrote.
        endpoint: Instead, the base URL of an OpenAI-compatible server: log-probabilities by token.
        endpoint_model: Name that the server knows the model by.
        max_gap: Largest difference of a log-probability, in nats (endpoint only).
        timeout: Seconds until a server is given up.
        oracle_python: Python that has torch and transformers.
        golden: Trace to compare with, as `clover logits --taps` or an oracle writes it.
        dtype: Of the weights and of both sides' computation.
        norms: How the files store norms that scale by 1 + w; their mean decides if not given.
        precision: Of our matmuls.
        length: Random tokens of a row.
        rows: Rows of random tokens.
        seed: Of the random tokens.
        prompt: Text instead of random tokens.
        token_ids: Ids instead of random tokens.
        positions_from: First position whose logits are compared.
        continuation: Greedy tokens after the rows (hf and endpoint only).
        threshold: Of the reveal rule (torch-preview only).
        gguf_type: Of the exported matrices (llama.cpp only).
        png: Heat map of layer by tap.
        json: Print JSON.
    """

    folder: Annotated[Positional[Path], arg(metavar="DIR")]
    against: Annotated[
        Literal["hf", "torch-preview", "torch-training", "llama.cpp", "golden"] | None,
        none("{hf,torch-preview,torch-training,llama.cpp,golden}"),
    ] = None
    endpoint: Annotated[str | None, none("URL")] = None
    endpoint_model: Annotated[str, arg(metavar="NAME")] = "default"
    max_gap: float = 0.1
    timeout: float = 120.0
    oracle_python: OraclePython = None
    golden: OptionalFile = None
    dtype: Annotated[Literal["float32", "bfloat16"], arg(metavar="{float32,bfloat16}")] = "float32"
    norms: Norms = None
    precision: Literal["highest", "default"] = "highest"
    length: int = 128
    rows: int = 1
    seed: int = 0
    prompt: OptionalText = None
    token_ids: OptionalText = None
    positions_from: int = 0
    continuation: int = 16
    threshold: float = 0.95
    gguf_type: Literal["f32", "bf16", "q8_0"] = "f32"
    png: OptionalFile = None
    json: Switch = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logits:
    """Write our logits for given tokens as a safetensors file, for anyone to compare.

    Attributes:
        folder: Checkpoint folder.
        token_ids: Such as "3 5 7".
        out: File to write.
        taps: Also write every layer's inner tensors.
        dtype: Of the weights.
        norms: How the files store norms that scale by 1 + w; their mean decides if not given.
        precision: Of the matmuls.
        positions_from: First position whose logits are written.
    """

    folder: Annotated[Positional[Path], arg(metavar="DIR")]
    token_ids: Annotated[str, arg(metavar="TEXT")]
    out: Annotated[Path, arg(metavar="FILE")]
    taps: Switch = False
    dtype: Annotated[Literal["float32", "bfloat16"] | None, own("{float32,bfloat16}")] = None
    norms: Norms = None
    precision: Literal["highest", "default"] = "highest"
    positions_from: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConvert:
    """Turn a Qwen3.6 folder into a Clover folder: the start of a training.

    Attributes:
        source: Qwen3.6 folder.
        target: New folder.
        mask_token_id: Row of the mask token; by default the first row that no token uses.
        overwrite: Replace the target if it is a checkpoint folder.
        norms: How the files store norms that scale by 1 + w; their mean decides if not given.
        set: Switch of the block operator, as in config.json under clover: bd_gdn.right_conv=false.
    """

    source: Annotated[Positional[Path], arg(metavar="SRC")]
    target: Annotated[Positional[Path], arg(metavar="DST")]
    mask_token_id: Annotated[int | None, none("INT")] = None
    overwrite: Switch = False
    norms: Norms = None
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY=VALUE")] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMerge:
    """Merge a LoRA adapter (PEFT format) into its base: an ordinary checkpoint folder.

    Attributes:
        base: Checkpoint folder that the adapter was trained on.
        adapter: Adapter folder.
        target: New folder.
        overwrite: Replace the target if it is a checkpoint folder.
        norms: How the base stores norms that scale by 1 + w; their mean decides if not given.
    """

    base: Annotated[Positional[Path], arg(metavar="BASE")]
    adapter: Annotated[Positional[Path], arg(metavar="ADAPTER")]
    target: Annotated[Positional[Path], arg(metavar="OUT")]
    overwrite: Switch = False
    norms: Norms = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointExport:
    """Write the causal trunk of a folder as a GGUF file, which llama.cpp runs.

    The file holds no tokenizer (ids in, ids out), and nothing of the block operator.

    Attributes:
        source: Qwen3.6 or Clover folder.
        gguf: File to write.
        type: Of the matrices; everything else is float32.
        norms: How the files store norms that scale by 1 + w; their mean decides if not given.
        overwrite: Replace the file if it exists.
    """

    source: Annotated[Positional[Path], arg(metavar="DIR")]
    gguf: Annotated[Path, arg(metavar="FILE")]
    type: Literal["f32", "bf16", "q8_0"] = "f32"
    norms: Norms = None
    overwrite: Switch = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataCheck:
    """Read a file of traces as fine-tuning does: what is in it, what is learnt, what is lost.

    Each line is {"messages": [...], "tools": [...], "enable_thinking": true}, the last two
    optional. Shows counts and lengths, then one sample: prompt, and block by block what gets loss.

    Attributes:
        action: The only one.
        file: JSONL file.
        checkpoint: Folder whose tokenizer, chat template and block length count.
        max_tokens: Longer samples are cut to whole blocks.
        limit: Only so many lines, from the first.
        json: Print JSON, without the sample.
    """

    action: Positional[Literal["check"]]  # tyro makes no subcommand of a single class
    file: Annotated[Positional[Path], arg(metavar="FILE")]
    checkpoint: Checkpoint = None
    max_tokens: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: the model's context)")
    ] = None
    limit: Annotated[int | None, none("INT")] = None
    json: Switch = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags(DeviceFlags):
    """A training run. The same command resumes a run that was interrupted.

    Attributes:
        out: The run's folder; the trained model is in its subfolder `model`.
        config: Settings to start from: the run.json of another run of this kind.
        set: A setting of the run, such as optimiser.steps=200 (see --dry-run for all of them).
        dry_run: Print every setting, shapes, memory and steps; train nothing.
        tensorboard: Write metrics for TensorBoard, too (extra `train`).
    """

    out: Annotated[Path, arg(metavar="DIR")]
    config: OptionalFile = None
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    dry_run: Switch = False
    tensorboard: Switch = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPretrain(RunFlags):
    """Train an autoregressive model on the built-in tasks, from nothing or further.

    Attributes:
        preset: Named config whose autoregressive base is trained from nothing.
        checkpoint: Folder to go on from instead.
    """

    preset: str = "clover_nano"
    checkpoint: Annotated[Path | None, none("DIR")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSft(RunFlags):
    """Fine-tune a Clover folder on chat or agent traces (`clover data check` shows a file).

    Attributes:
        checkpoint: Folder to start from.
        data: JSONL file of traces.
        held_out: A file of the same form to validate on.
    """

    checkpoint: Checkpoint = None
    data: Annotated[Path, arg(metavar="FILE")]
    held_out: OptionalFile = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConvert(RunFlags):
    """Train a Qwen3.6 or Clover folder to denoise blocks.

    Attributes:
        checkpoint: Folder to start from.
    """

    checkpoint: Annotated[Path, arg(metavar="DIR")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateList:
    """Every registered ablation: its question, how much of it was run, and the verdict.

    Attributes:
        experiments: Folder of the results, one subfolder per ablation.
    """

    experiments: Annotated[Path, arg(metavar="DIR")] = Path("experiments")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateRun:
    """Run what is missing of an ablation; the same command goes on after an interruption.

    Results go to results.jsonl in the ablation's folder, one line per arm and seed. Results of
    another parent or of other settings are never mixed with them.

    Attributes:
        name: Number, slug, or both.
        parent: Clover folder that is measured, or whose causal weights trainings start from.
        arm: Only these arms (all by default).
        seed: Only these seeds (all by default).
        minutes: Stop after this time, between two steps or two arms.
        experiments: Folder of the results, one subfolder per ablation.
        trainings: Folder of the trainings.
    """

    name: Positional[str]
    parent: Checkpoint = None
    arm: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    seed: Annotated[UseAppendAction[tuple[int, ...]], arg(metavar="INT")] = ()
    minutes: Annotated[float | None, none("FLOAT")] = None
    experiments: Annotated[Path, arg(metavar="DIR")] = Path("experiments")
    trainings: Annotated[
        Path | None, arg(metavar="DIR", help_behavior_hint="(default: in the user's cache)")
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateReport:
    """Write README.md and figure.png of every ablation, and the index of all.

    Attributes:
        experiments: Folder of the results, one subfolder per ablation.
    """

    experiments: Annotated[Path, arg(metavar="DIR")] = Path("experiments")


_AblateCommands = (
    Annotated[AblateList, subcommand("list")]
    | Annotated[AblateRun, subcommand("run")]
    | Annotated[AblateReport, subcommand("report")]
)  # fmt: skip
_CheckpointCommands = (
    Annotated[CheckpointConvert, subcommand("convert")]
    | Annotated[CheckpointMerge, subcommand("merge")]
    | Annotated[CheckpointExport, subcommand("export")]
)  # fmt: skip
_TrainCommands = (
    Annotated[TrainPretrain, subcommand("pretrain")]
    | Annotated[TrainConvert, subcommand("convert")]
    | Annotated[TrainSft, subcommand("sft")]
)  # fmt: skip
COMMANDS: Any = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Eval, subcommand("eval")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Card, subcommand("card")]
    | Annotated[Info, subcommand("info")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[Logits, subcommand("logits")]
    | Annotated[_CheckpointCommands, subcommand("checkpoint", description="Rewrite folders.")]
    | Annotated[DataCheck, subcommand("data")]
    | Annotated[_TrainCommands, subcommand("train", description="Train models.")]
    | Annotated[_AblateCommands, subcommand("ablate", description="Answer registered questions.")]
)  # fmt: skip
