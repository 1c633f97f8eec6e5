"""Servers that a module's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fakes
from ferrule import LLM
from server.live import Live, serving
from server.scripted_server import ScriptedServer, scripted_server


@pytest.fixture(scope="module")
def tiny() -> Iterator[Live]:
    """A server of the embedded model on the real engine, under two names."""
    with serving(names=("tiny", "other")) as live:
        yield live


@pytest.fixture
def live(engine: type[fakes.Engine]) -> Iterator[Live]:
    """A server with the embedded model's tokenizer and a fake engine."""
    with serving() as live:
        yield live


@pytest.fixture
def scripted(engine: type[fakes.Engine]) -> Iterator[ScriptedServer]:
    """A server whose fake engine outputs reasoning, content and two tool calls."""
    with scripted_server(engine) as found:
        yield found


@pytest.fixture(scope="module")
def solo() -> Iterator[LLM]:
    """The embedded model without a server."""
    with LLM() as llm:
        yield llm
