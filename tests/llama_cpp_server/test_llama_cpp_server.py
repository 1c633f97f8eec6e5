"""llama.cpp's own server tests, from the sources in llama-cpp-python, against `ferrule serve`.

`remaining.toml` has the modules that run, and of each the tests that do not pass with the reason; and the modules that
do not run. FERRULE_SLOW enables this test; it needs PyPI.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from llama_cpp_server.models import write_models

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        "FERRULE_SLOW" not in os.environ,
        reason="downloads llama.cpp's tests from PyPI; set FERRULE_SLOW to run it",
    ),
]

VERSION = "0.3.36"
ROOT = f"llama_cpp_python-{VERSION}/vendor/llama.cpp"
MODELS = f"{ROOT}/models"
PARTS = (f"{ROOT}/tools/server/tests/", f"{MODELS}/ggml-vocab-bert-bge.gguf", f"{MODELS}/templates/")
"""Parts of the source distribution that the tests need."""
REMAINING = tomllib.loads((Path(__file__).parent / "remaining.toml").read_text())
RUN: dict[str, dict[str, str]] = {module: names for module, names in REMAINING.items() if isinstance(names, dict)}
"""Modules that run, with the tests that do not pass."""
SECONDS = 1800


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama.cpp's sources, as far as the tests need them."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    name = "llama-cpp-python"
    options = ("--quiet", "--no-deps", "--no-binary", name, "--dest", folder)
    subprocess.run([sys.executable, "-m", "pip", "download", *options, f"{name}=={VERSION}"], check=True)
    with tarfile.open(folder / f"llama_cpp_python-{VERSION}.tar.gz") as archive:
        members = [member for member in archive if member.name.startswith(PARTS)]
        archive.extractall(folder, members, filter="data")
    return folder / ROOT


def test_server_tests_pass(sources: Path, tmp_path: Path) -> None:
    tests = sources / "tools" / "server" / "tests"
    assert {path.stem for path in (tests / "unit").glob("test_*.py")} == REMAINING.keys()
    models = write_models(tmp_path, sources / "models" / "ggml-vocab-bert-bge.gguf")
    shim = {"ferrule": [sys.executable, "-m", "ferrule"], "models": models, "remaining": RUN}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "SHIM": json.dumps(shim)}
    modules = [f"unit/{module}.py" for module in RUN]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "llama_cpp_server.shim", "-m", "not slow", *modules],
        cwd=tests,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
