"""Objects of a schema are closed unless it sets additionalProperties, and strict schemas require every property."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from ferrule import LLM, SamplingParams, StructuredOutputsParams
from ferrule._params.closed_objects import MAX_CHARACTERS, close_objects, close_structures, strict_schema

INNER: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}
OUTER: dict[str, Any] = {"type": "object", "properties": {"a": INNER, "list": {"type": "array", "items": INNER}}}
CLOSED = {"additionalProperties": False}


def closed(schema: object) -> Any:
    return json.loads(close_objects(json.dumps(schema)))


def test_objects_with_properties_are_closed_at_every_depth() -> None:
    inner = INNER | CLOSED
    assert (
        closed(OUTER)
        == {
            "type": "object",
            "properties": {"a": inner, "list": {"type": "array", "items": inner}},
        }
        | CLOSED
    )
    assert closed({"prefixItems": [INNER], "anyOf": [INNER, {"type": "null"}]}) == {
        "prefixItems": [inner],
        "anyOf": [inner, {"type": "null"}],
    }
    assert closed({"$ref": "#/$defs/A", "$defs": {"A": INNER}}) == {"$ref": "#/$defs/A", "$defs": {"A": inner}}
    assert closed({"patternProperties": {"^x": INNER}}) == {"patternProperties": {"^x": inner}} | CLOSED


@pytest.mark.parametrize(
    "schema",
    [
        INNER | {"additionalProperties": True},
        INNER | {"additionalProperties": {"type": "string"}},
        {"type": "object"},
        {"type": "object", "required": ["a"]},
        INNER | {"required": ["b", "c"]},
        {"const": {"properties": {}}, "default": INNER, "enum": [INNER]},
        True,
    ],
    ids=str,
)
def test_objects_that_take_other_members_stay_open(schema: object) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [INNER, {"properties": {"c": {}}}]},
        INNER | {"allOf": [{"properties": {"c": {}}}]},
        INNER | {"anyOf": [{"properties": {"c": {}}}, {"properties": {"d": {}}}]},
        INNER | {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"c": {}}}}},
        {
            "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"d": {}}}],
            "$defs": {"A": {"allOf": [{"$ref": "#/$defs/B"}]}, "B": {"properties": {"c": {}}}},
        },
    ],
    ids=str,
)
def test_schemas_that_share_a_value_stay_open(schema: object) -> None:
    assert closed(schema) == schema


def test_schemas_beside_others_without_members_are_closed() -> None:
    alone = {"allOf": [{"$ref": "#/$defs/A"}], "description": "a", "$defs": {"A": INNER}}
    assert closed(alone)["$defs"] == {"A": INNER | CLOSED}
    assert closed(INNER | {"anyOf": [{"required": ["b"]}, {"maxProperties": 0}]})["additionalProperties"] is False


def test_a_chain_of_many_references_is_read() -> None:
    chain = {str(index): {"$ref": f"#/$defs/{index + 1}"} for index in range(3000)} | {"3000": INNER}
    assert closed({"$ref": "#/$defs/0", "$defs": chain})["$defs"]["3000"] == INNER | CLOSED
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    assert closed(circle) == circle


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, '{"properties": {}, "maximum": 1e400}', '{"properties":{}}' + " " * MAX_CHARACTERS]
)
def test_text_that_the_compiler_rejects_is_unchanged(text: str) -> None:
    assert close_objects(text) == text


def test_strict_closes_every_object_and_requires_every_property() -> None:
    strict = strict_schema({**OUTER, "properties": {**OUTER["properties"], "c": {"type": "object"}}, "required": []})
    inner = INNER | CLOSED | {"required": ["b"]}
    assert strict["required"] == ["a", "list", "c"]
    assert strict["additionalProperties"] is False
    assert strict["properties"]["a"] == strict["properties"]["list"]["items"] == inner
    assert strict["properties"]["c"] == {"type": "object"} | CLOSED
    assert strict_schema(INNER | {"additionalProperties": True}) == inner
    typed = INNER | {"additionalProperties": {"type": "string"}, "required": ["b"]}
    assert strict_schema(typed) == typed
    assert strict_schema({"type": ["object", "null"]}) == {"type": ["object", "null"]} | CLOSED
    assert strict_schema({"type": "string"}) == {"type": "string"}


def test_strict_of_a_response_format_is_followed() -> None:
    described: dict[str, Any] = {"name": "a", "schema": INNER}

    def read(**fields: Any) -> StructuredOutputsParams | None:
        given = {"type": "json_schema", "json_schema": {**described, **fields}}
        return StructuredOutputsParams.from_response_format(given)

    assert read(strict=True) == StructuredOutputsParams(json=strict_schema(INNER))
    for plain in (read(), read(strict=False), read(strict=None), read(other=None)):
        assert plain == StructuredOutputsParams(json=INNER)
    with pytest.raises(ValueError, match=r"response_format\.json_schema\.strict must be true or false"):
        read(strict="yes")


def test_structures_of_a_tag_are_closed() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": INNER, "end": "</f>"}], "triggers": ["<f"]}
    found = json.loads(close_structures(json.dumps(tag)))
    assert found["structures"][0]["schema"] == INNER | CLOSED
    for text in ("[]", '{"structures": 1}', '{"structures": [1, {"schema": 2}]}', "{"):
        assert close_structures(text) == text


@pytest.mark.native
def test_no_output_has_members_that_the_schema_does_not_list() -> None:
    open_schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "inner": {"$ref": "#/$defs/Inner"}},
        "$defs": {"Inner": {"properties": {"x": {"type": "boolean"}}, "type": "object"}},
    }
    with LLM(seed=0) as llm:
        for schema in (open_schema, strict_schema(open_schema)):
            structure = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
            params = SamplingParams(n=8, seed=3, temperature=2, max_tokens=200, structured_outputs=structure)
            outputs = [each for each in llm.generate("A person:", params)[0].outputs if each.finish_reason == "stop"]
            assert len(outputs) > 4
            for output in outputs:
                jsonschema.validate(json.loads(output.text), json.loads(close_objects(json.dumps(schema))))
            members = [json.loads(output.text).keys() for output in outputs]
            assert all(each <= {"name", "inner"} for each in members)
            assert schema is open_schema or all(each == {"name", "inner"} for each in members)
