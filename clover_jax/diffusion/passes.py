"""What a decode loop asks of a model."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array

from clover_jax.config import ModelConfig
from clover_jax.diffusion.decode_state import Canvas
from clover_jax.env import Env
from clover_jax.model import transformer
from clover_jax.model.stack import StackStats


@runtime_checkable
class Passes(Protocol):
    """What the loop asks of a model. `step` is for scripted models; a real one ignores it."""

    def commit(self, params: Any, tokens: Array, n_valid: Array, cache: Any) -> Any:
        """Causal pass that appends tokens; returns the cache."""
        ...

    def preview(
        self, params: Any, canvas: Canvas, n_valid: Array, cache: Any, step: Array
    ) -> tuple[Array, StackStats | None]:
        """Logits [rows, block, vocab] of the canvas."""
        ...

    def commit_and_preview(
        self, params: Any, tokens: Array, n_commit: Array, canvas: Canvas, n_valid: Array,
        cache: Any, step: Array,
    ) -> tuple[Any, Array, StackStats | None]:  # fmt: skip
        """Both in one pass."""
        ...

    def next_logits(self, params: Any, cache: Any) -> Array:
        """Causal logits [rows, vocab] of the token after the prefix."""
        ...

    def verify(self, params: Any, tokens: Array, n_valid: Array, cache: Any) -> tuple[Any, Array]:
        """The cache with nothing committed, and causal logits [rows, block + 1, vocab] of each
        token and of the one after the last."""
        ...


@dataclasses.dataclass(frozen=True)
class ModelPasses:
    """The passes of a real model."""

    cfg: ModelConfig
    env: Env

    def commit(self, params: Any, tokens: Array, n_valid: Array, cache: Any) -> Any:
        """See `Passes`."""
        return transformer.extend(params, tokens, n_valid, cache, cfg=self.cfg, env=self.env).cache

    def preview(
        self, params: Any, canvas: Canvas, n_valid: Array, cache: Any, step: Array
    ) -> tuple[Array, StackStats | None]:
        """See `Passes`."""
        return transformer.preview(
            params, canvas.tokens, canvas.masked, n_valid, cache,
            cfg=self.cfg, env=self.env, coreset=canvas.coreset,
        )  # fmt: skip

    def commit_and_preview(
        self, params: Any, tokens: Array, n_commit: Array, canvas: Canvas, n_valid: Array,
        cache: Any, step: Array,
    ) -> tuple[Any, Array, StackStats | None]:  # fmt: skip
        """See `Passes`."""
        clean = transformer.CleanInput(tokens, n_commit)
        return transformer.commit_and_preview(
            params, clean, canvas.tokens, canvas.masked, n_valid, cache,
            cfg=self.cfg, env=self.env, coreset=canvas.coreset,
        )  # fmt: skip

    def next_logits(self, params: Any, cache: Any) -> Array:
        """See `Passes`."""
        return transformer.next_token_logits(params, cache, env=self.env)

    def verify(self, params: Any, tokens: Array, n_valid: Array, cache: Any) -> tuple[Any, Array]:
        """See `Passes`."""
        out = transformer.extend(
            params, tokens, n_valid, cache, cfg=self.cfg, env=self.env, logits="all"
        )
        first = transformer.next_token_logits(params, cache, env=self.env)
        # Cells past a row's length do not matter: the pass may write them in place.
        cache = cache._replace(k=out.cache.k, v=out.cache.v)
        return cache, jnp.concatenate([first[:, None], out.logits], axis=1)
