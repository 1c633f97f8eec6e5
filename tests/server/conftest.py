"""Servers that a module's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fakes
from server.live import Live, serving


@pytest.fixture(scope="module")
def tiny() -> Iterator[Live]:
    """The embedded model on the engine itself, by two names."""
    with serving(names=("tiny", "other")) as live:
        yield live


@pytest.fixture
def live(engine: type[fakes.Engine]) -> Iterator[Live]:
    """The embedded model's tokenizer on a fake engine."""
    with serving() as live:
        yield live
