"""What `generate` and `chat` share: a model with its sampling settings, and prompts as ids."""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from clover_jax import checkpoint
from clover_jax.checkpoint.json_text import parse
from clover_jax.checkpoint.report import NormStorage
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.cli.devices import env_of
from clover_jax.cli.flags import ModelFlags
from clover_jax.config import ModelConfig
from clover_jax.data.tokenizer import StopStrings, Tokenizer
from clover_jax.diffusion.generate import Completion, DoneEvent, Event, Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig, from_generation_config
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.transformer import Params

BAR_BYTES = 2**28  # smaller models load before a bar could be read
MAX_TOKENS = 512  # unless the folder or a flag says otherwise
_SAMPLING = (
    "threshold", "temperature", "top_k", "top_p", "presence", "frequency", "repetition", "close"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Session:
    """A model ready to answer.

    Attributes:
        generator: the model.
        sampling: the folder's settings with the flags over them.
        enable_thinking: what the chat template is told, None for its own default.
        max_tokens: of the flags.
        usual_tokens: of the folder; less where the context is full.
    """

    generator: Generator
    sampling: SamplerConfig
    enable_thinking: bool | None
    max_tokens: int | None
    usual_tokens: int

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The folder's, if it has one."""
        return self.generator.tokenizer

    def request(
        self, prompt: Sequence[int], flags: ModelFlags, *, room: int, sample: int = 0
    ) -> Request:
        """A request under the flags; without --max-tokens at most `room` tokens in all."""
        limit = self.max_tokens
        if limit is None:
            limit = max(1, min(self.usual_tokens, room - len(prompt)))
        return Request(
            prompt=tuple(prompt),
            max_tokens=limit,
            sampling=self.sampling,
            seed=flags.seed,
            sample_index=sample,
            stop_strings=flags.stop,
        )


def packaged_model() -> Path:
    """Folder of the model in the package."""
    return Path(str(resources.files("clover_jax") / "assets" / "clover-nano"))


def open_session(flags: ModelFlags) -> Session:
    """Check everything that the flags and the folder say, then load the weights.

    Raises:
        CloverError: a flag or a file is wrong.
    """
    if flags.thinking and flags.no_thinking:
        raise CloverError("--thinking and --no-thinking are both given: choose one")
    if flags.prefill_chunk < 1:
        raise CloverError(f"--prefill-chunk is {flags.prefill_chunk}: expected at least 1")
    StopStrings(flags.stop)  # refuses empty ones
    folder = flags.checkpoint or packaged_model()
    if not folder.is_dir():
        raise CloverError(f"{folder} is not a folder: expected a checkpoint folder")
    generation = _generation_config(folder)
    given = {name: getattr(flags, name) for name in _SAMPLING}
    given = {name: value for name, value in given.items() if value is not None}
    sampling = dataclasses.replace(from_generation_config(generation), **given)
    usual = generation.get("max_new_tokens")
    if not (usual is None or (type(usual) is int and usual > 0)):
        raise CloverError(
            f"generation_config.json max_new_tokens is {usual!r}: expected a positive integer"
        )
    names = ("tokenizer.json", "tokenizer_config.json")
    found = any((folder / name).exists() for name in names)
    tokenizer = Tokenizer.load(folder) if found else None
    if flags.stop and tokenizer is None:
        raise CloverError(f"--stop needs a tokenizer, and {folder} has no tokenizer.json")
    keep_compiled_programs()
    env = env_of(flags, rows=flags.rows)
    cfg, params = load_with_bar(folder, dtype=flags.dtype, norms=flags.norms, env=env)
    if not flags.coreset:
        cfg = cfg.replace(**{"moe.coreset": None})
    return Session(
        generator=Generator(
            cfg,
            params,
            tokenizer=tokenizer,
            env=env,
            prefill_chunk=flags.prefill_chunk,
            fuse_commit=flags.fuse_commit,
        ),
        sampling=sampling,
        enable_thinking=True if flags.thinking else False if flags.no_thinking else None,
        max_tokens=flags.max_tokens,
        usual_tokens=usual or MAX_TOKENS,
    )


def load_with_bar(
    folder: Path,
    *,
    dtype: Literal["float32", "bfloat16"] | None,
    norms: NormStorage | None,
    env: Env = Env(),  # noqa: B008
) -> tuple[ModelConfig, Params]:
    """The weights of a folder; a bar on stderr if they are large and someone looks."""
    console = Console(stderr=True)
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    quiet = not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=quiet
    ) as bar:
        task = None

        def show(done: int, total: int) -> None:
            nonlocal task
            if task is None and total >= BAR_BYTES:
                task = bar.add_task("", total=total)
            if task is not None:
                bar.update(task, completed=done)

        cfg, params, _ = checkpoint.load(folder, dtype=dtype, norms=norms, env=env, progress=show)
    return cfg, params


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    try:
        fields = parse(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise CloverError(f"{path} cannot be read: {error}; fetch it again") from None
    if not isinstance(fields, dict):
        raise CloverError(f"{path} holds {type(fields).__name__}: expected a JSON object")
    return fields


def parse_token_ids(text: str) -> list[int]:
    """Ids separated by blanks or commas."""
    words = [word for word in re.split(r"[\s,]+", text) if word]
    wrong = [word for word in words if not (word.isascii() and word.isdigit())]
    if wrong:
        raise CloverError(f"--token-ids holds {wrong[0]!r}: expected integers, such as '3 5 7'")
    return [int(word) for word in words]


def decode_input(data: bytes) -> str:
    """Text of standard input, without the last line's end."""
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise CloverError(f"standard input is not UTF-8: {error}") from None


def follow(
    events: Iterator[Event], observers: Sequence[Callable[[Event], None]]
) -> list[Completion]:
    """Show every event to the observers; the completions, by row."""
    done: dict[int, Completion] = {}
    for event in events:
        for observe in observers:
            observe(event)
        if isinstance(event, DoneEvent):
            done[event.row] = event.completion
    return [done[row] for row in sorted(done)]


def stats_line(completion: Completion, num_experts: int) -> str:
    """Accounting of one answer, as people read it."""
    s = completion.stats
    parts = [f"{s.tokens} tokens", f"{s.forwards} forwards"]
    if s.tpf is not None:
        previews = "" if s.tpf_previews is None else f", {s.tpf_previews:.2f} per preview"
        parts.append(f"{s.tpf:.2f} tokens per forward{previews}")
    parts.append(f"{s.tokens_per_s:.1f} tokens/s")
    if s.experts_per_layer:
        mean = sum(s.experts_per_layer) / len(s.experts_per_layer)
        parts.append(f"{mean:.1f} of {num_experts} experts per layer")
    parts.append(f"prompt {s.prompt_tokens} ({s.reused_tokens} reused)")
    if completion.finish_reason != "stop":
        parts.append(f"ended by {completion.finish_reason}")
    return " · ".join(parts)


def exit_status(completions: Sequence[Completion]) -> int:
    """1, and a line, if a model's logits were NaN."""
    if all(c.finish_reason != "error" for c in completions):
        return 0
    print("error: the model's logits are NaN: damaged weights?", file=sys.stderr)
    return 1
