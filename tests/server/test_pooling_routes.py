"""vLLM's routes for pooling models."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrule import LLM, AsyncLLM
from ferrule.outputs import ClassificationRequestOutput
from server.live import Live, serving

GOLDEN = Path(__file__).parents[1] / "golden/encoders"
TEXTS = ["The capital of France is", "a"]
IDS = [[5, 6, 7], [8, 9]]
"""Texts of a model without a tokenizer."""


@pytest.fixture(scope="module")
def classifier() -> Iterator[Live]:
    with serving(llm=lambda: AsyncLLM(GOLDEN / "bert_classifier")) as live:
        yield live


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM(GOLDEN / "bert_classifier") as llm:
        yield llm


def classified(llm: LLM) -> list[ClassificationRequestOutput]:
    return llm.classify([{"prompt_token_ids": ids} for ids in IDS])


@pytest.mark.native
def test_classify_gives_labels_and_probabilities(classifier: Live, offline: LLM) -> None:
    answer = classifier.request("/classify", {"input": IDS}).json
    for found, expected in zip(answer["data"], classified(offline), strict=True):
        assert found["label"] == expected.outputs.label
        assert found["probs"] == pytest.approx(expected.outputs.probs.tolist())
        assert found["num_classes"] == len(found["probs"])
    assert [found["index"] for found in answer["data"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in classified(offline))


@pytest.mark.native
def test_pooling_of_a_classifier_gives_probabilities(classifier: Live, offline: LLM) -> None:
    answer = classifier.request("/pooling", {"input": IDS[0]}).json
    assert answer["data"][0]["data"] == pytest.approx(classified(offline)[0].outputs.probs.tolist())
    refused = classifier.request("/pooling", {"input": IDS, "normalize": True})
    assert (refused.status, refused.error["param"]) == (400, "normalize")


@pytest.mark.native
def test_pooling_gives_vectors_of_tokens_and_of_texts(tiny: Live, solo: LLM) -> None:
    expected = solo.embed(TEXTS[:1], pooling="none")[0].outputs.embedding
    found = tiny.request("/pooling", {"input": TEXTS}).json["data"]
    np.testing.assert_allclose(np.array(found[0]["data"]), expected, rtol=1e-5)
    packed = tiny.request("/pooling", {"input": TEXTS[0], "encoding_format": "base64"}).json["data"][0]["data"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), expected.ravel())
    whole = tiny.request("/pooling", {"input": TEXTS[0], "task": "embed", "normalize": True}).json["data"][0]["data"]
    assert whole == pytest.approx(solo.embed(TEXTS[:1], normalize=True)[0].outputs.embedding.tolist())


@pytest.mark.native
def test_score_compares_texts(tiny: Live, solo: LLM) -> None:
    expected = [each.outputs.score for each in solo.score(TEXTS[0], TEXTS)]
    for path in ("/score", "/v1/score"):
        answer = tiny.request(path, {"text_1": TEXTS[0], "text_2": TEXTS}).json
        assert [each["score"] for each in answer["data"]] == pytest.approx(expected)
    answer = tiny.request("/score", {"queries": TEXTS[0], "documents": TEXTS}).json
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected)


@pytest.mark.native
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/classify", {}, "input"),
        ("/classify", {"input": "a", "softmax": False}, "softmax"),
        ("/pooling", {"input": "a", "task": "plugin"}, "task"),
        ("/pooling", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
    ],
)
def test_invalid_requests_name_the_field(tiny: Live, path: str, body: dict[str, Any], param: str) -> None:
    answer = tiny.request(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.native
def test_a_model_without_classifier_does_not_classify(tiny: Live) -> None:
    for path, body in (("/classify", {"input": "a"}), ("/pooling", {"input": "a", "task": "classify"})):
        answer = tiny.request(path, body)
        assert (answer.status, answer.error["code"]) == (400, "unsupported_task")
