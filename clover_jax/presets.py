"""Named model configs."""

from clover_jax.config import (
    AttentionConfig,
    BDGDNConfig,
    CoresetConfig,
    DeltaConfig,
    ModelConfig,
    MoEConfig,
)
from clover_jax.errors import CloverError


def qwen36_35b_a3b() -> ModelConfig:
    """Qwen3.6-35B-A3B, the autoregressive base (its published config.json, text part)."""
    return ModelConfig(
        vocab_size=248320,
        hidden_size=2048,
        num_layers=40,
        full_attention_interval=4,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        initializer_range=0.02,
        dtype="bfloat16",
        attention=AttentionConfig(
            num_heads=16, num_kv_heads=2, head_dim=256, rotary_dim=64, rope_theta=1e7
        ),
        delta=DeltaConfig(
            num_key_heads=16,
            num_value_heads=32,
            key_head_dim=128,
            value_head_dim=128,
            conv_kernel=4,
            chunk=64,
        ),
        moe=MoEConfig(
            num_experts=256,
            top_k=8,
            intermediate=512,
            shared_intermediate=512,
            norm_topk_prob=True,
            coreset=None,
        ),
        bd_gdn=None,
        block_length=32,
        mask_token_id=None,
        logits_position="same",
    )


def clover_35b_a3b() -> ModelConfig:
    """Clover-35B-A3B: the base, plus the block operator, the coreset and a mask token.

    The mask id is the first spare row of the base's vocabulary (the released id was not reachable;
    a folder's config.json overrides it). Context 131,072 tokens by the release's README.
    """
    return qwen36_35b_a3b().replace(
        max_position_embeddings=131072,
        bd_gdn=BDGDNConfig(),
        mask_token_id=248077,
        **{"moe.coreset": CoresetConfig(top_p=0.9)},
    )


def clover_nano() -> ModelConfig:
    """The model that ships in the package: 8 layers, 32 experts top-4, trained on two CPU cores."""
    return clover_35b_a3b().replace(
        vocab_size=512,
        hidden_size=128,
        num_layers=8,
        max_position_embeddings=2048,
        dtype="float32",
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=16, rope_theta=1e4
        ),
        delta=DeltaConfig(
            num_key_heads=2,
            num_value_heads=4,
            key_head_dim=32,
            value_head_dim=32,
            conv_kernel=4,
            chunk=16,
        ),
        mask_token_id=5,
        **{
            "moe.num_experts": 32,
            "moe.top_k": 4,
            "moe.intermediate": 48,
            "moe.shared_intermediate": 64,
        },
    )


def clover_bench() -> ModelConfig:
    """17.6M parameters, for comparing speed with other frameworks: random weights, never trained.

    Twice as wide as nano: large enough that matmuls count, small enough for a CPU's caches.
    """
    return clover_nano().replace(
        vocab_size=4096,
        hidden_size=256,
        delta=DeltaConfig(
            num_key_heads=4,
            num_value_heads=8,
            key_head_dim=32,
            value_head_dim=32,
            conv_kernel=4,
            chunk=16,
        ),
        **{
            "moe.num_experts": 16,
            "moe.intermediate": 128,
            "moe.shared_intermediate": 128,
        },
    )


def clover_tiny() -> ModelConfig:
    """The model of the tests: one of each layer kind twice, odd sizes, block 8."""
    return clover_35b_a3b().replace(
        vocab_size=160,
        hidden_size=64,
        num_layers=8,
        max_position_embeddings=512,
        dtype="float32",
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=8, rope_theta=1e4
        ),
        delta=DeltaConfig(
            num_key_heads=2,
            num_value_heads=4,
            key_head_dim=16,
            value_head_dim=8,
            conv_kernel=4,
            chunk=8,
        ),
        block_length=8,
        mask_token_id=5,
        **{
            "moe.num_experts": 8,
            "moe.top_k": 2,
            "moe.intermediate": 32,
            "moe.shared_intermediate": 32,
        },
    )


PRESETS = {
    preset.__name__: preset
    for preset in (clover_35b_a3b, qwen36_35b_a3b, clover_nano, clover_bench, clover_tiny)
}


def named(name: str) -> ModelConfig:
    """The preset of that name.

    Raises:
        CloverError: there is none.
    """
    if name not in PRESETS:
        raise CloverError(f"preset is {name!r}: expected one of {', '.join(PRESETS)}")
    return PRESETS[name]()
