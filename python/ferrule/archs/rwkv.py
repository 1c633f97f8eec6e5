"""RWKV 4 (Peng et al. 2023): layers of time mixing and channel mixing, which both have a state and no attention."""

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.spec import Block, Embedding, Layer, LayerNorm, LmHead, ModelSpec, RwkvChannelMix, RwkvTimeMix
from ferrule.archs.tensors import tensors_named

_BLOCK = "rwkv.blocks.{layer}"

_MODULES = {
    "embedding": "rwkv.embeddings",
    "embedding_norm": "rwkv.blocks.0.pre_ln",
    "time_mix_norm": f"{_BLOCK}.ln1",
    "time_mix.k": f"{_BLOCK}.attention.key",
    "time_mix.v": f"{_BLOCK}.attention.value",
    "time_mix.receptance": f"{_BLOCK}.attention.receptance",
    "time_mix.output": f"{_BLOCK}.attention.output",
    "time_mix.k_mix.weight": f"{_BLOCK}.attention.time_mix_key",
    "time_mix.v_mix.weight": f"{_BLOCK}.attention.time_mix_value",
    "time_mix.receptance_mix.weight": f"{_BLOCK}.attention.time_mix_receptance",
    "time_mix.decay_log.weight": f"{_BLOCK}.attention.time_decay",
    "time_mix.bonus.weight": f"{_BLOCK}.attention.time_first",
    "channel_mix_norm": f"{_BLOCK}.ln2",
    "channel_mix.up": f"{_BLOCK}.feed_forward.key",
    "channel_mix.down": f"{_BLOCK}.feed_forward.value",
    "channel_mix.receptance": f"{_BLOCK}.feed_forward.receptance",
    "channel_mix.up_mix.weight": f"{_BLOCK}.feed_forward.time_mix_key",
    "channel_mix.receptance_mix.weight": f"{_BLOCK}.feed_forward.time_mix_receptance",
    "final_norm": "rwkv.ln_out",
    "lm_head": "head",
}


def rwkv(config: Config) -> ModelSpec:
    """The states have no limit of tokens: the context is a million by default, and `context_length` is ignored.

    So is `rescale_every`, which keeps the reference's stream within the range of f16.
    """
    hidden = config.integer("hidden_size")
    norm = LayerNorm(config.number("layer_norm_epsilon", default=1e-5))
    layer = Layer(
        (
            Block("time_mix", RwkvTimeMix(hidden, config.integer("attention_hidden_size", default=hidden)), norm),
            Block("channel_mix", RwkvChannelMix(hidden, config.integer("intermediate_size", default=4 * hidden)), norm),
        )
    )
    spec = ModelSpec(
        architecture=config.text("model_type"),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=config.integer("max_position_embeddings", default=1 << 20),
        embedding=Embedding(norm=norm),
        layers=[layer] * config.layers,
        final_norm=LayerNorm(1e-5),
        lm_head=LmHead(tied=config.flag("tie_word_embeddings", default=False)),
    )
    return replace(spec, tensors=tensors_named(spec, _MODULES))
