"""Classes that end in ForSequenceClassification: a classifier in place of the lm_head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias, cast

from ferrule.archs.config import Config
from ferrule.archs.spec import Classifier, ModelSpec
from ferrule.archs.tensors import tensors_named

Classified: TypeAlias = tuple[Classifier, dict[str, str]]
"""A classifier, and the checkpoint's module names of its roles."""

MAX_LABELS = 1 << 20


def with_classifier(spec: ModelSpec, classified: Classified) -> ModelSpec:
    """Returns the spec with a classifier in place of the lm_head."""
    classifier, modules = classified
    spec = replace(spec, lm_head=None, classifier=classifier)
    return replace(spec, tensors=tensors_named(spec, modules, spec.tensors))


def decoder_classifier(config: Config) -> Classified:
    """Returns the classifier of decoders: a projection of the last token's hidden state."""
    return Classifier(labels=len(label_names(config)), pooling="last"), {"classifier": "score"}


def label_names(config: Config) -> tuple[str, ...]:
    """Returns the label names in order; `LABEL_0` and so on if the file has only their number.

    The default is two labels, as in transformers.
    """
    if "id2label" not in config:
        count = config.integer("num_labels", default=2, high=MAX_LABELS)
        return tuple(f"LABEL_{index}" for index in range(count))
    names = config.inner("id2label").values
    if not 1 <= len(names) <= MAX_LABELS or set(names) != {str(index) for index in range(len(names))}:
        raise config.error("id2label", f"an object with a name for each number from 0, up to {MAX_LABELS} of them")
    if not all(isinstance(name, str) for name in names.values()):
        raise config.error("id2label", "an object of strings")
    named = cast("Mapping[str, str]", names)
    return tuple(named[str(index)] for index in range(len(named)))
