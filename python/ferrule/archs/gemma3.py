"""Gemma 3 (Gemma Team 2025): Gemma 2 with query and key norms instead of soft caps, and two rotary embeddings."""

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.gemma import gemma_embedding, gemma_norm
from ferrule.archs.gemma2 import NORMS_AROUND
from ferrule.archs.rope import read_rope
from ferrule.archs.spec import Dense, HeadNorm, LmHead, ModelSpec, Rope


def gemma3(config: Config) -> ModelSpec:
    """Five of six layers have a window; EmbeddingGemma's windows are centred."""
    config = config.with_defaults(head_dim=256, max_position_embeddings=131_072).with_absent(
        num_key_value_heads=4, sliding_window=4096
    )
    window = config.integer_or_none("sliding_window")
    causal = not config.flag("use_bidirectional_attention", default=False)
    if not causal and window is not None:
        window = window // 2 + 1
    pattern = config.integer("sliding_window_pattern", default=6)
    activation = config.activation_named("hidden_activation", default="gelu_pytorch_tanh")
    bias = config.flag("attention_bias", default=False)
    norm = gemma_norm(config)
    spec = decoder(
        config,
        norm=norm,
        norms="around",
        windows=layer_windows(config, sliding=lambda index: (index + 1) % pattern != 0, window=window),
        rope_of=lambda layer_type: _rope(config, layer_type),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(norm),
        scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        ffn=Dense(config.integer("intermediate_size"), activation),
        embedding=gemma_embedding(config),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=True),
            softcap=config.number_or_none("final_logit_softcapping"),
        ),
        modules=NORMS_AROUND,
    )
    return replace(spec, causal=causal)


def _rope(config: Config, layer_type: str) -> Rope:
    """Old files give sliding layers a separate base and scale only the full-attention layers."""
    if layer_type == "sliding_attention":
        config = config.without("rope_theta", "rope_scaling").spelled(rope_theta="rope_local_base_freq")
        config = config.with_defaults(rope_theta=10_000.0)
    return read_rope(config.with_defaults(rope_theta=1e6), config.head_dim, layer_type)
