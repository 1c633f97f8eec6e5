"""The engine's parameter tables as Python reads them, and the errors of bad values that cross the binding."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from ferrule import _native
from ferrule._loading.model_files import read_model_files
from ferrule._params.options import EngineOptions
from ferrule._params.sampling import SamplingParams
from ferrule.errors import InvalidParameterError

pytestmark = pytest.mark.native

SPEC = Path(__file__).parents[1] / "rust/engine/examples/tiny.json"
SAMPLING = {row.name: row for row in _native.sampling_parameters()}
BEAM_SEARCH = {row.name: row for row in _native.beam_search_parameters()}
OPTIONS = {row.name: row for row in _native.engine_options()}


@pytest.mark.parametrize(
    "row", [*SAMPLING.values(), *BEAM_SEARCH.values(), *OPTIONS.values()], ids=lambda row: row.name
)
def test_rows_are_complete(row: _native.ParameterRow) -> None:
    assert row.kind
    assert row.requirement
    assert row.doc.endswith(".")
    assert not (row.required and row.default is not None)
    if row.kind in ("int", "float"):
        assert row.minimum is not None
        assert row.maximum is not None
        assert row.minimum < row.maximum


def test_row_values_are_python_types() -> None:
    top_p = SAMPLING["top_p"]
    assert (top_p.kind, top_p.default, top_p.minimum, top_p.maximum, top_p.exclusive_minimum) == (
        "float",
        1.0,
        0,
        1,
        True,
    )
    assert (SAMPLING["top_k"].default, SAMPLING["top_k"].minimum) == (0, -1)
    assert SAMPLING["seed"].maximum == 2**64 - 1
    assert SAMPLING["stop_token_ids"].max_items == 1024
    assert OPTIONS["quantization"].choices[0] == "auto"
    assert BEAM_SEARCH["beam_width"].required


def test_python_defaults_equal_rows() -> None:
    python: dict[str, Any] = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}
    scalars = {name for name, row in SAMPLING.items() if row.kind in ("int", "float", "bool") and not row.required}
    shared = scalars & python.keys()
    assert shared >= {"presence_penalty", "dry_base", "mirostat_eta", "entropy"}
    differ = {name for name in shared if python[name] is not None and python[name] != SAMPLING[name].default}
    assert differ == set()
    options = {field.name for field in fields(EngineOptions)}
    assert set(OPTIONS) <= options


NUMBERS = [
    row
    for row in SAMPLING.values()
    if row.kind in ("int", "float") and not row.required and hasattr(SamplingParams, row.name)
]


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.name)
def test_python_bounds_equal_rows(row: _native.ParameterRow) -> None:
    assert row.minimum is not None
    assert row.maximum is not None
    accepted: list[float] = [row.maximum, row.minimum + row.exclusive_minimum]
    refused: list[float] = [row.maximum + 1, row.minimum - (not row.exclusive_minimum)]

    def given(value: float) -> dict[str, Any]:
        return {"max_tokens": None, row.name: value}

    for value in accepted:
        SamplingParams(**given(value))
    for value in refused:
        with pytest.raises(InvalidParameterError):
            SamplingParams(**given(value))


@pytest.mark.parametrize(
    ("params", "field", "value", "requirement"),
    [
        ({"temperature": -1}, "temperature", -1, "a number from 0 to 100"),
        ({"top_k": 1.5}, "top_k", 1.5, "an integer from -1 to 2147483647"),
        ({"stop_token_ids": [1, 10]}, "stop_token_ids[1]", 10, "a token id of the model, 0 to 9"),
        ({"logit_bias": {"3": "inf"}}, "logit_bias[3]", "inf", "a number from -100 to 100"),
        ({"max_tokens": None}, "max_tokens", None, "an integer from 1 to 2147483647"),
    ],
)
def test_engine_errors_have_attributes(params: dict[str, Any], field: str, value: object, requirement: str) -> None:
    given = json.dumps({"seed": 0, "max_tokens": 1, **params})
    with pytest.raises(InvalidParameterError) as refused:
        _native.sample_distribution([0.0] * 10, given, [], [])
    error = refused.value
    assert (error.field, error.value, error.requirement) == (field, value, requirement)
    assert str(error) == f"{field} must be {requirement}, got {value!r}"


def test_invalid_options() -> None:
    with pytest.raises(InvalidParameterError) as refused:
        _native.measure(SPEC.read_text(), None, json.dumps({"threads": 0}))
    assert (refused.value.field, refused.value.value) == ("threads", 0)


def test_rust_example_spec_is_the_embedded_model() -> None:
    assert json.loads(SPEC.read_text()) == json.loads(read_model_files(TINY).spec.to_json())
