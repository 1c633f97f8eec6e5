"""BitNet b1.58 (Microsoft 2025): Llama with squared ReLU, and with a norm before each projection back."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, ModelSpec, RmsNorm


def bitnet(config: Config) -> ModelSpec:
    """Weights are those of the bf16 checkpoints; packed ternary weights are not supported."""
    if "quantization_config" in config:
        raise config.unsupported("quantization_config", "missing, as in the bf16 checkpoints")
    config = config.with_defaults(
        hidden_act="relu2", max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=500_000.0
    ).with_absent(num_key_value_heads=5)
    norm = RmsNorm(config.number("rms_norm_eps"))
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        norm=norm,
        qkv_bias=bias,
        output_bias=bias,
        output_norm=norm,
        ffn=Dense(config.integer("intermediate_size"), config.activation, inner_norm=norm),
        modules={
            "attention.output_norm": "model.layers.{layer}.self_attn.attn_sub_norm",
            "ffn.inner_norm": "model.layers.{layer}.mlp.ffn_sub_norm",
        },
    )
