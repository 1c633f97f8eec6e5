"""Falcon-H1 (TII 2025): Mamba 2 and attention side by side in every layer, with factors on most projections."""

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import MODULES, decoder
from ferrule.archs.mamba2 import hybrid_mamba2, modules
from ferrule.archs.spec import Dense, Embedding, Layer, LmHead, Mamba2, ModelSpec, RmsNorm
from ferrule.archs.tensors import tensors_named

_LAYER = "model.layers.{layer}"

_MODULES = {
    **MODULES,
    "mamba2_norm": f"{_LAYER}.input_layernorm",
    "ffn_norm": f"{_LAYER}.pre_ff_layernorm",
    "ffn.gate": f"{_LAYER}.feed_forward.gate_proj",
    "ffn.up": f"{_LAYER}.feed_forward.up_proj",
    "ffn.down": f"{_LAYER}.feed_forward.down_proj",
    "final_norm": "model.final_layernorm",
}


def falcon_h1(config: Config) -> ModelSpec:
    """Factors on the keys are factors on the scores; a `mamba_d_ssm` of null is `mamba_expand * hidden_size`."""
    config = config.with_defaults(max_position_embeddings=8192, rms_norm_eps=1e-5).with_absent(
        num_key_value_heads=8, mamba_d_ssm=1024
    )
    gate_scale, ffn_scale = _factors(config, "mlp_multipliers", 2)
    attention_bias = config.flag("attention_bias", default=False)
    spec = decoder(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        ffn=Dense(
            config.integer("intermediate_size", default=14_336),
            config.activation,
            bias=config.flag("mlp_bias", default=False),
            gate_scale=gate_scale,
        ),
        embedding=Embedding(scale=_factor(config, "embedding_multiplier")),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=False), scale=_factor(config, "lm_head_multiplier")
        ),
        modules=_MODULES,
    )
    mixer = _mamba2(config)
    spec = replace(spec, layers=[_layer(config, layer, mixer, ffn_scale) for layer in spec.layers])
    return replace(spec, tensors=tensors_named(spec, {**_MODULES, **modules(f"{_LAYER}.mamba", mixer)}))


def _layer(config: Config, layer: Layer, mixer: Mamba2, ffn_scale: float) -> Layer:
    """Returns a layer with Mamba 2 before its attention, on the same normed input."""
    attention = layer.block("attention")
    softmax = replace(layer.attention, scale=layer.attention.scale * _factor(config, "key_multiplier"))
    return Layer(
        (
            replace(
                attention,
                name=mixer.type,
                mixer=mixer,
                input_scale=_factor(config, "ssm_in_multiplier"),
                residual_scale=_factor(config, "ssm_out_multiplier"),
            ),
            replace(
                attention,
                mixer=softmax,
                norm=None,
                parallel=True,
                input_scale=_factor(config, "attention_in_multiplier"),
                residual_scale=_factor(config, "attention_out_multiplier"),
            ),
            replace(layer.block("ffn"), residual_scale=ffn_scale),
        )
    )


def _mamba2(config: Config) -> Mamba2:
    """Returns the mixer with its factors, and a norm if the file asks for one."""
    gate, x, b, c, step = _factors(config, "ssm_multipliers", 5)
    normed = config.flag("mamba_rms_norm", default=False)
    return replace(
        hybrid_mamba2(config, norm=RmsNorm(config.number("rms_norm_eps")) if normed else None),
        scales=None if gate == x == b == c == step == 1 else (gate, x, b, c, step),
        output_bias=config.flag("projectors_bias", default=False),
        norm_before_gate=config.flag("mamba_norm_before_gate", default=True),
    )


def _factor(config: Config, field: str) -> float:
    return config.number(field, default=1.0)


def _factors(config: Config, field: str, count: int) -> tuple[float, ...]:
    """Returns a list of factors; all are 1 by default."""
    factors = config.numbers(field) if field in config else (1.0,) * count
    if len(factors) != count:
        raise config.error(field, f"a list of {count} numbers")
    return factors
