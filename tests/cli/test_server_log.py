"""Log of `ferrule serve` on a terminal: banner, readable lines, and short names of models."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cli.terminal import Terminal
from conftest import TINY
from ferrule._cli.served_models import short_name
from ferrule._cli.server_log import StderrHandler, TextFormatter, banner
from ferrule.server import ServerSettings


def line(message: str, level: int = logging.INFO, **fields: object) -> str:
    record = logging.LogRecord("ferrule.server", level, "x.py", 1, message, None, None)
    record.fields = fields
    return re.sub(r"^\d\d:\d\d:\d\d  ", "", TextFormatter().format(record))


def test_request_is_one_readable_line() -> None:
    fields: dict[str, Any] = {
        "request_id": "a",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "seconds": 1.234,
    }
    assert line("request", **fields) == "200  POST /v1/chat/completions  1.23 s"
    usage: dict[str, Any] = {
        "model": "qwen3:0.6b",
        "prompt_tokens": 12,
        "output_tokens": 34,
        "time_to_first_token": 0.051,
    }
    shown = "200  POST /v1/chat/completions  1.23 s  qwen3:0.6b  12 + 34 tokens, first after 0.05 s"
    assert line("request", **fields, **usage) == shown
    fields |= {"status": 404, "error": "not_found"}
    assert line("request", **fields).endswith("1.23 s  not_found")


def test_other_records_have_level_and_fields_without_control_characters() -> None:
    assert line("draining", seconds=30.0) == "draining: seconds 30.0"
    assert line("odd", logging.WARNING, field="\x1b[2J") == "warning: odd: field ␛[2J"


@pytest.mark.parametrize(
    ("terminal", "erases", "erase"), [(True, True, "\x1b[K"), (True, False, ""), (False, True, "")]
)
def test_record_erases_a_longer_status_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, erases: bool, erase: str
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    handler = StderrHandler(erases=erases)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.handle(logging.LogRecord("ferrule.server", logging.INFO, "x.py", 1, "short", None, None))
    assert stream.getvalue() == f"{erase}short\n"


def test_banner_lists_what_the_settings_enable() -> None:
    shown = banner("http://h:1", ["a", "b"], ServerSettings(ollama=True, root_path="/llm"), 3 << 30)
    assert "http://h:1/llm/v1\n" in shown
    assert "http://h:1/llm/api\n" in shown
    assert "a, b" in shown
    assert re.search(r"Memory +[\d.]+ \w+B", shown)
    less = banner("http://h:1", ["a"], ServerSettings(page=False, api_keys=["k"]), None)
    assert "Ollama" not in less
    assert "Memory" not in less
    assert "Chat page" not in less
    assert re.search(r"API key +required", less)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/My-Model-Q4_K_M.gguf", "My-Model-Q4_K_M"),
        ("./models/llama", "llama"),
        ("models/llama/", "llama"),
        ("org/repo:Q4_K_M", "org/repo:Q4_K_M"),
        ("qwen3", "qwen3:0.6b"),
    ],
)
def test_model_has_short_name_in_requests(
    model: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_name(model) == name


def test_server_on_a_terminal(tmp_path: Path) -> None:
    model = shutil.copytree(TINY, tmp_path / "my-model")
    with Terminal([sys.executable, "-m", "ferrule", "serve", str(model), "--port", "0"], size=(40, 120)) as terminal:
        loading = terminal.read_until("\n")
        assert "loading my-model for http://127.0.0.1:" in loading
        url = loading.strip().rpartition(" ")[2]
        assert f"Ollama     {url}/api" in terminal.read_until("Ctrl-C stops the server.")
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            assert [each["id"] for each in json.load(response)["data"]] == ["my-model"]
        with urllib.request.urlopen(f"{url}/api/tags") as response:
            assert response.status == 200
        assert "200  GET /v1/models" in terminal.read_until("/api/tags")
