"""CWM (FAIR CodeGen Team 2025): Llama with windows on three of four layers."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.spec import ModelSpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
"""Default rotary embedding."""


def cwm(config: Config) -> ModelSpec:
    """The first layer and every fourth layer after it use full attention."""
    config = config.with_defaults(
        head_dim=128, max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=1e6
    ).with_absent(num_key_value_heads=8, sliding_window=8192)
    if "rope_scaling" not in config:
        config = config.with_defaults(rope_parameters=LLAMA3)
    return decoder(
        config,
        windows=layer_windows(
            config, sliding=lambda index: index % 4 != 0, window=config.integer_or_none("sliding_window")
        ),
        mlp_bias=config.flag("mlp_bias", default=False),
    )
