"""What Llama and its descendants have in common: pre-norm layers of rotated attention and a gated network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.rope import context_length, read_rope
from ferrule.spec import Attention, GatedFfn, Head, Layer, ModelSpec, RmsNorm, tensors_named

MODULES = {
    "embedding": "model.embed_tokens",
    "attention_norm": "model.layers.{layer}.input_layernorm",
    "attention.q": "model.layers.{layer}.self_attn.q_proj",
    "attention.k": "model.layers.{layer}.self_attn.k_proj",
    "attention.v": "model.layers.{layer}.self_attn.v_proj",
    "attention.output": "model.layers.{layer}.self_attn.o_proj",
    "attention.q_norm": "model.layers.{layer}.self_attn.q_norm",
    "attention.k_norm": "model.layers.{layer}.self_attn.k_norm",
    "ffn_norm": "model.layers.{layer}.post_attention_layernorm",
    "ffn.gate": "model.layers.{layer}.mlp.gate_proj",
    "ffn.up": "model.layers.{layer}.mlp.up_proj",
    "ffn.down": "model.layers.{layer}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
"""Where Llama's checkpoints keep each role."""

LAYER_TYPES = ("full_attention", "sliding_attention")


def decoder(
    config: Config,
    *,
    windows: Sequence[int | None] | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """A spec from the keys that this family shares.

    `windows` holds the sliding window of each layer, None where it has none.
    """
    width = config.head_dim
    norm = RmsNorm(eps=config.number("rms_norm_eps", default=1e-6))
    ffn = GatedFfn(config.whole("intermediate_size"), config.activation, bias=mlp_bias)
    windows = [None] * config.layers if windows is None else windows
    types = [LAYER_TYPES[window is not None] for window in windows]
    ropes = {kind: read_rope(config, width, kind) for kind in dict.fromkeys(types)}
    distinct = list(dict.fromkeys(ropes.values()))
    attention = Attention(
        heads=config.heads,
        kv_heads=config.kv_heads,
        key_dim=width,
        value_dim=width,
        scale=width**-0.5,
        window=None,
        rope=0,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=norm if qk_norm else None,
    )
    attentions = [
        replace(attention, window=window, rope=distinct.index(ropes[kind]))
        for window, kind in zip(windows, types, strict=True)
    ]
    spec = ModelSpec(
        architecture=config.text("model_type"),
        vocab_size=config.whole("vocab_size"),
        hidden_size=config.whole("hidden_size"),
        max_position_embeddings=min(context_length(config, rope) for rope in distinct),
        ropes=distinct,
        layers=[Layer(norm, attention, norm, ffn) for attention in attentions],
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", default=False)),
    )
    return replace(spec, tensors=tensors_named(spec, MODULES))


def layer_windows(config: Config) -> list[int | None]:
    """The window of each layer, as Qwen's keys say.

    `use_sliding_window` switches all of them; `layer_types` names the layers, or, in old files, those from
    `max_window_layers` on have windows.
    """
    layers = config.layers
    sliding = config.flag("use_sliding_window", default=False) and config.values.get("sliding_window", 4096) is not None
    window = config.whole("sliding_window", default=4096) if sliding else None
    types = config.texts("layer_types")
    if not types:
        first = config.whole("max_window_layers", default=28, low=0)
        return [window if index >= first else None for index in range(layers)]
    if len(types) != layers or any(kind not in LAYER_TYPES for kind in types):
        raise config.error("layer_types", f"a list of {layers}, each one of {', '.join(LAYER_TYPES)}")
    if window is None and "sliding_attention" in types:
        raise config.error(
            "sliding_window", "a whole number, with use_sliding_window, as layer_types names sliding layers"
        )
    return [window if kind == "sliding_attention" else None for kind in types]
