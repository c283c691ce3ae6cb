"""Holes in a block, filled by the sampler, with text on both sides.

What this architecture can do: tokens before a block are a causal prefix, and the positions of a
block see each other. So the right context of a hole is what follows it in its own block; text of
later blocks cannot be seen. A hole's length is known, one mask per token, and stop tokens cannot
fill it. A hole across a border of blocks is refused.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.diffusion import sampler
from clover_jax.diffusion.generate import Generator, Request
from clover_jax.diffusion.passes import ModelPasses
from clover_jax.diffusion.sampler import Loop
from clover_jax.diffusion.sampling_config import SamplerConfig, sampler_params
from clover_jax.errors import CloverError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Infill:
    """A block with holes.

    Attributes:
        prefix: all tokens before the block, at least one.
        tokens: of the block, from its first position; at most the model's block length. What
            follows them in the block is unknown to the model, too.
        masked: which of them are to be filled, whatever token stands there; at least one.

    Raises:
        CloverError: nothing is masked, or the lengths differ.
    """

    prefix: tuple[int, ...]
    tokens: tuple[int, ...]
    masked: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.masked) or not any(self.masked):
            raise CloverError(
                f"a block of {len(self.tokens)} tokens with masks {self.masked}: expected one flag "
                "per token, and at least one that is masked"
            )


@dataclasses.dataclass(frozen=True)
class Infilled:
    """A filled block.

    Attributes:
        tokens: as asked for, holes filled.
        confidences: of the filled tokens when they were revealed; None elsewhere.
        revealed_at: step of each filled token; -1 elsewhere.
        previews: denoising passes.
    """

    tokens: tuple[int, ...]
    confidences: tuple[float | None, ...]
    revealed_at: tuple[int, ...]
    previews: int


def hole_at(
    prompt: Sequence[int], response: Sequence[int], hole: tuple[int, int], *, block: int,
    fill: int | None,
) -> Infill:  # fmt: skip
    """The block of a response that has a hole, on the grid that starts at the response.

    Args:
        prompt: tokens before the response.
        response: all of its tokens, stop included.
        hole: (first, end) in the response.
        block: block length.
        fill: the tokens right of the hole are shown, and past the response's end, where the model
            was trained on pads, this one; None shows nothing right of the hole.

    Raises:
        CloverError: a hole that is empty, outside the response, or across a border of blocks.
    """
    first, end = hole
    if not 0 <= first < end <= len(response):
        raise CloverError(
            f"the hole is [{first}, {end}): expected at least one of the response's "
            f"{len(response)} tokens"
        )
    start = first - first % block
    if end > start + block:
        raise CloverError(
            f"the hole [{first}, {end}) crosses the border of blocks at {start + block}, and a "
            "block cannot see the next one: choose a hole inside a block"
        )
    tokens = list(response[start : end if fill is None else start + block])
    if fill is not None:
        tokens += [fill] * (block - len(tokens))
    masked = tuple(first <= start + i < end for i in range(len(tokens)))
    return Infill(prefix=(*prompt, *response[:start]), tokens=tuple(tokens), masked=masked)


def without_stops(generator: Generator) -> Generator:
    """The same model, which cannot end its answer: the length of a hole is known."""
    own = generator.variant()
    forbidden = np.array(own.rules.forbidden)
    stops = np.asarray(own.rules.stop_ids)
    forbidden[stops[stops >= 0]] = True
    # A stop among the known tokens ends nothing either.
    own.rules = own.rules._replace(
        forbidden=jnp.asarray(forbidden), stop_ids=jnp.full_like(own.rules.stop_ids, -1)
    )
    return own


def infill(
    generator: Generator, requests: Sequence[Infill], *, sampling: SamplerConfig, seed: int = 0
) -> list[Infilled]:
    """Fill blocks in one batch: the sampler's own steps from canvases that are partly known.

    Args:
        generator: a model with blocks.
        requests: one per row.
        sampling: threshold and the like, of all rows.
        seed: of the draws at temperatures above 0; row r is sample r.

    Raises:
        CloverError: a model without blocks, ids outside its vocabulary, a block that is too long
            or does not fit the context, blocks that may close early, or logits that are NaN.
    """
    cfg, block = generator.cfg, generator.cfg.block_length
    if cfg.bd_gdn is None:
        raise CloverError(
            "this is an autoregressive model (config bd_gdn is null): it sees nothing right of a "
            "hole; convert it with `clover checkpoint convert` and train it"
        )
    if not requests:
        raise CloverError("there is no hole: give at least one")
    if sampling.close != "resolved":
        raise CloverError(
            f"SamplerConfig close is {sampling.close!r}: expected 'resolved', the block of a hole "
            "cannot end before what is known to its right"
        )
    for request in requests:
        if len(request.tokens) > block:
            raise CloverError(
                f"{len(request.tokens)} tokens are given for a block of {block}: a block cannot "
                "see what follows it; leave out the rest"
            )
        outside = [i for i in request.tokens if not 0 <= i < cfg.vocab_size]
        if outside:
            raise CloverError(
                f"block ids {outside[:5]} are outside the vocabulary of {cfg.vocab_size}"
            )
        if len(request.prefix) + block > cfg.max_position_embeddings:
            raise CloverError(
                f"a prefix of {len(request.prefix)} tokens and a block of {block} do not fit the "
                f"context of {cfg.max_position_embeddings}: shorten the prefix"
            )
    loop = Loop(
        passes=ModelPasses(cfg, generator.env),
        structure=sampling.structure,
        block=block,
        by_row=generator.env.rows == "mapped",
    )
    rows = [
        Request(
            prompt=r.prefix, max_tokens=len(r.tokens), sampling=sampling, seed=seed, sample_index=i
        )
        for i, r in enumerate(requests)
    ]
    state, _ = generator.start(rows, loop)
    tokens = np.zeros((len(rows), block), np.int32)
    masked = np.ones((len(rows), block), bool)
    for r, request in enumerate(requests):
        tokens[r, : len(request.tokens)] = request.tokens
        masked[r, : len(request.masked)] = request.masked
    state = state._replace(
        canvas=state.canvas._replace(tokens=jnp.asarray(tokens), masked=jnp.asarray(masked))
    )
    rules = without_stops(generator).rules
    params = sampler_params([sampling] * len(rows))
    done = jax.device_get(sampler.generate(generator.params, state, params, rules, loop=loop))
    if (done.finish == sampler.ERROR).any():
        raise CloverError("the model's logits are NaN: damaged weights?")
    return [_infilled(r, request, done) for r, request in enumerate(requests)]


def _infilled(r: int, request: Infill, done: sampler.DecodeState) -> Infilled:
    n, canvas = len(request.tokens), done.canvas
    confidence = canvas.confidence[r, :n].tolist()
    return Infilled(
        tokens=tuple(canvas.tokens[r, :n].tolist()),
        confidences=tuple(
            c if masked else None for c, masked in zip(confidence, request.masked, strict=True)
        ),
        revealed_at=tuple(canvas.revealed_at[r, :n].tolist()),
        previews=int(done.counters.previews[r]),
    )
