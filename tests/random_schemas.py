"""Random JSON schemas of the kinds that JSONSchemaBench collects: what people write for tools and for extraction."""

from __future__ import annotations

import random
from typing import Any

WORDS = ["name", "id", "value", "tags", "items", "unit", "größe", "a b", 'q"', "x/y", "~t", "état", "日本"]
PATTERNS = ["^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "ab?c", "^[A-Z][a-z]*( [A-Z][a-z]*)?$", "^(yes|no|maybe)$", "x$"]
FORMATS = ["date", "uuid", "ipv4"]
"""Schemas that jsonschema can validate."""


class Schemas:
    """Makes schemas whose outputs are short."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Any] = {}

    def make(self) -> dict[str, Any]:
        """One schema: mostly objects, sometimes with definitions that its parts refer to."""
        self._definitions = {}
        if self._random.random() < 0.3:
            for name in self._random.sample(["node", "point", "kind"], k=2):
                self._definitions[name] = self._any(1)
        schema = self._object(3) if self._random.random() < 0.8 else self._any(3)
        if self._definitions:
            schema = {**schema, "$defs": dict(self._definitions)}
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        leaves = [self._string, self._integer, self._number, self._enumeration, self._constant, self._simple]
        if depth == 0:
            return self._random.choice(leaves)()
        inner = [self._object, self._object, self._array, self._union, self._meet, self._reference]
        if self._random.random() < 0.5:
            return self._random.choice(leaves)()
        return self._random.choice(inner)(depth - 1)

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(WORDS, k=self._random.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._any(depth - 1) for name in names}}
        if names and self._random.random() < 0.8:
            schema["required"] = self._random.sample(names, k=self._random.randint(1, len(names)))
        match self._random.randrange(8):
            case 0:
                schema["additionalProperties"] = {"type": "boolean"}
                schema["required"], schema["maxProperties"] = names, len(names) + 2
            case 1:
                schema["patternProperties"] = {"^k[0-9]$": {"type": "integer", "minimum": 0, "maximum": 9}}
                schema["additionalProperties"] = False
            case _:
                schema["additionalProperties"] = False
        if self._random.random() < 0.3:
            schema |= {"title": "A thing", "description": 'of "some" kind {[('}
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._random.randint(0, 2)
        schema: dict[str, Any] = {"type": "array", "minItems": low, "maxItems": low + self._random.randint(0, 2)}
        if self._random.random() < 0.2:
            schema["prefixItems"] = [self._any(0), self._any(0)]
        return schema | {"items": self._any(depth)}

    def _union(self, depth: int) -> dict[str, Any]:
        if self._random.random() < 0.3:
            kinds = [{"type": "string", "maxLength": 4}, {"type": "boolean"}, {"type": "null"}]
            return {"oneOf": self._random.sample(kinds, k=2)}
        return {"anyOf": [self._any(depth) for _ in range(self._random.randint(1, 3))]}

    def _meet(self, depth: int) -> dict[str, Any]:
        _ = depth
        return self._random.choice(
            [
                {"allOf": [{"type": "integer", "minimum": -20}, {"maximum": 77}]},
                {"type": "integer", "allOf": [{"multipleOf": 3}, {"multipleOf": 4, "minimum": 0, "maximum": 200}]},
                {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 6}]},
            ]
        )

    def _reference(self, depth: int) -> dict[str, Any]:
        if not self._definitions:
            return self._any(depth)
        return {"$ref": f"#/$defs/{self._random.choice(list(self._definitions))}"}

    def _string(self) -> dict[str, Any]:
        match self._random.randrange(4):
            case 0:
                return {"type": "string", "pattern": self._random.choice(PATTERNS), "maxLength": 20}
            case 1:
                return {"type": "string", "format": self._random.choice(FORMATS)}
            case _:
                low = self._random.randint(0, 4)
                return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 12)}

    def _integer(self) -> dict[str, Any]:
        low = self._random.randint(-1000, 1000)
        schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + self._random.randint(10, 5000)}
        if self._random.random() < 0.3:
            schema["multipleOf"] = self._random.choice([2, 5, 7])
        return schema

    def _number(self) -> dict[str, Any]:
        low = round(self._random.uniform(-50, 50), 2)
        bounds = self._random.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        return {"type": "number", bounds[0]: low, bounds[1]: low + 12.5}

    def _enumeration(self) -> dict[str, Any]:
        options = ["red", "green", "", 'a"b', "é\n", 1, -2.5, None, True, [1, "x"], {"k": None}]
        return {"enum": self._random.sample(options, k=self._random.randint(1, 4))}

    def _constant(self) -> dict[str, Any]:
        return {"const": self._random.choice(["v1", 3, None, [], {"a": [False]}])}

    def _simple(self) -> dict[str, Any]:
        return {"type": self._random.choice(["boolean", "null"])}
