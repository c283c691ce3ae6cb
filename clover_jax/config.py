"""What is computed, as frozen, hashable, serialisable dataclasses.

Nothing here says where or how a model runs (that is `env.Env`), and no value has a default that a
released config file owns. Every point of Clover that no public source settles is one `Literal`
switch of `BDGDNConfig` or `CoresetConfig`; its default is our choice, so that the released files
settle it by a value.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from clover_jax.errors import CloverError

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Gated full attention (Qwen3.6 config.json: num_attention_heads, ...)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # head_dim * partial_rotary_factor; the other channels are not rotated
    rope_theta: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Gated DeltaNet (config.json: linear_num_key_heads, ...)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    chunk: int  # chunk length of the chunked form; every length gives the same function

    @property
    def conv_channels(self) -> int:
        """Channels q | k | v that pass the convolution."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_dim

    @property
    def value_dim(self) -> int:
        """Width of v and of the gate z."""
        return self.num_value_heads * self.value_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class BDGDNConfig:
    """The block operator of the GDN layers: formula in `model/bd_gdn.py`, switches here.

    Attributes:
        operator: `state_slot` is Clover (one softmax over history slot and block). Rivals:
            `causal` runs the base's recurrence inside the block, `two_direction` adds a second one
            from the right, `added` sums the state read and a block softmax of its own,
            `no_history` drops the slot.
        logit_scale: how the stored scale is read: as is, through exp, or through softplus.
        history_logit: `log_length` is bias + c·log(n); `read_norm` is bias + c·log(1 + |S^T q|).
        history_query: `unit` reads S with the l2-normalised q, `scaled` with the base's q/sqrt(d).
        block_value: `conv` takes v as is, `beta` takes beta·v.
        block_bias: `none`, or `decay` adds -|c_i - c_j| + log beta_j (c_i on the slot), the base's
            own decays and write strengths.
        empty_history: what happens to the slot at an empty prefix: it is kept, or dropped.
        right_conv: whether the right-hand taps are used.
        right_order: which tap multiplies the next row: the first (`next_first`) or the last.
    """

    operator: Literal["state_slot", "causal", "two_direction", "added", "no_history"] = "state_slot"
    logit_scale: Literal["plain", "exp", "softplus"] = "plain"
    history_logit: Literal["log_length", "read_norm"] = "log_length"
    history_query: Literal["unit", "scaled"] = "unit"
    block_value: Literal["conv", "beta"] = "conv"
    block_bias: Literal["none", "decay"] = "none"
    empty_history: Literal["keep", "drop"] = "keep"
    right_conv: bool = True
    right_order: Literal["next_first", "next_last"] = "next_first"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoresetConfig:
    """The block's shared expert subset, used in previews only.

    Attributes:
        top_p: share of the block's routing mass that the chosen experts must reach, in (0, 1].
        mass: what is pooled: `top_k` router weights outside a token's own top-k count as 0,
            `softmax` all of them.
        pool: over the block's valid rows: `sum`, or `max` (keeps one token's lonely specialist).
        frozen: a block that is decoded keeps the experts of its first step.
    """

    top_p: float
    mass: Literal["top_k", "softmax"] = "top_k"
    pool: Literal["sum", "max"] = "sum"
    frozen: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts of every layer (config.json: num_experts, num_experts_per_tok, ...)."""

    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    norm_topk_prob: bool
    coreset: CoresetConfig | None
    experts_per_layer: tuple[int, ...] | None = None  # pruned checkpoints: the first n ids exist


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Qwen3.6 / Clover text model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    full_attention_interval: int  # layer i is full attention iff (i + 1) % interval == 0
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float
    dtype: Literal["float32", "bfloat16"]
    attention: AttentionConfig
    delta: DeltaConfig
    moe: MoEConfig
    bd_gdn: BDGDNConfig | None  # None: an autoregressive base model, which cannot preview
    block_length: int
    mask_token_id: int | None
    logits_position: Literal["same", "shifted"]  # which position a preview's logits speak of

    def __post_init__(self) -> None:
        for where, name, value in _numbers(self):
            if isinstance(value, int) and not (name == "mask_token_id" or value >= 1):
                raise CloverError(f"config {where} is {value}: expected an integer of at least 1")
            if isinstance(value, float) and not (math.isfinite(value) and value > 0):
                raise CloverError(f"config {where} is {value}: expected a positive finite number")
        a, d, m = self.attention, self.delta, self.moe
        _require(
            self.num_layers % self.full_attention_interval == 0,
            "num_layers",
            self.num_layers,
            f"a multiple of full_attention_interval "
            f"({self.full_attention_interval}), since whole groups of layers are scanned",
        )
        _require(
            self.full_attention_interval >= 2,
            "full_attention_interval",
            self.full_attention_interval,
            "at least 2: a group is GDN layers and one attention",
        )
        _require(
            a.num_heads % a.num_kv_heads == 0,
            "attention.num_heads",
            a.num_heads,
            f"a multiple of num_kv_heads ({a.num_kv_heads})",
        )
        _require(
            a.rotary_dim % 2 == 0 and a.rotary_dim <= a.head_dim,
            "attention.rotary_dim",
            a.rotary_dim,
            f"an even number of at most head_dim ({a.head_dim})",
        )
        _require(
            d.num_value_heads % d.num_key_heads == 0,
            "delta.num_value_heads",
            d.num_value_heads,
            f"a multiple of num_key_heads ({d.num_key_heads})",
        )
        _require(d.conv_kernel >= 2, "delta.conv_kernel", d.conv_kernel, "at least 2")
        _require(
            m.top_k <= m.num_experts, "moe.top_k", m.top_k, f"at most num_experts ({m.num_experts})"
        )
        if m.coreset is not None:
            _require(m.coreset.top_p <= 1, "moe.coreset.top_p", m.coreset.top_p, "in (0, 1]")
        if m.experts_per_layer is not None:
            _require(
                len(m.experts_per_layer) == self.num_layers,
                "moe.experts_per_layer",
                m.experts_per_layer,
                f"one count for each of the {self.num_layers} layers",
            )
            _require(
                all(m.top_k <= n <= m.num_experts for n in m.experts_per_layer),
                "moe.experts_per_layer",
                m.experts_per_layer,
                f"counts between top_k ({m.top_k}) and num_experts ({m.num_experts})",
            )
        if self.mask_token_id is not None:
            _require(
                0 <= self.mask_token_id < self.vocab_size,
                "mask_token_id",
                self.mask_token_id,
                f"an id below vocab_size ({self.vocab_size})",
            )
        _require(
            self.bd_gdn is None or self.mask_token_id is not None,
            "mask_token_id",
            None,
            "an id, since a block-diffusion model denoises mask tokens",
        )

    @property
    def num_groups(self) -> int:
        """Scanned groups, each `full_attention_interval - 1` GDN layers and one attention layer."""
        return self.num_layers // self.full_attention_interval

    @property
    def linear_per_group(self) -> int:
        """GDN layers in a group."""
        return self.full_attention_interval - 1

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed; dotted names reach nested configs via `**{"a.b": x}`."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """Canonical JSON with the schema version."""
        return canonical_json(self)

    @property
    def hash(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    @staticmethod
    def from_json(text: str | bytes) -> "ModelConfig":
        """Strict inverse of `to_json`.

        Raises:
            CloverError: unknown or missing key, wrong type, other schema version, invalid value.
        """
        return from_canonical_json(text, ModelConfig)


def replace[T](config: T, **changes: Any) -> T:
    """`dataclasses.replace` that also takes dotted names of nested frozen configs."""
    flat: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        head, _, rest = name.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            flat[head] = value
    for head, inner in nested.items():
        flat[head] = replace(getattr(config, head), **inner)
    return dataclasses.replace(config, **flat)  # pyright: ignore[reportArgumentType]


def parse_setting(text: str) -> tuple[str, Any]:
    """(NAME, VALUE) of NAME=VALUE, with a JSON value or a bare word for a string.

    Raises:
        CloverError: no `=`.
    """
    name, sign, value = text.partition("=")
    if not sign:
        raise CloverError(f"setting is {text!r}: expected NAME=VALUE, such as seed=1")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def override[T](config: T, settings: Sequence[str]) -> T:
    """A copy of a config with `A.B=VALUE` settings applied, each a JSON value or a bare word.

    A nested config that is None is made from its defaults and the settings.

    Raises:
        CloverError: no `=`, an unknown name, or a value of the wrong type or range.
    """
    try:
        return _applied(config, settings)
    except msgspec.MsgspecError as error:
        last = error

    def fits(others: Sequence[str]) -> bool:
        try:
            _applied(config, others)
        except (msgspec.MsgspecError, CloverError):
            return False
        return True

    # Named is what the others fit without; settings may also fit only together.
    guilty = [t for i, t in enumerate(settings) if fits([*settings[:i], *settings[i + 1 :]])]
    names = ", ".join(map(repr, guilty or settings))
    raise CloverError(f"setting {names} does not fit: {last}") from None


def _applied[T](config: T, settings: Sequence[str]) -> T:
    """All settings at once: some are right only together."""
    kind = type(config)
    fields: Any = msgspec.to_builtins(config)
    for text in settings:
        path, read = parse_setting(text)
        *outer, last = path.split(".")
        at = fields
        for name in outer:
            if at.get(name, ...) is None:
                at[name] = {}
            at = at.get(name)
            if not isinstance(at, dict):
                raise CloverError(f"setting {text!r}: {kind.__name__} has no part {name!r}")
        at[last] = read
    _reject_unknown(fields, kind, "")
    return msgspec.convert(fields, kind)


def canonical_json(config: Any) -> str:
    """Sorted-key JSON of a config, with `schema_version` beside its fields."""
    fields = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(config)}
    return msgspec.json.encode(fields, order="deterministic").decode()


def from_canonical_json[T](text: str | bytes, kind: type[T]) -> T:
    """Strict inverse of `canonical_json` for the config class `kind`."""
    try:
        fields = msgspec.json.decode(text)
        if not isinstance(fields, dict):
            raise CloverError(f"{kind.__name__} is a {type(fields).__name__}: expected an object")
        version = fields.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise CloverError(
                f"{kind.__name__} has schema_version {version!r}: expected "
                f"{SCHEMA_VERSION}; write it again with this version of clover_jax"
            )
        _reject_unknown(fields, kind, "")
        return msgspec.convert(fields, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CloverError(f"{kind.__name__} JSON does not fit: {error}") from None


def _reject_unknown(fields: dict[str, Any], kind: type, where: str) -> None:
    known = {f.name: f.type for f in dataclasses.fields(kind)}
    for name, value in fields.items():
        if name not in known:
            raise CloverError(
                f"{kind.__name__} has no field {where}{name}: known fields are {', '.join(known)}"
            )
        inner = [
            t
            for t in (known[name], *getattr(known[name], "__args__", ()))
            if isinstance(t, type) and dataclasses.is_dataclass(t)
        ]
        if isinstance(value, dict) and inner:
            _reject_unknown(value, inner[0], f"{where}{name}.")


def _require(ok: bool, field: str, value: object, expected: str) -> None:
    if not ok:
        raise CloverError(f"config {field} is {value}: expected {expected}")


def _numbers(config: Any, prefix: str = "") -> list[tuple[str, str, int | float]]:
    found: list[tuple[str, str, int | float]] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found += _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((prefix + field.name, field.name, value))
    return found
