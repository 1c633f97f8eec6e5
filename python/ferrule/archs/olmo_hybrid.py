"""OLMo hybrid (OLMo Team 2026): gated delta nets with norms before the blocks, and OLMo 2's attention layers."""

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.qwen3_next import attending_layers, read_delta_net
from ferrule.archs.rope import DEFAULT_THETA, rope_parameters
from ferrule.archs.spec import HeadNorm, ModelSpec, RmsNorm
from ferrule.archs.tensors import joined

_LAYER = "model.layers.{layer}"
_DELTA_NET_EPS = 1e-5
"""Epsilon of the norm of a delta net's output, which config.json does not hold."""


def olmo_hybrid(config: Config) -> ModelSpec:
    """A rope_theta of null means no rotary embedding."""
    config = config.with_defaults(
        max_position_embeddings=65_536,
        rms_norm_eps=1e-6,
        linear_num_key_heads=config.heads,
        linear_num_value_heads=config.heads,
    )
    width = int(0.75 * config.integer("hidden_size") / config.integer("linear_num_key_heads"))
    config = config.with_defaults(linear_key_head_dim=width)
    config = config.with_defaults(linear_value_head_dim=2 * config.integer("linear_key_head_dim"))
    bias = config.flag("attention_bias", default=False)
    doubled = config.flag("linear_allow_neg_eigval", default=True)
    delta_net = replace(read_delta_net(config), norm=RmsNorm(_DELTA_NET_EPS), update_scale=2.0 if doubled else 1.0)
    attending = attending_layers(config, interval=4)
    if not attending:
        if "layer_types" in config:
            raise config.error("layer_types", "a list with at least one full_attention")
        attending = [config.layers - 1]  # in a short model, the last layer
    norm = RmsNorm(config.number("rms_norm_eps"))
    thetas = {"rope_theta": DEFAULT_THETA, **config.values, **rope_parameters(config).values}
    at = f"{_LAYER}.linear_attn"
    return decoder(
        config,
        norms=["after" if index in attending else "before" for index in range(config.layers)],
        rotated=thetas["rope_theta"] is not None,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(norm, over="heads"),
        mixers={index: delta_net for index in range(config.layers) if index not in attending},
        modules={
            "attention_post_norm": f"{_LAYER}.post_attention_layernorm",
            "ffn_post_norm": f"{_LAYER}.post_feedforward_layernorm",
            "delta_net_norm": f"{_LAYER}.attention_layer_norm",
            "ffn_norm": f"{_LAYER}.feedforward_layer_norm",
            "delta_net.q": f"{at}.q_proj",
            "delta_net.k": f"{at}.k_proj",
            "delta_net.v": f"{at}.v_proj",
            "delta_net.gate": f"{at}.g_proj",
            "delta_net.factor": f"{at}.b_proj",
            "delta_net.decay": f"{at}.a_proj",
            **joined("delta_net.kernel", f"{at}.q_conv1d", f"{at}.k_conv1d", f"{at}.v_conv1d"),
            "delta_net.decay_log.weight": f"{at}.A_log",
            "delta_net.decay_bias.weight": f"{at}.dt_bias",
            "delta_net.norm": f"{at}.o_norm",
            "delta_net.output": f"{at}.o_proj",
        },
        alternatives={
            # transformers writes the norm of attention layers under the name that delta nets have for another.
            "attention_post_norm": f"{_LAYER}.feedforward_layer_norm",
            "delta_net_norm": f"{_LAYER}.input_layernorm",
            "ffn_norm": f"{_LAYER}.post_attention_layernorm",
        },
    )
