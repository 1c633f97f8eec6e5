"""Encoders and classifiers as data: what config.json means, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ferrule import ConfigError, UnsupportedModelError
from ferrule.archs import model_spec
from ferrule.archs.classifier import label_names
from ferrule.archs.config import Config
from ferrule.archs.spec import Classifier, LearnedPositions, ModelSpec
from ferrule.archs.tensors import roles
from test_encoders import GOLDEN

DECODERS = GOLDEN.parent / "logits"


def config_of(case: str, folder: Path = GOLDEN, **changes: Any) -> Config:
    values = json.loads((folder / case / "config.json").read_text()) | changes
    return Config({name: value for name, value in values.items() if value is not ...}, Path("config.json"))


def spec_of(case: str, folder: Path = GOLDEN, **changes: Any) -> ModelSpec:
    return model_spec(config_of(case, folder, **changes))


@pytest.mark.parametrize("case", ["bert", "xlm_roberta", "modernbert"])
def test_pretraining_heads_are_ignored(case: str) -> None:
    plain = spec_of(case)
    name = config_of(case).texts("architectures")[0].removesuffix("Model")
    assert (plain.causal, plain.lm_head, plain.generates) == (False, None, False)
    assert set(plain.tensors) == set(roles(plain))
    for ending in ("ForMaskedLM", "ForPreTraining"):
        assert spec_of(case, architectures=[name + ending]) == plain
    with pytest.raises(UnsupportedModelError, match="nearest first"):
        spec_of(case, architectures=[name + "ForCausalLM"])


def test_roberta_positions_start_after_the_padding_id() -> None:
    spec = spec_of("xlm_roberta")
    assert (spec.embedding.positions, spec.max_position_embeddings) == (LearnedPositions(72, 2), 70)
    assert spec_of("xlm_roberta", pad_token_id=4).embedding.positions == LearnedPositions(72, 5)
    assert spec_of("xlm_roberta", architectures=["RobertaModel"], model_type="roberta").layers == spec.layers
    with pytest.raises(ConfigError, match="max_position_embeddings must be an integer from 73"):
        spec_of("xlm_roberta", pad_token_id=71)


@pytest.mark.parametrize(
    "changes",
    [{"position_embedding_type": "relative_key"}, {"is_decoder": True}, {"add_cross_attention": True}],
)
def test_unsupported_bert_variants(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        spec_of("bert", **changes)


def test_modernbert_config_spellings() -> None:
    old = spec_of("modernbert")
    assert [layer.attention.window for layer in old.layers] == [None, 9, 9, None, 9]
    assert [old.ropes[layer.attention.rope or 0].theta for layer in old.layers] == [1.6e5, 1e4, 1e4, 1.6e5, 1e4]
    assert old.layers[0].block("attention").norm is None
    assert all(layer.block("attention").norm is not None for layer in old.layers[1:])
    new = spec_of("modernbert_classifier", architectures=["ModernBertModel"])
    assert (new.layers, new.ropes) == (old.layers, old.ropes)
    assert {rope.theta for rope in spec_of("modernbert", local_rope_theta=None).ropes} == {1.6e5}
    assert {rope.theta for rope in spec_of("modernbert", local_rope_theta=...).ropes} == {1.6e5, 1e4}
    with pytest.raises(UnsupportedModelError, match="classifier_pooling must be cls or mean, got 'max'"):
        spec_of("modernbert_classifier", classifier_pooling="max")


def test_decoder_classifier_pools_the_last_token() -> None:
    spec = spec_of("qwen3_classifier")
    assert spec.classifier == Classifier(labels=3, pooling="last")
    assert (spec.lm_head, spec.generates) == (None, False)
    assert spec.tensors["classifier.weight"].names == ("score.weight",)
    assert set(spec.tensors) == set(roles(spec))
    for case, name in (("llama", "Llama"), ("gemma2", "Gemma2"), ("mistral_swa", "Mistral")):
        classified = spec_of(case, DECODERS, architectures=[f"{name}ForSequenceClassification"])
        assert classified.classifier == Classifier(labels=2, pooling="last")
        assert classified.layers == spec_of(case, DECODERS).layers


def test_base_class_generates_if_embeddings_are_tied() -> None:
    assert spec_of("qwen3", DECODERS, architectures=["Qwen3Model"], tie_word_embeddings=True).generates
    untied = spec_of("qwen3", DECODERS, architectures=["Qwen3Model"], tie_word_embeddings=False)
    assert (untied.lm_head, untied.generates, untied.causal) == (None, False, True)
    assert spec_of("qwen3", DECODERS, tie_word_embeddings=False).generates


def test_multimodal_classifiers_are_unsupported() -> None:
    text = dict(config_of("gemma3", DECODERS, architectures=...).values)
    outer = {"architectures": ["Gemma3ForSequenceClassification"], "model_type": "gemma3", "text_config": text}
    with pytest.raises(UnsupportedModelError, match="classifiers of multimodal models are not supported"):
        model_spec(Config(outer, Path("config.json")))


def test_label_names() -> None:
    def names(**values: object) -> tuple[str, ...]:
        return label_names(Config(values, Path("config.json")))

    assert names() == ("LABEL_0", "LABEL_1")
    assert names(num_labels=3) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert names(id2label={"1": "b", "0": "a"}, num_labels=5) == ("a", "b")
    for wrong in ({}, {"1": "a"}, {"0": "a", "2": "b"}, {"0": 5}, ["a"], "a"):
        with pytest.raises(ConfigError, match="id2label must be an object"):
            names(id2label=wrong)
    for count in (0, 2**40, "two"):
        with pytest.raises(ConfigError, match="num_labels must be an integer from 1 to 1048576"):
            names(num_labels=count)
