"""Errors as data: attributes, messages, copies across processes."""

from __future__ import annotations

import pickle

import pytest

from ferrule.errors import InvalidParameterError, PromptTooLongError


def test_invalid_parameter_has_attributes() -> None:
    error = InvalidParameterError("temperature", -1, ">= 0")
    assert (error.field, error.value, error.requirement) == ("temperature", -1, ">= 0")
    assert str(error) == "temperature must be >= 0, got -1"


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("left out; use n", "best_of is not supported, got 3; use n"),
        ("left out in a beam search; use n", "best_of is not supported in a beam search, got 3; use n"),
        ("left out with method ngram", "best_of is not supported with method ngram, got 3"),
    ],
)
def test_message_of_unsupported_parameter_ends_with_advice(requirement: str, message: str) -> None:
    error = InvalidParameterError("best_of", 3, requirement)
    assert error.requirement == requirement
    assert str(error) == message


@pytest.mark.parametrize("value", [None, "-1", 0.5, [1, 2], float("inf")])
def test_invalid_parameter_survives_pickling(value: object) -> None:
    error = InvalidParameterError("stop[2]", value, "a string")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.field, copy.value, copy.requirement) == ("stop[2]", value, "a string")
    assert str(copy) == str(error) == f"stop[2] must be a string, got {value!r}"


def test_prompt_that_is_too_long_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(PromptTooLongError("the prompt has 9 tokens", 9, 8)))
    assert (str(copy), copy.tokens, copy.context, copy.field) == ("the prompt has 9 tokens", 9, 8, None)


@pytest.mark.parametrize("value", ["x" * 1000, [1] * 1000, 10**1000, [10**5000]])
def test_long_values_are_shortened(value: object) -> None:
    assert len(str(InvalidParameterError("stop", value, "short"))) < 120


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1] * 33, "a list of 33 items"),
        (range(10**9), "a range of 1000000000 items"),
        ("x" * 33, repr("x" * 33)),
        ([1, 2], "[1, 2]"),
    ],
)
def test_long_collections_are_shown_as_their_length(value: object, text: str) -> None:
    assert str(InvalidParameterError("stop", value, "short")) == f"stop must be short, got {text}"
