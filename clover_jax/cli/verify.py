"""`clover verify` and `clover logits`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from clover_jax.cli.commands import Logits, Verify
from clover_jax.cli.compiled import keep_compiled_programs
from clover_jax.cli.flags import ORACLE_PYTHON
from clover_jax.cli.session import load_with_bar, parse_token_ids
from clover_jax.config import ModelConfig
from clover_jax.data import tasks
from clover_jax.data.tokenizer import Tokenizer
from clover_jax.diffusion.corrupt import Example, NoiseConfig, make_batch
from clover_jax.diffusion.loss import LossConfig
from clover_jax.errors import CloverError
from clover_jax.eval.card_report import require_pyplot
from clover_jax.model.transformer import Params
from clover_jax.verify.causal import compare_causal, our_trace, versions
from clover_jax.verify.compare import Report
from clover_jax.verify.endpoint import ask, compare_endpoint
from clover_jax.verify.limits import LIMITS
from clover_jax.verify.llama import llama_trace
from clover_jax.verify.oracle import run_oracle
from clover_jax.verify.preview import TRAINING_REQUEST, compare_preview, compare_training
from clover_jax.verify.report_text import draw, endpoint_table, tables
from clover_jax.verify.trace import Tensors, read_trace, write_trace

MASKED_SHARE = 0.6  # of a preview's block


def verify(flags: Verify) -> int:
    """Prints how far both sides are apart; 1 if that is past the limits."""
    _check(flags)
    keep_compiled_programs()
    cfg, params = load_with_bar(flags.folder, dtype=flags.dtype, norms=flags.norms)
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    tell = lambda line: print(clear + line, end="" if clear else "\n", file=sys.stderr, flush=True)
    if flags.endpoint is not None:
        return _endpoint(flags, flags.endpoint, cfg, params, tell)
    report = _compare(flags, cfg, params, tell)
    print(clear, end="", file=sys.stderr)
    if flags.png is not None:
        draw(report, flags.png)
    if flags.json:
        print(json.dumps({**dataclasses.asdict(report), "ok": report.ok}))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        for part in tables(report):
            console.print(part)
    return 0 if report.ok else 1


def _check(flags: Verify) -> None:
    if not flags.folder.is_dir():
        raise CloverError(f"{flags.folder} is not a folder: expected a checkpoint folder")
    for name, least in (("length", 0 if flags.against == "torch-preview" else 1), ("rows", 1),
                        ("positions_from", 0), ("continuation", 0)):  # fmt: skip
        value = getattr(flags, name)
        if value < least:
            flag = name.replace("_", "-")
            raise CloverError(f"--{flag} is {value}: expected at least {least}")
    if flags.png is not None:
        _check_place(flags.png, "--png")
        require_pyplot()
    if (flags.against is None) == (flags.endpoint is None):
        raise CloverError("expected one of --against and --endpoint")
    if flags.max_gap <= 0 or flags.timeout <= 0:
        raise CloverError(
            f"--max-gap is {flags.max_gap} and --timeout {flags.timeout}: expected more than 0"
        )
    if (flags.against == "golden") != (flags.golden is not None):
        raise CloverError("--golden FILE goes with --against golden, and only with it")


def _check_place(file: Path, flag: str) -> None:
    """Before any work is done."""
    if not file.parent.is_dir() or file.is_dir():
        raise CloverError(f"{flag} {file} is not a file in an existing folder")


def _compare(flags: Verify, cfg: ModelConfig, params: Params, tell: Any) -> Report:
    assert flags.against is not None
    if flags.against == "golden":
        assert flags.golden is not None
        theirs, about = read_trace(flags.golden)
        _check_ids(np.asarray(theirs["ids"]), cfg, str(flags.golden))
    else:
        tell("the other side runs")
        theirs, about = other_side(flags, cfg)
    common: dict[str, Any] = {"precision": flags.precision}
    try:
        if "train.loss" in theirs:
            return compare_training(cfg, params, theirs, about, loss=LossConfig(), **common)
        common["progress"] = tell
        if "preview.embed" in theirs:
            return compare_preview(cfg, params, theirs, about, threshold=flags.threshold, **common)
        kind = f"llama.cpp {flags.gguf_type}" if flags.against == "llama.cpp" else cfg.dtype
        return compare_causal(
            cfg, params, theirs, about, against=flags.against, limits=LIMITS[kind], **common
        )
    except KeyError as error:
        raise CloverError(f"the trace has no tensor {error}: write it again") from None


def other_side(flags: Verify, cfg: ModelConfig) -> tuple[Tensors, dict[str, Any]]:
    """What the other implementation gives for the same tokens."""
    python = flags.oracle_python or ORACLE_PYTHON
    options = ["--dtype", cfg.dtype]
    if flags.against in ("torch-preview", "torch-training"):
        if cfg.bd_gdn is None:
            raise CloverError(f"{flags.folder} has no block operator: there is nothing to preview")
        if flags.against == "torch-preview":
            request = _preview_request(flags, cfg)
            options += ["--threshold", str(flags.threshold)]
        else:
            request = _training_request(flags, cfg)
            weights = dataclasses.asdict(LossConfig())
            for name in ("ar", "diffusion", "balance", "router_z"):
                options += [f"--{name.replace('_', '-')}", str(weights[name])]
            options.append("--train")
        return run_oracle("torch_preview.py", python, flags.folder, request, *options)
    ids = _prompt(flags, cfg)
    if flags.positions_from >= ids.shape[1]:
        raise CloverError(
            f"--positions-from is {flags.positions_from}: expected less than the "
            f"{ids.shape[1]} tokens"
        )
    if flags.against == "llama.cpp":
        return llama_trace(
            flags.folder, ids, type=flags.gguf_type, norms=flags.norms, first=flags.positions_from
        )
    options += ["--continuation", str(flags.continuation)]
    options += ["--positions-from", str(flags.positions_from)]
    return run_oracle("hf_trace.py", python, flags.folder, {"ids": ids}, *options)


def _endpoint(flags: Verify, url: str, cfg: ModelConfig, params: Params, tell: Any) -> int:
    """Compares a server's log-probabilities with ours."""
    tokenizer = Tokenizer.load(flags.folder)
    if flags.token_ids is None and flags.prompt is None:
        items = [tasks.eval_set(name, "val", 1)[0] for name in tasks.SCRATCHPAD_TASKS]
        prompts = [tokenizer.encode(item.prompt, special=False) for item in items]
    else:
        prompts = _prompt(flags, cfg).tolist()
    answers = []
    for i, prompt in enumerate(prompts):
        tell(f"the server answers {i + 1} of {len(prompts)}")
        answers.append(
            ask(
                url, prompt, tokenizer, model=flags.endpoint_model,
                max_tokens=max(1, flags.continuation), seconds=flags.timeout,
            )
        )  # fmt: skip
    with jax.default_matmul_precision(flags.precision):
        rows = compare_endpoint(cfg, params, answers, limit=flags.max_gap, progress=tell)
    ok = all(row.ok for row in rows)
    if flags.json:
        about = {"endpoint": url, "versions": versions(), "limit": flags.max_gap, "ok": ok}
        print(json.dumps({**about, "rows": [dataclasses.asdict(row) for row in rows]}))
    else:
        Console(highlight=False).print(endpoint_table(url, rows, flags.max_gap))
    return 0 if ok else 1


