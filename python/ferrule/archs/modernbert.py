"""ModernBERT (Warner et al. 2024): rotary embedding, gated networks, and windows on most layers."""

from dataclasses import replace
from functools import partial

from ferrule.archs.classifier import Classified, label_names
from ferrule.archs.config import Config
from ferrule.archs.decoder import layer_windows
from ferrule.archs.encoder import encoder
from ferrule.archs.rope import read_rope
from ferrule.archs.spec import Classifier, Dense, Embedding, LayerNorm, ModelSpec, Rope
from ferrule.archs.tensors import fused, tensors_named


def modernbert(config: Config) -> ModelSpec:
    """Every third layer uses full attention; the first has no attention norm, since the embedding has one."""
    config = config.with_defaults(max_position_embeddings=8192)
    hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
    bias = config.flag("attention_bias", default=False)
    every = config.integer("global_attn_every_n_layers", default=3)
    norm = _norm(config)
    ffn_bias = config.flag("mlp_bias", default=False)
    block = "model.layers.{layer}"
    spec = encoder(
        config,
        norm=norm,
        windows=layer_windows(
            config,
            sliding=lambda index: index % every != 0,
            window=config.integer("local_attention", default=128) // 2 + 1,  # on either side, own token included
        ),
        rope_of=partial(_rope, config),
        qkv_bias=bias,
        output_bias=bias,
        ffn=Dense(inner, config.activation_named("hidden_activation", default="gelu"), bias=ffn_bias),
        embedding=Embedding(norm=norm),
        modules={
            "embedding": "model.embeddings.tok_embeddings",
            "embedding_norm": "model.embeddings.norm",
            "attention_norm": f"{block}.attn_norm",
            **fused(f"{block}.attn.Wqkv", {"attention.q": hidden, "attention.k": hidden, "attention.v": hidden}),
            "attention.output": f"{block}.attn.Wo",
            "ffn_norm": f"{block}.mlp_norm",
            **fused(f"{block}.mlp.Wi", {"ffn.gate": inner, "ffn.up": inner}),
            "ffn.down": f"{block}.mlp.Wo",
            "final_norm": "model.final_norm",
        },
    )
    first, *others = spec.layers
    attention, ffn = first.blocks
    spec = replace(spec, layers=[replace(first, blocks=(replace(attention, norm=None), ffn)), *others])
    return replace(spec, tensors=tensors_named(spec, {}, spec.tensors))


def modernbert_classifier(config: Config) -> Classified:
    """The classifier reads the first token or the mean, through the dense layer of the masked language model."""
    pooling = config.text("classifier_pooling", default="cls")
    if pooling not in ("cls", "mean"):
        raise config.unsupported("classifier_pooling", "cls or mean")
    classifier = Classifier(
        labels=len(label_names(config)),
        pooling=pooling,
        activation=config.activation_named("classifier_activation", default="gelu"),
        dense_bias=config.flag("classifier_bias", default=False),
        norm=_norm(config),
        bias=True,
    )
    return classifier, {
        "classifier.dense": "head.dense",
        "classifier.norm": "head.norm",
        "classifier": "classifier",
    }


def _norm(config: Config) -> LayerNorm:
    return LayerNorm(config.number("norm_eps", default=1e-5), bias=config.flag("norm_bias", default=False))


def _rope(config: Config, layer_type: str) -> Rope:
    """Old files have one base for each layer type; a null base for sliding layers means the other base."""
    theta = config.number("global_rope_theta", default=160_000.0, above=1.0)
    if layer_type == "sliding_attention":
        missing = 10_000.0 if "local_rope_theta" not in config.values else theta
        theta = config.number("local_rope_theta", default=missing, above=1.0)
    return read_rope(config.with_defaults(rope_theta=theta), config.head_dim, layer_type)
