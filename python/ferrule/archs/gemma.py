"""Gemma (Gemma Team 2024): Llama with a GELU gate, scaled embeddings and norms whose weights are offsets from 1."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Embedding, ModelSpec, RmsNorm


def gemma(config: Config) -> ModelSpec:
    """The first files say `gelu` and mean its tanh approximation."""
    config = config.with_defaults(head_dim=256, max_position_embeddings=8192).with_absent(num_key_value_heads=16)
    config.require(use_bidirectional_attention=False)
    activation = config.activation_named("hidden_act", default="gelu_pytorch_tanh")
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        norm=gemma_norm(config),
        qkv_bias=bias,
        output_bias=bias,
        ffn=Dense(config.integer("intermediate_size"), "gelu_tanh" if activation == "gelu" else activation),
        embedding=gemma_embedding(config),
        tied=True,
    )


def gemma_norm(config: Config) -> RmsNorm:
    """Norm weights are stored as offsets from 1."""
    return RmsNorm(config.number("rms_norm_eps", default=1e-6), weight_offset=1.0)


def gemma_embedding(config: Config) -> Embedding:
    """Embedding scaled by the square root of the hidden size."""
    return Embedding(scale=config.integer("hidden_size") ** 0.5)
