"""Gemma 4 (Google DeepMind 2026): Gemma 3 whose layers of full attention have other heads, with normed values."""

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import MODULES, decoder, layer_windows
from ferrule.archs.gemma import gemma_embedding
from ferrule.archs.gemma2 import NORMS_AROUND
from ferrule.archs.rope import read_rope
from ferrule.archs.spec import Attention, Dense, HeadNorm, HeadProjections, Layer, LmHead, ModelSpec, RmsNorm, Rope
from ferrule.archs.tensors import tensors_named

_BLOCK = "model.layers.{layer}"

_MODULES = {**MODULES, **NORMS_AROUND, "scalar.weight": f"{_BLOCK}.layer_scalar"}

_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def gemma4(config: Config) -> ModelSpec:
    """Five of six layers have a window, but never the last one; the others have larger heads."""
    config = config.with_defaults(
        head_dim=256, max_position_embeddings=131_072, sliding_window=512, rope_parameters=_ROPES
    ).with_absent(num_key_value_heads=4, global_head_dim=512, hidden_size_per_layer_input=256)
    # Bidirectional attention between the tokens of an image does not concern text.
    if config.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise config.unsupported("use_bidirectional_attention", '"vision", false or null')
    config.require(enable_moe_block=False, num_kv_shared_layers=0)
    if config.integer("hidden_size_per_layer_input", default=0, low=0) > 0:
        raise config.unsupported("hidden_size_per_layer_input", "0 or null")
    layers = config.layers
    norm = RmsNorm(config.number("rms_norm_eps", default=1e-6))
    windows = layer_windows(
        config,
        sliding=lambda index: (index + 1) % 6 != 0 and index + 1 < layers,
        window=config.integer("sliding_window"),
    )
    spec = decoder(
        config,
        norm=norm,
        norms="around",
        windows=windows,
        rope_of=lambda layer_type: _rope(config, layer_type),
        qkv_bias=config.flag("attention_bias", default=False),
        output_bias=config.flag("attention_bias", default=False),
        qk_norm=HeadNorm(norm),
        scale=1.0,
        ffn=Dense(
            config.integer("intermediate_size"),
            config.activation_named("hidden_activation", default="gelu_pytorch_tanh"),
        ),
        embedding=gemma_embedding(config),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=True),
            softcap=config.number_or_none("final_logit_softcapping"),
        ),
        modules=_MODULES,
    )
    spec = replace(spec, layers=[_layer(config, layer) for layer in spec.layers])
    return replace(spec, tensors=tensors_named(spec, _MODULES))


def _rope(config: Config, layer_type: str) -> Rope:
    return read_rope(config, _head_dim(config, full=layer_type == "full_attention"), layer_type)


def _head_dim(config: Config, *, full: bool) -> int:
    """Length of a head in layers of full attention, or in those with a window."""
    return config.integer("global_head_dim", default=config.head_dim) if full else config.head_dim


def _layer(config: Config, layer: Layer) -> Layer:
    """Returns a layer with the heads of its type, normed values, and a scalar at its end."""
    attention, *others = layer.blocks
    mixer = layer.attention
    if isinstance(mixer.projections, HeadProjections):
        mixer = replace(mixer, projections=_projections(config, mixer, mixer.projections))
    return Layer((replace(attention, mixer=mixer), *others), scalar=True)


def _projections(config: Config, attention: Attention, projections: HeadProjections) -> HeadProjections:
    full = attention.window is None
    values_are_keys = full and config.flag("attention_k_eq_v", default=False)
    kv_heads = config.kv_heads
    if values_are_keys:
        kv_heads = config.integer("num_global_key_value_heads", default=kv_heads)
        if config.heads % kv_heads:
            raise config.error("num_global_key_value_heads", f"a divisor of num_attention_heads ({config.heads})")
    width = _head_dim(config, full=full)
    return replace(
        projections,
        kv_heads=kv_heads,
        key_dim=width,
        value_dim=width,
        values_are_keys=values_are_keys,
        v_norm=RmsNorm(config.number("rms_norm_eps", default=1e-6), weight=False),
    )
