"""Examples in the docstrings of the public classes run and print what they show."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "ferrule._api.llm",
    "ferrule._api.async_llm",
    "ferrule._params.sampling",
    "ferrule._params.structured",
    "ferrule._params.options",
]


@pytest.mark.native
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
