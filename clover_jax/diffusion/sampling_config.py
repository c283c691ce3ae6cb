"""How a request is sampled: the checked host-side config, and its numbers as arrays.

`SamplerConfig` is what users write and folders store. Only its `structure` (policy, confidence
source) shapes a compiled program; every number travels in `SamplerParams`, one set per row, so
that sweeping a threshold, or mixing requests with other settings in one batch, never recompiles.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args, no_type_check

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clover_jax.errors import CloverError

Policy = Literal["low_confidence", "entropy", "margin", "leftmost"]
Confidence = Literal["processed", "raw"]
Close = Literal["resolved", "unsure", "verified"]

LARGEST = 1e6  # bound of every number: logits with any mix of penalties and ramps stay finite


# Both configs check their fields themselves and raise CloverError; no run-time checker comes first.
@no_type_check
@dataclasses.dataclass(frozen=True, kw_only=True)
class RampConfig:
    """A bias that grows with the position: min(slope · max(0, index - start), cap).

    Attributes:
        start: the last index without a bias, in tokens.
        slope: logits per token, at least 0.
        cap: largest bias in logits, None for no bound.
    """

    start: int
    slope: float
    cap: float | None = None

    def __post_init__(self) -> None:
        _check_int(self, "start", largest=2**30)
        _check_float(self, "slope", smallest=0.0)
        if self.cap is not None:
            _check_float(self, "cap", smallest=0.0)


class SamplerStructure(NamedTuple):
    """The static part of a `SamplerConfig`: what a compiled sampler depends on."""

    policy: Policy
    confidence: Confidence
    close: Close


@no_type_check
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """Settings of one request. The defaults are neutral but for the threshold.

    With `close`, a block need not wait until it is full: since a commit is a causal pass, it may
    end anywhere.

    Attributes:
        threshold: masked candidates with a confidence strictly above it are revealed together. A
            confidence is at most 1, so a threshold of 1 or more reveals exactly one position per
            step (with `steps`: exactly the schedule's); 0 reveals everything in one step.
        temperature: 0 takes the argmax; above 0 a token is drawn from softmax(P / temperature).
        top_k: draw among the k best ids only; 0 is off.
        top_p: then draw among the fewest ids that reach this share; 1 is off.
        presence: subtracted from the logit of every id the response already holds.
        frequency: subtracted once per occurrence in the response.
        repetition: divides positive and multiplies negative logits of ids the response holds.
        confidence: its distribution at temperature 1, untruncated: `processed` after penalties
            and ramps, `raw` before them (forbidden ids excluded in both).
        response_ramp: bias on the stop ids by index in the answer.
        thinking_ramp: bias on the close-thinking id by index in the thinking.
        policy: which positions come first where the threshold reveals too few: those of the
            highest confidence, of the lowest entropy of softmax(P) (Dream), of the largest margin
            between its two best tokens, or the leftmost.
        steps: previews in which a block is revealed at the latest: every step reveals at least an
            even share of the masks that are left. 0 is off: at least one position a step.
        window: only the leftmost so many positions of a block that are not all revealed are open,
            block after block inside the block (LLaDA's semi-autoregressive order), each with its
            share of the steps. 0 is off.
        close: when a block ends. `resolved`: when its last mask is revealed (the release).
            `unsure`: also before its first mask, where no confidence passes the threshold and
            another rule would have to pick one; the next block begins there, with what is revealed
            past it. `verified`: at the same moments, but all guesses are drafts of which the causal
            pass keeps what AR mode would have written (`speculative.py`): AR mode's text, in fewer
            forwards.

    Raises:
        CloverError: a field has the wrong type or lies outside its range.
    """

    threshold: float = 0.95
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    confidence: Confidence = "processed"
    response_ramp: RampConfig | None = None
    thinking_ramp: RampConfig | None = None
    policy: Policy = "low_confidence"
    steps: int = 0
    window: int = 0
    close: Close = "resolved"

    def __post_init__(self) -> None:
        _check_float(self, "threshold", smallest=0.0)
        _check_float(self, "temperature", smallest=0.0)
        _check_int(self, "top_k", largest=2**30)
        _check_float(self, "top_p", smallest=1 / LARGEST, largest=1.0)
        _check_int(self, "steps", largest=2**15)
        _check_int(self, "window", largest=2**15)
        _check_float(self, "presence", smallest=-LARGEST)
        _check_float(self, "frequency", smallest=-LARGEST)
        _check_float(self, "repetition", smallest=1 / LARGEST)
        for name, kind in (("confidence", Confidence), ("policy", Policy), ("close", Close)):
            value = getattr(self, name)
            if not (isinstance(value, str) and value in get_args(kind)):
                raise _invalid(self, name, "one of " + ", ".join(get_args(kind)))
        if self.close != "resolved" and (self.steps or self.window):
            raise CloverError(
                f"SamplerConfig close is {self.close!r} with steps {self.steps} and window "
                f"{self.window}: expected 0 for both, a schedule fills whole blocks"
            )
        for name in ("response_ramp", "thinking_ramp"):
            if not isinstance(getattr(self, name), RampConfig | None):
                raise _invalid(self, name, "a RampConfig or None")

    @property
    def structure(self) -> SamplerStructure:
        """The static part."""
        return SamplerStructure(self.policy, self.confidence, self.close)


def _check_float(
    config: Any, name: str, *, smallest: float = -LARGEST, largest: float = LARGEST
) -> None:
    """Check a number, and store it as a float."""
    value = getattr(config, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and smallest <= value <= largest):
        raise _invalid(config, name, f"a number between {smallest:g} and {largest:g}")
    object.__setattr__(config, name, float(value))


def _check_int(config: Any, name: str, *, largest: int) -> None:
    value = getattr(config, name)
    if not (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest):
        raise _invalid(config, name, f"an integer between 0 and {largest}")


def _invalid(config: Any, name: str, expected: str) -> CloverError:
    kind = type(config).__name__
    return CloverError(f"{kind} {name} is {getattr(config, name)!r}: expected {expected}")


class RampParams(NamedTuple):
    """A `RampConfig` per row; no ramp is slope 0, no cap is infinity."""

    start: Int[Array, " rows"]
    slope: Float[Array, " rows"]
    cap: Float[Array, " rows"]


class SamplerParams(NamedTuple):
    """The numbers of one `SamplerConfig` per row, as float32 and int32 arrays.

    A NamedTuple, since a dataclass with checked shapes cannot be mapped over its rows.
    """

    threshold: Float[Array, " rows"]
    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    presence: Float[Array, " rows"]
    frequency: Float[Array, " rows"]
    repetition: Float[Array, " rows"]
    response_ramp: RampParams
    thinking_ramp: RampParams
    steps: Int[Array, " rows"]
    window: Int[Array, " rows"]


def sampler_params(configs: Sequence[SamplerConfig]) -> SamplerParams:
    """One row of `SamplerParams` per config.

    Raises:
        CloverError: no config, or their structures differ, so that no one program serves them.
    """
    if len({config.structure for config in configs}) != 1:
        found = ", ".join(sorted({str(config.structure) for config in configs})) or "none"
        raise CloverError(
            f"the rows of a batch have these sampler structures: {found}; expected exactly one; "
            "put requests with another policy, confidence or close into a batch of their own"
        )

    def floats(name: str) -> Array:
        return jnp.asarray([getattr(config, name) for config in configs], jnp.float32)

    return SamplerParams(
        threshold=floats("threshold"),
        temperature=floats("temperature"),
        top_k=jnp.asarray([config.top_k for config in configs], jnp.int32),
        top_p=floats("top_p"),
        presence=floats("presence"),
        frequency=floats("frequency"),
        repetition=floats("repetition"),
        response_ramp=_ramp_params([config.response_ramp for config in configs]),
        thinking_ramp=_ramp_params([config.thinking_ramp for config in configs]),
        steps=jnp.asarray([config.steps for config in configs], jnp.int32),
        window=jnp.asarray([config.window for config in configs], jnp.int32),
    )


def _ramp_params(ramps: Sequence[RampConfig | None]) -> RampParams:
    given = [ramp or RampConfig(start=0, slope=0.0) for ramp in ramps]
    caps = [math.inf if ramp.cap is None else ramp.cap for ramp in given]
    return RampParams(
        start=jnp.asarray([ramp.start for ramp in given], jnp.int32),
        slope=jnp.asarray([ramp.slope for ramp in given], jnp.float32),
        cap=jnp.asarray(caps, jnp.float32),
    )


# Field of SamplerConfig -> key of generation_config.json. What has no common key there lies in an
# object of its own under "clover", by field name.
_COMMON = {
    "top_k": "top_k",
    "top_p": "top_p",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
    "repetition": "repetition_penalty",
}
_OWN = (
    "threshold", "confidence", "policy", "response_ramp", "thinking_ramp", "steps", "window",
    "close",
)  # fmt: skip


def from_generation_config(fields: object) -> SamplerConfig:
    """Read the sampling settings of a folder's generation_config.json.

    Temperature is 0 where `do_sample` is false; else `temperature` as given, and without one 1 if
    `do_sample` is true and 0 if it is absent. Absent and null keys are neutral; other libraries'
    keys are ignored, unknown ones inside `clover` are not.

    Args:
        fields: the decoded JSON object.

    Raises:
        CloverError: wrong type, value out of range, or unknown key inside `clover`.
    """
    given = _object(fields, "generation_config.json", None)
    own = _object(given.get("clover", {}), "generation_config.json clover", set(_OWN))
    do_sample = given.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise CloverError(
            f"generation_config.json do_sample is {do_sample!r}: expected true or false"
        )
    values = {name: given[key] for name, key in _COMMON.items() if key in given} | own
    for name in ("response_ramp", "thinking_ramp"):
        if name in values:
            values[name] = _read_ramp(values[name], name)
    temperature = given.get("temperature", 1.0 if do_sample else 0.0)
    config = SamplerConfig(**values, temperature=temperature)  # checked even if unused
    return dataclasses.replace(config, temperature=0.0) if do_sample is False else config


def to_generation_config(config: SamplerConfig) -> dict[str, Any]:
    """Inverse of `from_generation_config`: every key that this package reads."""
    sampling = {"temperature": config.temperature} if config.temperature > 0 else {}
    fields = dataclasses.asdict(config)
    return {
        "do_sample": bool(sampling),
        **sampling,
        **{key: fields[name] for name, key in _COMMON.items()},
        "clover": {name: fields[name] for name in _OWN},
    }


def _read_ramp(value: object, name: str) -> RampConfig:
    where = f"generation_config.json clover.{name}"
    ramp = _object(value, where, {"start", "slope", "cap"})
    missing = {"start", "slope"} - ramp.keys()
    if missing:
        raise CloverError(f"{where} is {value!r}: expected also {', '.join(sorted(missing))}")
    return RampConfig(**ramp)


def _object(value: object, where: str, known: set[str] | None) -> dict[str, Any]:
    """A JSON object without its null members; `known`, if given, lists the allowed keys."""
    if not isinstance(value, dict):
        raise CloverError(f"{where} is {value!r}: expected a JSON object")
    unknown = value.keys() - known if known is not None else set()
    if unknown:
        raise CloverError(
            f"{where} has the unknown key {', '.join(sorted(map(str, unknown)))}: "
            f"expected {', '.join(sorted(known or ()))}"
        )
    return {key: item for key, item in value.items() if item is not None}