def _prompt(flags: Verify, cfg: ModelConfig) -> np.ndarray:
    """The rows of tokens: those that are given, or random ones."""
    if flags.token_ids is not None:
        ids = np.asarray([parse_token_ids(flags.token_ids)], np.int32)
    elif flags.prompt is not None:
        ids = np.asarray(
            [Tokenizer.load(flags.folder).encode(flags.prompt, special=True)], np.int32
        )
    else:
        rng = np.random.default_rng(flags.seed)
        ids = rng.integers(0, cfg.vocab_size, (flags.rows, flags.length)).astype(np.int32)
    _check_ids(ids, cfg, "the prompt")
    return ids


def _check_ids(ids: np.ndarray, cfg: ModelConfig, where: str) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < cfg.vocab_size):
        raise CloverError(
            f"{where} holds the id {ids.max() if ids.max() >= cfg.vocab_size else ids.min()}: "
            f"expected ids below vocab_size ({cfg.vocab_size})"
        )
    if ids.shape[1] > cfg.max_position_embeddings:
        raise CloverError(
            f"{where} has {ids.shape[1]} tokens: the context holds {cfg.max_position_embeddings}"
        )
    if not ids.shape[1]:
        raise CloverError(f"{where} is empty: expected at least one token")


def _preview_request(flags: Verify, cfg: ModelConfig) -> Tensors:
    rng = np.random.default_rng(flags.seed)
    draws = lambda n: rng.integers(0, cfg.vocab_size, (flags.rows, n)).astype(np.int32)
    ids, block = draws(flags.length), draws(cfg.block_length)
    masked = rng.random(block.shape) < MASKED_SHARE
    masked[:, 0] = True  # at least one
    return {"ids": ids, "block": block, "masked": masked.astype(np.uint8)}


