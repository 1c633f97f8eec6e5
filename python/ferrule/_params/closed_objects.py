"""Closes JSON schemas, so that their objects have only the members that the schema lists.

JSON Schema allows an object any further members unless `additionalProperties` forbids them, and a small model then adds
members until its token limit. Structured output therefore treats an object without `additionalProperties` as closed,
like llama.cpp and xgrammar. OpenAI's `strict` also requires every property.

Schemas that apply to the same value (`allOf`, or `properties` beside a `$ref`) stay open, since each closed schema
would forbid the members of the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

Schema = Mapping[str, Any]
Change = Callable[[Schema, bool], dict[str, Any]]
"""Function that returns the changed keywords of a schema. The flag is True if other schemas apply to the same value."""

MAX_CHARACTERS = 1 << 20
"""Maximum number of characters of a schema; the compiler refuses longer schemas."""
_LISTING = ("properties", "patternProperties", "additionalProperties")
"""Keywords with which a schema lists members."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""
_PARTS = ("items", "prefixItems", "additionalItems", "contains", "additionalProperties")
"""Keywords whose value is a schema or a list of schemas for parts of the value."""
_WHOLE = ("allOf", "anyOf", "oneOf")
"""Keywords whose value is a list of schemas for the same value."""


def close_objects(text: str) -> str:
    """Closes the objects of a schema that do not set `additionalProperties`; returns other text unchanged.

    Objects without `properties` stay open, and so do objects that require a member which they do not list.
    """

    def change(document: object) -> object:
        return _changed(document, _closed)

    return _rewritten(text, change)


def close_structures(text: str) -> str:
    """Closes the objects of the schemas of a structural tag."""

    def change(document: object) -> object:
        if isinstance(document, dict):
            for structure in _list(cast("Schema", document), "structures"):
                if isinstance(structure, dict) and "schema" in structure:
                    changed = cast("dict[str, object]", structure)
                    changed["schema"] = _changed(changed["schema"], _closed)
        return cast("object", document)

    return _rewritten(text, change)


def strict_schema(schema: Any) -> Any:
    """Closes every object of a schema and requires every property, as OpenAI defines `strict`.

    If `additionalProperties` is a schema, the object describes a map and stays open. A schema that is nested too deeply
    is returned unchanged.
    """
    try:
        return _changed(schema, _strict)
    except RecursionError:  # compiling the schema reports the error
        return schema


def _rewritten(text: str, change: Callable[[object], object]) -> str:
    if len(text) > MAX_CHARACTERS:
        return text
    try:
        return json.dumps(change(json.loads(text)), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # the compiler reports it
        return text


def _closed(schema: Schema, shared: bool) -> dict[str, Any]:
    lists_names, lists_patterns = "properties" in schema, "patternProperties" in schema
    if (
        shared
        or not (lists_names or lists_patterns)
        or not schema.keys().isdisjoint(("additionalProperties", "unevaluatedProperties"))
        or not (lists_patterns or all(name in _mapping(schema, "properties") for name in _list(schema, "required")))
    ):
        return {}
    return {"additionalProperties": False}


def _strict(schema: Schema, shared: bool) -> dict[str, Any]:
    kind: object = schema.get("type")
    is_object = kind == "object" or (isinstance(kind, list) and "object" in kind)
    changed: dict[str, Any] = {}
    if "properties" in schema:
        changed["required"] = list(_mapping(schema, "properties"))
    if not shared and (is_object or changed) and schema.get("additionalProperties", True) is True:
        changed["additionalProperties"] = False
    return changed


def _changed(document: object, change: Change) -> object:
    """Returns a copy of a schema in which each schema is changed."""
    shared = _shared(document)

    def copy(schema: object) -> object:
        if isinstance(schema, list):
            return [copy(each) for each in cast("list[object]", schema)]
        if not isinstance(schema, Mapping):
            return schema
        given = cast("Schema", schema)
        copied = {key: copy(value) if key in _PARTS or key in _WHOLE else value for key, value in given.items()}
        for key in _NAMED:
            if key in given:
                copied[key] = {name: copy(each) for name, each in _mapping(given, key).items()}
        return copied | change(given, id(given) in shared)

    return copy(document)


def _shared(document: object) -> set[int]:
    """Returns the ids of schemas that apply to the same value as other schemas that list members."""
    groups: dict[int, list[Sequence[object]]] = {}
    """Schemas for the same value, by the id of the schema that refers to them; alternatives form one group."""
    parents: dict[int, list[int]] = {}
    listing: set[int] = set()
    waiting = [document]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        given = cast("Schema", schema)
        if id(given) in groups:
            continue
        groups[id(given)] = found = list(_groups(given, document))
        for member in (each for group in found for each in group):
            parents.setdefault(id(member), []).append(id(given))
            waiting.append(member)
        waiting += _parts(given)
        if not given.keys().isdisjoint(_LISTING):
            listing.add(id(given))
    own = set(listing)
    _spread(listing, lambda schema: parents.get(schema, ()))

    def listed_by(schema: int) -> int:
        return (schema in own) + sum(any(id(each) in listing for each in group) for group in groups[schema])

    shared = {schema for schema in groups if listed_by(schema) > 1}
    _spread(shared, lambda schema: [id(each) for group in groups.get(schema, ()) for each in group])
    return shared


def _spread(found: set[int], following: Callable[[int], Sequence[int]]) -> None:
    """Extends a set with everything that is reachable from its members."""
    waiting = list(found)
    while waiting:
        for each in following(waiting.pop()):
            if each not in found:
                found.add(each)
                waiting.append(each)


def _groups(schema: Schema, document: object) -> Iterator[Sequence[object]]:
    reference: object = schema.get("$ref")
    if isinstance(reference, str):
        yield [_resolved(document, reference)]
    yield from ([each] for each in _list(schema, "allOf"))
    yield from (_list(schema, key) for key in ("anyOf", "oneOf"))


def _parts(schema: Schema) -> Iterator[object]:
    for key in ("properties", "patternProperties"):
        yield from _mapping(schema, key).values()
    for key in _PARTS:
        value: object = schema.get(key)
        yield from cast("list[object]", value) if isinstance(value, list) else [value]


def _resolved(document: object, reference: str) -> object:
    """Returns the schema of a reference within the document; None for any other reference."""
    start, *path = reference.split("/")
    found = document if start == "#" else None
    for part in path:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = cast("Schema", found).get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(cast("list[object]", found)):
            found = cast("list[object]", found)[int(name)]
        else:
            return None
    return found


def _mapping(schema: Schema, key: str) -> Schema:
    value: object = schema.get(key)
    return cast("Schema", value) if isinstance(value, Mapping) else {}


def _list(schema: Schema, key: str) -> Sequence[object]:
    value: object = schema.get(key)
    return cast("Sequence[object]", value) if isinstance(value, list) else ()
