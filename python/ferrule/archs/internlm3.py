"""InternLM3 (Shanghai AI Laboratory 2025): Llama with other names for the bias switches."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import ModelSpec


def internlm3(config: Config) -> ModelSpec:
    """`bias` sets the bias of the output projection too."""
    config = config.spelled(attention_bias="qkv_bias", mlp_bias="bias").with_absent(num_key_value_heads=2)
    bias = config.flag("mlp_bias", default=False)
    return decoder(
        config.with_defaults(head_dim=128, max_position_embeddings=32_768, rms_norm_eps=1e-5),
        qkv_bias=config.flag("attention_bias", default=False),
        output_bias=bias,
        mlp_bias=bias,
    )
