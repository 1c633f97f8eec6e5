"""Programs of other clients' users run against a live server, each in its own venv from PyPI.

A program names its dependencies as a script does (PEP 723), with the version of the client and a date for the rest. uv
installs them and keeps the venvs and the wheels in its cache. FERRULE_SLOW enables these tests; they need PyPI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from clients.scripted_model import ScriptedLLM
from ferrule.server import ServerSettings
from server.live import Live, serving

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        "FERRULE_SLOW" not in os.environ, reason="installs clients from PyPI; set FERRULE_SLOW to run it"
    ),
]

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
UV = Path(sys.executable).parent / "uv"
INSTALL_SECONDS, RUN_SECONDS = 600, 300
ENVIRONMENT = {
    "UV_SYSTEM_CERTS": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
"""The clients' own requests to the internet are disabled."""
INSTALLERS = 4
"""Venvs that are installed at once; downloads take most of the time."""


def run_uv(*words: str | Path, seconds: int) -> None:
    """Runs uv without the environment of these tests, such as PYTHONPATH and API keys."""
    kept = ("HOME", "PATH", "UV_CACHE_DIR", "UV_HTTP_RETRIES")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    done = subprocess.run(
        [UV, *words], env=environment | ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def install(program: Path) -> None:
    run_uv("sync", "--python", sys.executable, "--script", program, seconds=INSTALL_SECONDS)


@pytest.fixture(scope="module")
def installed() -> Iterator[dict[Path, Future[None]]]:
    """The installations of all programs, which run while the first programs do."""
    with ThreadPoolExecutor(INSTALLERS) as pool:
        yield {program: pool.submit(install, program) for program in PROGRAMS}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def live(long_model: Path) -> Iterator[Live]:
    """A server that refuses unknown fields. Agents have longer prompts than the context of the embedded model."""
    with serving(
        ServerSettings(ollama=True, unknown_fields="reject"), llm=lambda: ScriptedLLM(str(long_model))
    ) as live:
        yield live


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem.removesuffix("_client"))
def test_client(program: Path, live: Live, installed: dict[Path, Future[None]]) -> None:
    installed[program].result()
    run_uv("run", "--offline", "--python", sys.executable, "--script", program, live.url, "tiny", seconds=RUN_SECONDS)
