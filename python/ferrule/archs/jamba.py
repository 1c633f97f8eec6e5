"""Jamba (AI21 2024): Mamba in most layers, attention without positions in some, experts in every second layer."""

from ferrule.archs.config import MAX_LAYERS, Config
from ferrule.archs.decoder import decoder
from ferrule.archs.mamba import modules, step_rank
from ferrule.archs.spec import Dense, Experts, Mamba, ModelSpec, RmsNorm

_LAYER = "model.layers.{layer}"

MODULES = {
    "mamba_norm": f"{_LAYER}.input_layernorm",
    "ffn_norm": f"{_LAYER}.pre_ff_layernorm",
    "ffn.gate": f"{_LAYER}.feed_forward.gate_proj",
    "ffn.up": f"{_LAYER}.feed_forward.up_proj",
    "ffn.down": f"{_LAYER}.feed_forward.down_proj",
    "ffn.router": f"{_LAYER}.feed_forward.router",
    "ffn.experts.gate": f"{_LAYER}.feed_forward.experts.{{expert}}.gate_proj",
    "ffn.experts.up": f"{_LAYER}.feed_forward.experts.{{expert}}.up_proj",
    "ffn.experts.down": f"{_LAYER}.feed_forward.experts.{{expert}}.down_proj",
    "final_norm": "model.final_layernorm",
}
"""Module names in which Jamba's checkpoints differ from Llama's."""


def jamba(config: Config) -> ModelSpec:
    """A period and an offset say which layers attend, another pair which have experts."""
    config = config.with_defaults(max_position_embeddings=262_144).with_absent(num_key_value_heads=8)
    config.require(sliding_window=None)
    mixer = Mamba(
        channels=int(config.number("mamba_expand", default=2.0) * config.integer("hidden_size")),
        state_size=config.integer("mamba_d_state", default=16),
        step_rank=step_rank(config, "mamba_dt_rank"),
        taps=config.integer("mamba_d_conv", default=4),
        bias=config.flag("mamba_proj_bias", default=False),
        kernel_bias=config.flag("mamba_conv_bias", default=True),
        norm=RmsNorm(config.number("rms_norm_eps", default=1e-6)),
    )
    dense = Dense(config.integer("intermediate_size", default=14_336), config.activation)
    experts, sparse = config.experts("num_experts", default=16), _layers(config, "expert", period=2, offset=1)
    # A layer with one expert has no router.
    network = Experts(experts, config.integer("num_experts_per_tok", default=2), dense) if experts > 1 else dense
    attending = _layers(config, "attn", period=8, offset=4)
    return decoder(
        config,
        rotated=False,
        mixers={index: mixer for index in range(config.layers) if index not in attending},
        ffn=[network if index in sparse else dense for index in range(config.layers)],
        modules={**MODULES, **modules(f"{_LAYER}.mamba", mixer)},
    )


def _layers(config: Config, kind: str, *, period: int, offset: int) -> range:
    """Returns the layers of a kind: one in every period, from the offset on."""
    period = config.integer(f"{kind}_layer_period", default=period, high=MAX_LAYERS)
    offset = config.integer(f"{kind}_layer_offset", default=offset, low=0, high=MAX_LAYERS)
    if offset >= period:
        raise config.error(f"{kind}_layer_offset", f"below {kind}_layer_period ({period})")
    return range(offset, config.layers, period)
