"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2019): BERT with positions after the padding's."""

from ferrule.archs.bert import bert_like
from ferrule.archs.classifier import Classified, label_names
from ferrule.archs.config import Config
from ferrule.archs.spec import Classifier, ModelSpec


def roberta(config: Config) -> ModelSpec:
    """Position row `pad_token_id` is for padding; the first token has the next row."""
    return bert_like(config, base="roberta", first_position=config.integer("pad_token_id", default=1, low=0) + 1)


def roberta_classifier(config: Config) -> Classified:
    """The classifier reads the first token."""
    classifier = Classifier(
        labels=len(label_names(config)), pooling="cls", activation="tanh", dense_bias=True, bias=True
    )
    return classifier, {"classifier.dense": "classifier.dense", "classifier": "classifier.out_proj"}