def _training_request(flags: Verify, cfg: ModelConfig) -> Tensors:
    """A batch of random samples, some of them longer than a block."""
    rng = np.random.default_rng(flags.seed)
    prompt, most = max(1, flags.length // 3), max(1, flags.length - flags.length // 3)
    examples = [
        Example.single(
            i,
            rng.integers(0, cfg.vocab_size, prompt).tolist(),
            rng.integers(0, cfg.vocab_size, max(1, most - i)).tolist(),
        )
        for i in range(flags.rows)
    ]
    batch = make_batch(
        [(example,) for example in examples],
        time=prompt + most,
        blocks=-(-most // cfg.block_length),
        block=cfg.block_length,
        pad_id=0,
        seed=flags.seed,
        epoch=0,
        noise=NoiseConfig(),
    )
    forbidden = np.zeros(cfg.vocab_size, np.uint8)
    forbidden[cfg.mask_token_id] = 1
    # Targets that are forbidden would have infinite loss.
    weight = lambda ids, w: np.where(ids == cfg.mask_token_id, 0.0, w).astype(np.float32)
    batch = batch._replace(
        target_weight=weight(batch.tokens, batch.target_weight),
        block_weight=weight(batch.block_tokens, batch.block_weight),
        block_masked=batch.block_masked.astype(np.uint8),
    )
    known = {**batch._asdict(), "forbidden": forbidden}
    return {name: known[name] for name in TRAINING_REQUEST}


def logits(flags: Logits) -> int:
    """Writes our logits, and on request every tap, for anyone to compare; returns the status."""
    if not flags.folder.is_dir():
        raise CloverError(f"{flags.folder} is not a folder: expected a checkpoint folder")
    ids = np.asarray([parse_token_ids(flags.token_ids)], np.int32)
    _check_place(flags.out, "--out")
    keep_compiled_programs()
    cfg, params = load_with_bar(flags.folder, dtype=flags.dtype, norms=flags.norms)
    _check_ids(ids, cfg, "--token-ids")
    if not 0 <= flags.positions_from < ids.shape[1]:
        raise CloverError(
            f"--positions-from is {flags.positions_from}: expected 0 to {ids.shape[1] - 1}"
        )
    with jax.default_matmul_precision(flags.precision):
        tensors = our_trace(params, ids, taps=flags.taps, first=flags.positions_from, cfg=cfg)
    about = {"oracle": "clover logits", "dtype": cfg.dtype, "precision": flags.precision}
    write_trace(flags.out, tensors, {**about, **versions()})
    print(f"wrote {flags.out}: {len(tensors)} tensors, {flags.out.stat().st_size:,} bytes")
    return 0
