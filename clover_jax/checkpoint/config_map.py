"""config.json of a Hugging Face folder <-> `ModelConfig`.

Text settings are those of `text_config` if there is one, else the root's. What no released file
fixes (block length, mask token, coreset, switches of the block operator) lies under one key,
`clover`. A key that is read must have the right type and a sane value; a key that is not read is
reported; a value that asks for maths that is not here is an error.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from clover_jax.checkpoint.json_text import show
from clover_jax.config import (
    AttentionConfig,
    BDGDNConfig,
    CoresetConfig,
    DeltaConfig,
    ModelConfig,
    MoEConfig,
)
from clover_jax.errors import CloverError
from clover_jax.presets import clover_35b_a3b, qwen36_35b_a3b

CLOVER_TYPE = "clover_moe"
MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text", CLOVER_TYPE)
DTYPES = ("float32", "bfloat16")
TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Keys that change nothing here.
IGNORED_KEYS = {
    *TOKEN_ID_KEYS,
    *("_name_or_path", "architectures", "auto_map", "transformers_version", "use_cache"),
    *("attention_dropout", "output_router_logits", "router_aux_loss_coef", "mamba_ssm_dtype"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    *("vision_config", "vision_start_token_id", "vision_end_token_id"),
    *("image_token_id", "video_token_id"),
}
# Keys with only one value that the model here computes; absent means this value.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "num_shared_experts": 1,
    "quantization_config": None,
    "rope_scaling": None,
}
# Of both levels the text's counts.
SHARED_KEYS = (
    *("dtype", "torch_dtype", "tie_word_embeddings", "mask_token_id", "clover"),
    "quantization_config",
)
CLOVER_KEYS = ("block_length", "mask_token_id", "chunk", "logits_position", "coreset", "bd_gdn")

# Sizes past these are damage; they bound what a file can make us build.
MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 1024
MAX_EXPERTS = 4096

_REQUIRED = object()


class ConfigReading(NamedTuple):
    """The config, or what is wrong with it, and the keys that nothing reads."""

    config: ModelConfig | None
    problems: tuple[str, ...]
    unknown_keys: tuple[str, ...]


class _Reader:
    """Takes typed values out of an object, remembering problems and which keys were taken.

    After a problem a method returns a stand-in, and the whole reading is thrown away.
    """

    def __init__(self, fields: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self.fields, self.where, self.problems = fields, where, problems
        self.taken: set[str] = set()
        self.children: list[_Reader] = []

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        self.taken.add(key)
        value = self.fields.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.problems.append(f"{self.where}{key} is missing")
        return default

    def reject(self, key: str, value: object, expected: str) -> None:
        self.problems.append(f"{self.where}{key} is {show(value)}: expected {expected}")

    def integer(
        self, key: str, default: Any = _REQUIRED, *, low: int = 1, high: int = MAX_INTEGER
    ) -> Any:
        value = self.get(key, default)
        if value is _REQUIRED or value is None:
            return 1 if value is _REQUIRED else None
        if type(value) is not int or not low <= value <= high:
            self.reject(key, value, f"an integer from {low} to {high}")
            return 1
        return value

    def number(self, key: str, default: Any = _REQUIRED, *, high: float = 1e30) -> float:
        value = self.get(key, default)
        if value is _REQUIRED:
            return 1.0
        if type(value) not in (int, float) or not 0 < value <= high:  # NaN fails too
            self.reject(key, value, f"a number above 0, at most {high:g}")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.reject(key, value, "true or false")
            return default
        return value

    def choice(self, key: str, choices: Sequence[str], default: Any = _REQUIRED) -> str:
        value = self.get(key, default)
        if isinstance(value, str) and value in choices:
            return value
        if value is not _REQUIRED:
            self.reject(key, value, f"one of {', '.join(choices)}")
        return choices[0]

    def child(self, key: str) -> "_Reader":
        value = self.get(key, {})
        if not isinstance(value, dict):
            self.reject(key, value, "an object")
            value = {}
        self.children.append(_Reader(value, f"{self.where}{key}.", self.problems))
        return self.children[-1]

    def unknown(self) -> list[str]:
        own = [f"{self.where}{k}" for k in self.fields if k not in self.taken | IGNORED_KEYS]
        return own + [key for child in self.children for key in child.unknown()]


def read_config(root: object, dtype: Literal["float32", "bfloat16"] | None = None) -> ConfigReading:
    """Reads the parsed JSON of a config.json. Every problem is listed, none raised.

    Args:
        root: the JSON value.
        dtype: the dtype to load in; None: the file's.
    """
    problems: list[str] = []
    if not isinstance(root, dict):
        return ConfigReading(None, (f"it holds {show(root)}: expected an object",), ())
    outer = _Reader(root, "", problems)
    text = _text_level(outer)
    levels = [text] if text is outer else [outer, text]
    model_types = [level.choice("model_type", MODEL_TYPES) for level in levels]
    if problems:  # a model of another kind: what else it lacks says nothing
        return ConfigReading(None, tuple(problems), ())
    is_clover = CLOVER_TYPE in model_types
    for key, value in FIXED.items():
        given = text.get(key, value)
        if given != value or type(given) is not type(value):
            expected = "nothing" if value is None else show(value).lower()
            text.reject(key, given, f"{expected}; no other value is supported")

    attention = _attention(text)
    num_layers = text.integer("num_hidden_layers", high=MAX_LAYERS)
    fields: dict[str, Any] = {
        "vocab_size": text.integer("vocab_size"),
        "hidden_size": text.integer("hidden_size"),
        "num_layers": num_layers,
        "full_attention_interval": _interval(text, num_layers),
        "rms_norm_eps": text.number("rms_norm_eps", high=1.0),
        "max_position_embeddings": text.integer("max_position_embeddings"),
        "tie_word_embeddings": text.flag("tie_word_embeddings", False),
        "initializer_range": text.number("initializer_range", 0.02),
        "dtype": _dtype(text, dtype),
    }
    clover = _clover(text, is_clover)
    delta = {
        "num_key_heads": text.integer("linear_num_key_heads"),
        "num_value_heads": text.integer("linear_num_value_heads"),
        "key_head_dim": text.integer("linear_key_head_dim"),
        "value_head_dim": text.integer("linear_value_head_dim"),
        "conv_kernel": text.integer("linear_conv_kernel_dim", low=2, high=64),
        "chunk": clover.pop("chunk"),
    }
    moe = {
        "num_experts": text.integer("num_experts", high=MAX_EXPERTS),
        "top_k": text.integer("num_experts_per_tok"),
        "intermediate": text.integer("moe_intermediate_size"),
        "shared_intermediate": text.integer("shared_expert_intermediate_size"),
        "norm_topk_prob": text.flag("norm_topk_prob", True),
        "coreset": clover.pop("coreset"),
        "experts_per_layer": _experts_per_layer(text),
    }
    unknown = outer.unknown()
    if problems:
        return ConfigReading(None, tuple(problems), tuple(unknown))
    try:
        config = ModelConfig(
            attention=AttentionConfig(**attention),
            delta=DeltaConfig(**delta),
            moe=MoEConfig(**moe),
            **fields,
            **clover,
        )
    except CloverError as error:
        return ConfigReading(None, (str(error),), tuple(unknown))
    return ConfigReading(config, (), tuple(unknown))


def config_from_hf(
    root: object, dtype: Literal["float32", "bfloat16"] | None = None
) -> ModelConfig:
    """The model of a parsed config.json.

    Raises:
        CloverError: names everything that is missing, wrong or unsupported.
    """
    reading = read_config(root, dtype)
    if reading.config is None:
        raise CloverError("config.json does not fit: " + "; ".join(reading.problems))
    return reading.config


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """A flat config.json; `config_from_hf` gives back the same config."""
    a, d, m = cfg.attention, cfg.delta, cfg.moe
    half = a.rotary_dim // 2
    sections = [half - (half + 1) // 3 - half // 3, (half + 1) // 3, half // 3]
    kind = ("CloverMoeModelLM", CLOVER_TYPE)
    if cfg.bd_gdn is None:
        kind = ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")
    content = {
        "architectures": [kind[0]],
        "model_type": kind[1],
        "dtype": cfg.dtype,
        **{key: value for key, value in FIXED.items() if value is not None},
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "full_attention_interval": cfg.full_attention_interval,
        "layer_types": _layer_types(cfg.num_layers, cfg.full_attention_interval),
        "rms_norm_eps": cfg.rms_norm_eps,
        "max_position_embeddings": cfg.max_position_embeddings,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "initializer_range": cfg.initializer_range,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": a.rope_theta,
            "partial_rotary_factor": a.rotary_dim / a.head_dim,
            "mrope_section": sections,
            "mrope_interleaved": True,
        },
        "linear_num_key_heads": d.num_key_heads,
        "linear_num_value_heads": d.num_value_heads,
        "linear_key_head_dim": d.key_head_dim,
        "linear_value_head_dim": d.value_head_dim,
        "linear_conv_kernel_dim": d.conv_kernel,
        "mamba_ssm_dtype": "float32",
        "num_experts": m.num_experts,
        "num_experts_per_tok": m.top_k,
        "moe_intermediate_size": m.intermediate,
        "shared_expert_intermediate_size": m.shared_intermediate,
        "norm_topk_prob": m.norm_topk_prob,
        "clover": {
            "block_length": cfg.block_length,
            "mask_token_id": cfg.mask_token_id,
            "chunk": d.chunk,
            "logits_position": cfg.logits_position,
            "coreset": None if m.coreset is None else dataclasses.asdict(m.coreset),
            "bd_gdn": None if cfg.bd_gdn is None else dataclasses.asdict(cfg.bd_gdn),
        },
    }
    if m.experts_per_layer is not None:
        content["num_experts_per_layer"] = list(m.experts_per_layer)
    return content


def _text_level(outer: _Reader) -> _Reader:
    """The level with the text settings; shared keys of the root stand in where it lacks them."""
    if "text_config" not in outer.fields:
        return outer
    text = outer.child("text_config")
    shared = {k: outer.fields[k] for k in SHARED_KEYS if k in outer.fields}
    outer.taken |= shared.keys()
    tied = [f["tie_word_embeddings"] for f in (shared, text.fields) if "tie_word_embeddings" in f]
    if len(tied) == 2 and tied[0] != tied[1]:
        text.reject("tie_word_embeddings", tied[1], f"{show(tied[0])} as at the root")
    text.fields = {"model_type": outer.fields.get("model_type"), **shared, **text.fields}
    return text


def _attention(text: _Reader) -> dict[str, Any]:
    before = len(text.problems)
    rope = text.child("rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        rope.reject("rope_type", kind, "default; no other rotary embedding is supported")
    rope.taken |= {"mrope_section", "mrope_interleaved"}  # text has one position per token
    values = {}
    for key, high in (("rope_theta", 1e30), ("partial_rotary_factor", 1.0)):
        inner, outer = rope.get(key, None), text.get(key, None)
        values[key] = (text if inner is None else rope).number(key, high=high)
        if None not in (inner, outer) and inner != outer:
            text.reject(key, outer, f"{show(inner)} as in rope_parameters")
    head_dim = text.integer("head_dim")
    rotary = head_dim * values["partial_rotary_factor"]
    whole = abs(rotary - round(rotary)) < 1e-6 and round(rotary) % 2 == 0 and rotary > 1
    if not whole and len(text.problems) == before:
        what = f"head_dim {head_dim} times partial_rotary_factor {values['partial_rotary_factor']}"
        text.problems.append(f"{what} is {rotary:g}: expected an even number of rotated channels")
    return {
        "num_heads": text.integer("num_attention_heads"),
        "num_kv_heads": text.integer("num_key_value_heads"),
        "head_dim": head_dim,
        "rotary_dim": round(rotary),
        "rope_theta": values["rope_theta"],
    }


def _interval(text: _Reader, num_layers: int) -> int:
    """From full_attention_interval, layer_types or both; they must say the same."""
    kinds = text.get("layer_types", None)
    if kinds is None:
        return text.integer("full_attention_interval", low=2)
    ok = isinstance(kinds, list) and "full_attention" in kinds
    first = kinds.index("full_attention") + 1 if ok else 1
    interval = text.integer("full_attention_interval", first if first >= 2 else 2, low=2)
    layers_known = text.fields.get("num_hidden_layers") == num_layers
    if layers_known and kinds != _layer_types(num_layers, interval):
        expected = f"num_hidden_layers ({num_layers}) kinds, linear_attention but every "
        expected += f"{interval}th (full_attention_interval) full_attention"
        text.reject("layer_types", kinds, f"{expected}; no other order is supported")
    return interval


def _layer_types(num_layers: int, interval: int) -> list[str]:
    return [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)
    ]


def _dtype(text: _Reader, asked: str | None) -> str:
    if asked is not None:
        text.taken |= {"dtype", "torch_dtype"}
        return asked
    key = "dtype" if text.fields.get("dtype") is not None else "torch_dtype"
    text.taken |= {"dtype", "torch_dtype"}
    if text.fields.get(key) is None:
        text.problems.append("dtype is missing (ask for one to load the folder all the same)")
        return DTYPES[0]
    return text.choice(key, DTYPES)


def _experts_per_layer(text: _Reader) -> tuple[int, ...] | None:
    counts = text.get("num_experts_per_layer", None)
    if counts is None:
        return None
    if not isinstance(counts, list) or not all(
        type(n) is int and 1 <= n <= MAX_EXPERTS for n in counts
    ):
        text.reject("num_experts_per_layer", counts, "a list with one count per layer")
        return None
    return tuple(counts)


def _clover(text: _Reader, is_clover: bool) -> dict[str, Any]:
    """The settings under `clover`; what it lacks is the preset's."""
    preset = clover_35b_a3b() if is_clover else qwen36_35b_a3b()
    own = text.child("clover")
    for key in sorted(own.fields.keys() - set(CLOVER_KEYS)):  # a misspelt switch changes the model
        own.problems.append(f"{own.where}{key} is unknown: expected {', '.join(CLOVER_KEYS)}")
    mask = text.integer("mask_token_id", None, low=0)
    values = {
        "block_length": own.integer("block_length", preset.block_length),
        "chunk": own.integer("chunk", preset.delta.chunk),
        "logits_position": own.choice(
            "logits_position", ("same", "shifted"), preset.logits_position
        ),
        "coreset": _section(own, "coreset", CoresetConfig, preset.moe.coreset),
        "bd_gdn": _section(own, "bd_gdn", BDGDNConfig, preset.bd_gdn),
        "mask_token_id": own.integer(
            "mask_token_id", preset.mask_token_id if mask is None else mask, low=0
        ),
    }
    if mask is not None and values["mask_token_id"] != mask:
        text.reject("mask_token_id", mask, f"{values['mask_token_id']} as in clover")
    if not is_clover and values["bd_gdn"] is not None:
        own.reject("bd_gdn", own.fields["bd_gdn"], f"null unless model_type is {CLOVER_TYPE}")
    return values


def _section[T](own: _Reader, key: str, kind: type[T], default: T | None) -> T | None:
    """A nested config: absent means the default, null means none."""
    if key not in own.fields:
        return default
    value = own.get(key, None)
    if value is None:
        return None
    names = [f.name for f in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    if not isinstance(value, dict) or not value.keys() <= set(names):
        own.reject(key, value, f"null or an object of {', '.join(names)}")
        return None
    try:
        section = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        own.problems.append(f"{own.where}{key}: {error}")
        return None
    if isinstance(section, CoresetConfig) and not 0 < section.top_p <= 1:
        own.reject(f"{key}.top_p", section.top_p, "a share in (0, 1]")
    return section
