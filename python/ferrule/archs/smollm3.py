"""SmolLM3 (Bakouch et al. 2025): Llama without rotary embedding on every fourth layer."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.spec import ModelSpec


def smollm3(config: Config) -> ModelSpec:
    """If windows are enabled, the layers without rotary embedding have them."""
    config = config.with_defaults(max_position_embeddings=32_768, rope_theta=2e6).with_absent(num_key_value_heads=4)
    layers = config.layers
    interval = config.integer("no_rope_layer_interval", default=4)
    switches = config.integers("no_rope_layers", low=0, high=1)  # 1 means rotated, whatever the name says
    rotated = [switch == 1 for switch in switches] or [(index + 1) % interval != 0 for index in range(layers)]
    if len(rotated) != layers:
        raise config.error("no_rope_layers", f"a list of {layers} items, one for each layer")
    switched = config.flag("use_sliding_window", default=False)
    window = config.integer_or_none("sliding_window") if switched else None
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        windows=layer_windows(config, sliding=lambda i: window is not None and not rotated[i], window=window),
        rotated=rotated,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        tied=True,
    )
