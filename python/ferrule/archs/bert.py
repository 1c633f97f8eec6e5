"""BERT (Devlin et al. 2018): learned positions, token types, and norms on the residual sums."""

from ferrule.archs.classifier import Classified, label_names
from ferrule.archs.config import Config
from ferrule.archs.encoder import encoder
from ferrule.archs.spec import Classifier, Dense, Embedding, LayerNorm, LearnedPositions, ModelSpec


def bert(config: Config) -> ModelSpec:
    """The pooler is used for classification only; it was trained for another task."""
    return bert_like(config, base="bert", first_position=0)


def bert_classifier(config: Config) -> Classified:
    """The classifier reads the pooled first token."""
    classifier = Classifier(
        labels=len(label_names(config)), pooling="cls", activation="tanh", dense_bias=True, bias=True
    )
    return classifier, {"classifier.dense": "bert.pooler.dense", "classifier": "classifier"}


def bert_like(config: Config, *, base: str, first_position: int) -> ModelSpec:
    """Returns the spec of BERT and related models; `base` is the outer module, `first_position` the first row."""
    config = config.with_defaults(hidden_act="gelu", max_position_embeddings=512, layer_norm_eps=1e-12)
    config.require(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    rows = config.integer("max_position_embeddings", low=first_position + 1)
    norm = LayerNorm(config.number("layer_norm_eps"))
    block = f"{base}.encoder.layer.{{layer}}"
    return encoder(
        config.with_values(max_position_embeddings=rows - first_position),
        norm=norm,
        norms="sum",
        rotated=False,
        qkv_bias=True,
        output_bias=True,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=True),
        embedding=Embedding(
            positions=LearnedPositions(rows, first_position),
            token_types=config.integer("type_vocab_size", default=2),
            norm=norm,
        ),
        final_norm=False,
        modules={
            "embedding": f"{base}.embeddings.word_embeddings",
            "positions": f"{base}.embeddings.position_embeddings",
            "token_types": f"{base}.embeddings.token_type_embeddings",
            "embedding_norm": f"{base}.embeddings.LayerNorm",
            "attention.q": f"{block}.attention.self.query",
            "attention.k": f"{block}.attention.self.key",
            "attention.v": f"{block}.attention.self.value",
            "attention.output": f"{block}.attention.output.dense",
            "attention_sum_norm": f"{block}.attention.output.LayerNorm",
            "ffn.up": f"{block}.intermediate.dense",
            "ffn.down": f"{block}.output.dense",
            "ffn_sum_norm": f"{block}.output.LayerNorm",
        },
    )
