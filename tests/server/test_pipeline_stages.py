"""A server whose model is in several processes: a lost one ends its requests, and all are replaced."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from ferrule._cli.served_models import load_models
from ferrule.server import OnDemand, ServerSettings
from server.live import serving, until
from server.test_lifecycle import ask
from test_pipeline import TWO_RANKS, TWO_STAGES, stage_processes

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("several", "worker"), [(TWO_STAGES, b"pipeline stage 1"), (TWO_RANKS, b"tensor-parallel rank 1")]
)
def test_lost_worker_ends_its_requests_and_all_are_started_again(several: dict[str, Any], worker: bytes) -> None:
    settings = ServerSettings()
    loaded = load_models({"tiny": None}, several, settings, quiet=True)["tiny"]
    assert isinstance(loaded, OnDemand)
    with serving(settings, on_demand={"tiny": loaded}) as live:
        before = stage_processes()
        expected = live.complete("The capital of France is", max_tokens=4, temperature=0).json["choices"]
        with ask(live, stream=True) as client:
            received = client.recv(1 << 16)
            os.kill(before[1], signal.SIGKILL)
            while b"[DONE]" not in received and (piece := client.recv(1 << 16)):
                received += piece
        assert b'"code": "engine_unavailable"' in received
        assert worker in received
        until(lambda: live.request("/health").status == 503)
        until(lambda: live.request("/health").status == 200)
        assert not set(stage_processes()) & set(before)
        found = live.complete("The capital of France is", max_tokens=4, temperature=0)
        assert found.json["choices"] == expected
    assert stage_processes() == []
