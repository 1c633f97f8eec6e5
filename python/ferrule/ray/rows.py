"""Rows of a dataset: conversion from columns, whose values Arrow and NumPy changed, and back to columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from ferrule._validation import shown
from ferrule.errors import InvalidParameterError

Row: TypeAlias = Mapping[str, object]
"""Values by column. Missing values are None."""
IMAGE = "image"
"""Column of images, whose arrays are not converted to lists."""
Columns: TypeAlias = dict[str, Any]
"""Columns of a batch by name: NumPy arrays or lists of equal length."""


def rows_of(batch: object) -> list[Row]:
    """Returns the rows of a batch in Ray's format `numpy`.

    Raises InvalidParameterError.
    """
    if not isinstance(batch, Mapping):
        raise InvalidParameterError("batch", type(batch).__name__, "a dict of columns (batch_format='numpy')")
    columns = cast("Mapping[str, Sequence[object]]", batch)
    return [
        {name: value if name == IMAGE else _plain(value) for name, value in zip(columns, values, strict=True)}
        for values in zip(*columns.values(), strict=True)
    ]


def columns_of(rows: Sequence[Row]) -> Columns:
    """Returns the columns of rows; a row that lacks a column has None in it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def text(row: Row, column: str) -> str:
    """Returns the text in a column.

    Raises InvalidParameterError.
    """
    value = row.get(column)
    if not isinstance(value, str):
        raise InvalidParameterError(column, value, "a string in each row")
    return value


def images(row: Row) -> list[object]:
    """Returns the images in the column IMAGE: one, or those of a list; an array of three dimensions is one image."""
    value = row.get(IMAGE)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return []
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim != 3):
        return list(cast("Iterable[object]", value))
    return [cast("object", value)]


def mapping(row: Row, column: str) -> dict[str, Any] | None:
    """Returns the dict in a column; None if the row has none.

    Raises InvalidParameterError.
    """
    value = row.get(column)
    if value is not None and not isinstance(value, dict):
        raise InvalidParameterError(column, value, f"a dict or None in each row, not {shown(type(value).__name__)}")
    return cast("dict[str, Any] | None", value)


def _plain(value: object) -> object:
    """Converts a value to Python's types.

    NaN, which pandas writes for a missing value, becomes None. Fields of dicts that are None are removed, because Arrow
    gives all dicts of a column the same fields.
    """
    match value:
        case np.ndarray():
            return [_plain(each) for each in cast("np.ndarray[Any, Any]", value)]
        case np.generic():
            return _plain(cast("object", value.item()))
        case list() | tuple():
            return [_plain(each) for each in cast("list[object]", value)]
        case dict():
            fields = {name: _plain(each) for name, each in cast("dict[str, object]", value).items()}
            return {name: each for name, each in fields.items() if each is not None}
        case float() if math.isnan(value):
            return None
        case _:
            return value
