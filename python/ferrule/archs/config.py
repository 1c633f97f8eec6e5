"""config.json, read with types and limits: every error names the file, the field, its value and the limit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from ferrule._validation import shown
from ferrule.archs.files import read_file
from ferrule.archs.spec import Activation
from ferrule.errors import ConfigError, UnsupportedModelError

MAX_LAYERS = 4096
MAX_HEADS = 1024
"""Most attention heads of a layer; specs hold a slope or a norm for each."""
MAX_EXPERTS = 1 << 16
"""Most experts of a layer; the native module has the same limit."""
MAX_SEPARATE_TENSORS = 1 << 17
"""Most experts and heads with separate tensors in all layers; each adds several names to the spec."""
MAX_SIZE = 1 << 28
"""Largest width, vocabulary and context; products of two such sizes cannot overflow."""
MAX_TABLE_ROWS = 1 << 32
"""Most rows of a table that hashes of tokens select; the native module has the same limit."""

LEGACY_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds of layers under the names that transformers 4 writes, and their present names."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
    "tanh": "tanh",
}

Json: TypeAlias = Mapping[str, Any]


class Config:
    """A JSON object of a model's configuration; it may be nested in another."""

    def __init__(self, values: Json, file: Path, path: str = "", spellings: Mapping[str, str] | None = None) -> None:
        self.values = values
        self.file = file
        self.path = path
        self._spellings = spellings or {}

    @classmethod
    def read(cls, file: Path) -> Config:
        """Reads a file of one JSON object.

        Raises ModelFileError, ConfigError.
        """
        return cls(read_json_object(file), file)

    @classmethod
    def read_optional(cls, file: Path) -> Config:
        """Reads a file of one JSON object; empty if it is missing.

        Raises ModelFileError, ConfigError.
        """
        # A dangling link counts as present, so that the error names it.
        return cls.read(file) if file.exists() or file.is_symlink() else cls({}, file)

    def with_defaults(self, **defaults: object) -> Config:
        """Returns this configuration with values for fields that are missing or null."""
        filled = {field: value for field, value in defaults.items() if field not in self}
        return Config({**self.values, **filled}, self.file, self.path, self._spellings)

    def with_values(self, **values: object) -> Config:
        """Returns this configuration with other values."""
        return Config({**self.values, **values}, self.file, self.path, self._spellings)

    def with_absent(self, **defaults: object) -> Config:
        """Returns this configuration with values for fields that are missing; null fields stay null."""
        return Config({**defaults, **self.values}, self.file, self.path, self._spellings)

    def without(self, *fields: str) -> Config:
        """Returns this configuration without the given fields."""
        values = {field: value for field, value in self.values.items() if field not in fields}
        return Config(values, self.file, self.path, self._spellings)

    def spelled(self, **names: str) -> Config:
        """Returns this configuration with fields under the file's names: `spelled(hidden_size="n_embd")`.

        A field under its usual name takes precedence.
        """
        own = {field: name for field, name in names.items() if field not in self.values}
        values = {field: self.values[name] for field, name in own.items() if name in self.values}
        return Config({**self.values, **values}, self.file, self.path, {**self._spellings, **own})

    def __contains__(self, field: str) -> bool:
        """Whether the field is present and not null."""
        return self.values.get(field) is not None

    def error(self, field: str, limit: str) -> ConfigError:
        """Returns the error for a field that is outside its limit."""
        found = f"got {shown(self.values[field])}" if field in self.values else "but it is missing"
        name = f"{self.path}{self._spellings.get(field, field)}"
        return ConfigError(f"{self.file}: {name} must be {limit}, {found}")

    def unsupported(self, field: str, limit: str) -> UnsupportedModelError:
        """Returns the error for a valid value that ferrule does not support."""
        return UnsupportedModelError(str(self.error(field, limit)))

    def require(self, **values: object) -> None:
        """Refuses other values of fields that are supported with these values only; missing fields pass.

        Raises UnsupportedModelError.
        """
        for field, value in values.items():
            if field in self and self.values[field] != value:
                raise self.unsupported(field, json.dumps(value))

    def integer(self, field: str, *, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """An integer from `low` to `high`."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(field, f"an integer from {low} to {high}")
        return value

    def number(
        self, field: str, *, default: float | None = None, above: float = 0.0, low: float | None = None
    ) -> float:
        """A finite number above `above`, or from `low`."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        limit = f"a finite number above {above:g}" if low is None else f"a finite number from {low:g}"
        number = finite(value)
        if number is None or (number <= above if low is None else number < low):
            raise self.error(field, limit)
        return number

    def integer_or_none(self, field: str) -> int | None:
        """Like `integer`; None if the field is missing or null."""
        return self.integer(field) if field in self else None

    def number_or_none(self, field: str) -> float | None:
        """Like `number`; None if the field is missing or null."""
        return self.number(field) if field in self else None

    def flag(self, field: str, *, default: bool) -> bool:
        """True or false."""
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, "true or false")
        return value

    def text(self, field: str, *, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(field, "a string")
        return value

    def texts(self, field: str) -> list[str]:
        """A list of strings; empty if the field is missing."""
        value: object = self.values.get(field)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(field, "a list of strings")
        items = cast("list[object]", value)
        strings = [item for item in items if isinstance(item, str)]
        if len(strings) != len(items):
            raise self.error(field, "a list of strings")
        return strings

    def layer_kinds(self, field: str, *kinds: str) -> list[str]:
        """The kind of each layer, one of `kinds` or its legacy name; empty if the field is missing."""
        found = [LEGACY_KINDS.get(kind, kind) for kind in self.texts(field)]
        if field in self and (len(found) != self.layers or any(kind not in kinds for kind in found)):
            known = [*kinds, *(old for old, new in LEGACY_KINDS.items() if new in kinds)]
            raise self.error(field, f"a list of {self.layers} items, each one of {', '.join(known)}")
        return found

    def numbers(self, field: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value: object = self.values.get(field)
        items = cast("list[object]", value) if isinstance(value, list) else []
        numbers = tuple(number for number in map(finite, items) if number is not None and number > 0)
        if not items or len(numbers) != len(items):
            raise self.error(field, "a list of finite numbers above 0")
        return numbers

    def integers(self, field: str, *, low: int, high: int) -> list[int]:
        """A list of integers from `low` to `high`; empty if the field is missing."""
        value: object = self.values.get(field)
        items = cast("list[object]", value) if isinstance(value, list) else []
        integers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if (
            not isinstance(value, list | None)
            or len(integers) != len(items)
            or any(not low <= n <= high for n in integers)
        ):
            raise self.error(field, f"a list of integers from {low} to {high}")
        return integers

    def flags(self, field: str) -> list[bool]:
        """A list of booleans; empty if the field is missing."""
        value: object = self.values.get(field)
        items = cast("list[object]", value) if isinstance(value, list) else []
        flags = [item for item in items if isinstance(item, bool)]
        if not isinstance(value, list | None) or len(flags) != len(items):
            raise self.error(field, "a list of booleans")
        return flags

    def inner(self, field: str) -> Config:
        """An object within this one; empty if the field is missing."""
        value: object = self.values.get(field)
        if value is None:
            return Config({}, self.file, f"{self.path}{field}.")
        if not isinstance(value, dict):
            raise self.error(field, "an object")
        return Config(cast("Json", value), self.file, f"{self.path}{field}.")

    def token_ids(self, field: str, vocab_size: int) -> list[int]:
        """One token id or a list of them; empty if the field is missing."""
        value: object = self.values.get(field)
        if value is None:
            return []
        tokens = cast("Sequence[object]", value if isinstance(value, list) else [value])
        ids = [token for token in tokens if isinstance(token, int) and not isinstance(token, bool)]
        if len(ids) != len(tokens) or any(not 0 <= token < vocab_size for token in ids):
            raise self.error(field, f"a token id from 0 to {vocab_size - 1}, or a list of them")
        return ids

    # Fields that all decoders share, under their usual names.

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.integer("num_hidden_layers", high=MAX_LAYERS)

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.integer("num_attention_heads", high=MAX_HEADS)

    @property
    def kv_heads(self) -> int:
        """Key-value heads of a layer; as many as query heads by default."""
        heads = self.heads
        kv_heads = self.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise self.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        return kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head; hidden_size / num_attention_heads by default."""
        if "head_dim" in self:
            return self.integer("head_dim")
        hidden, heads = self.integer("hidden_size"), self.heads
        if hidden % heads:
            raise self.error("hidden_size", f"a multiple of num_attention_heads ({heads}) if head_dim is missing")
        return hidden // heads

    def experts(self, field: str, *, default: int | None = None) -> int:
        """Experts of a layer."""
        return self.integer(field, default=default, high=MAX_EXPERTS)

    @property
    def activation(self) -> Activation:
        """Activation of the feed-forward network."""
        return self.activation_named("hidden_act", default="silu")

    def activation_named(self, field: str, *, default: str) -> Activation:
        """Returns the activation that a field names."""
        name = self.text(field, default=default)
        if name not in _ACTIVATIONS:
            raise self.unsupported(field, f"one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]


def finite(value: object) -> float | None:
    """Returns a number as a float; None for other types and for numbers that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_json_object(file: Path) -> Json:
    """Reads a small file of one JSON object.

    Raises as `read_json`; ConfigError for any other JSON value.
    """
    values = read_json(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: content must be an object, got {shown(values)}")
    return cast("Json", values)


def read_json(file: Path) -> object:
    """Reads a small file of JSON.

    Raises ModelNotFoundError if it is missing, ModelFileError if it cannot be read, ConfigError if it is not JSON.
    """
    content = read_file(file)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
