"""Recipes: the format of each matrix of a quantized model, as a TOML file that can be edited."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ferrule.errors import ConfigError, ModelWriteError

BASES = ("int8", "int4")
"""Quantizations whose formats a recipe can replace."""
_MAX_BYTES = 64 << 20
"""Maximum size of a recipe file; that of a model with a hundred thousand experts is smaller."""


@dataclass(frozen=True)
class Recipe:
    """Formats of a quantized model by matrix.

    `Recipe.read` and `save` are the TOML file:

        base = "int4"

        [formats]
        "model.layers.*.mlp.down_proj" = "int6"
    """

    formats: Mapping[str, str]
    """Format (int2, int3, int4, int5, int6, int8, or trellis2 to trellis5) by tensor name, with or without
    `.weight`. `*` stands for any characters, and `[first:end]` at the end of a name limits the format to these rows;
    both bounds are multiples of 16, or the end is that of the tensor. Of all names that match a row of a tensor, the
    last one counts."""
    base: str = "int4"
    """Quantization of all other matrices: int4 or int8."""
    name: str = "recipe"
    """Name in errors: the path of the file."""

    def __post_init__(self) -> None:
        """Raises ConfigError for an unknown base or a format that is not a string."""
        if self.base not in BASES:
            raise ConfigError(f"{self.name}: base must be one of {', '.join(BASES)}, got {self.base!r}")
        for pattern, format_ in self.formats.items():
            if not isinstance(cast("object", format_), str):
                raise ConfigError(f"{self.name}: format of {json.dumps(pattern)} must be a string, got {format_!r}")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recipe:
        """Reads a TOML file.

        Raises ConfigError for a file that cannot be read, is not TOML, or has unknown keys or values.
        """
        path = Path(path)
        table = _read(path)
        if unknown := sorted(table.keys() - {"base", "formats"}):
            raise ConfigError(f"{path}: unknown key {unknown[0]!r}; a recipe has base and [formats]")
        if "base" not in table:
            raise ConfigError(f"{path}: base is missing; it must be one of {', '.join(BASES)}")
        formats = table.get("formats", {})
        if not isinstance(formats, dict):
            raise ConfigError(f"{path}: formats must be a table of tensor names, got {formats!r}")
        return cls(cast("dict[str, str]", formats), table["base"], str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the TOML file.

        Raises ModelWriteError if it cannot be written, also for a name with a lone surrogate, which is not Unicode.
        """
        lines = [f"base = {_toml(self.base)}", "", "[formats]"]
        lines += [f"{_toml(pattern)} = {_toml(format_)}" for pattern, format_ in self.formats.items()]
        try:
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise ModelWriteError(f"{path}: cannot be written: {error.strerror or error}") from error
        except UnicodeEncodeError as error:
            raise ModelWriteError(f"{path}: cannot be written: a lone surrogate in a name of the recipe") from error


def _toml(text: str) -> str:
    """Returns a TOML string: that of JSON, except that TOML has no surrogates and no plain DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path}: recipe must have at most {_MAX_BYTES} bytes, got more")
    try:
        return tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        # A plain ValueError, not a TOMLDecodeError, for an integer of thousands of digits.
        raise ConfigError(f"{path}: recipe is not valid TOML ({error})") from error
