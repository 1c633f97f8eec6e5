"""StarCoder 2 (Lozhkov et al. 2024): grouped-query attention, layer norms, biases, and one window for all layers."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, LayerNorm, ModelSpec


def starcoder2(config: Config) -> ModelSpec:
    """A null or missing `sliding_window` means full attention."""
    config = config.with_defaults(hidden_act="gelu_pytorch_tanh", num_key_value_heads=2, max_position_embeddings=4096)
    bias = config.flag("use_bias", default=True)
    window = config.integer("sliding_window") if "sliding_window" in config else None
    block = "model.layers.{layer}"
    return decoder(
        config,
        norm=LayerNorm(config.number("norm_epsilon", default=1e-5)),
        windows=[window] * config.layers,
        qkv_bias=bias,
        output_bias=bias,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=bias),
        tied=True,
        modules={"ffn.up": f"{block}.mlp.c_fc", "ffn.down": f"{block}.mlp.c_proj"},
    )
