"""`ferrule pull`, `list` and `rm`: downloaded models of the hub; each case runs in separate processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.terminal import Terminal
from hub.server import COMMIT, Hub, Repository
from hub.test_hub import FILES, GGUFS

TESTS = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "ferrule"]
LARGE = b"weights " * 2_000_000


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    repositories = {
        "org/model": Repository(FILES),
        "org/large": Repository(FILES | {"model.safetensors": LARGE}, slow=frozenset({"model.safetensors"})),
        "org/gguf": Repository({"README.md": b"#", **GGUFS, "other-UD-Q8_0.gguf": b"another"}),
    }
    with Hub(repositories) as hub:
        yield hub


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    hub.requests.clear()
    base = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}
    return base | settings | {"FERRULE_CACHE": str(tmp_path / "packed")}


def ferrule(environment: dict[str, str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """Returns the output of a command on stdout and stderr."""
    process = subprocess.run(
        [*COMMAND, *arguments], env=environment, cwd=TESTS, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == code, process.stderr
    return process.stdout, process.stderr


def names(environment: dict[str, str]) -> list[str]:
    return sorted(model["name"] for model in json.loads(ferrule(environment, "list", "--json")[0])["models"])


def test_pull_prints_path_of_model(hub: Hub, environment: dict[str, str]) -> None:
    out, err = ferrule(environment, "pull", "org/model")
    assert out.strip() == f"{environment['HF_HOME']}/hub/models--org--model/snapshots/{COMMIT}"
    assert err == "org/model: weights of 25 B\n"
    hub.requests.clear()
    assert ferrule(environment, "pull", "org/model", "--quiet") == (out, "")
    assert not hub.downloads()
    hub.requests.clear()
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    assert ferrule(offline, "pull", "org/model") == (out, err)
    assert "error: org/gguf" in ferrule(offline, "pull", "org/gguf:Q8_0", code=1)[1]
    assert hub.requests == []


def test_pull_downloads_one_quantization(hub: Hub, environment: dict[str, str]) -> None:
    out, _ = ferrule(environment, "pull", "org/gguf:Q4_0")
    assert out.strip().endswith("model-Q4_0-00001-of-00002.gguf")
    assert hub.downloads() == {"model-Q4_0-00001-of-00002.gguf", "model-Q4_0-00002-of-00002.gguf"}
    _, err = ferrule(environment, "pull", "org/gguf", code=1)
    assert "one by its quantization, as in org/gguf:Q4_K_M" in err
    assert "error: org/nothing: model not found" in ferrule(environment, "pull", "org/nothing", code=1)[1]


def test_pull_shows_progress(environment: dict[str, str]) -> None:
    with Terminal([*COMMAND, "pull", "org/large"], environment) as terminal:
        terminal.read_until("%")
        terminal.read_until(COMMIT)
        assert terminal.end() == 0


def test_ctrl_c_cancels_download(hub: Hub, environment: dict[str, str]) -> None:
    """The download takes 3 seconds; it is interrupted at its next chunk of 10 MB."""
    process = subprocess.Popen([*COMMAND, "pull", "org/large"], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 180
    while "model.safetensors" not in hub.downloads():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted; the same command downloads the remaining files" in errors
    assert b"Traceback" not in errors
    snapshot = Path(environment["HF_HOME"], "hub", "models--org--large", "snapshots", COMMIT)
    assert not (snapshot / "model.safetensors").exists()
    hub.requests.clear()
    ferrule(environment, "pull", "org/large")
    assert hub.downloads() == {"model.safetensors"}


def test_list_and_rm(environment: dict[str, str]) -> None:
    assert ferrule(environment, "list")[0].startswith("0 models, 0 B\n")
    for name in ("org/model", "org/gguf:model-Q8_0", "org/gguf:Q4_0", "org/gguf:UD-Q8_0"):
        ferrule(environment, "pull", name)
    assert names(environment) == ["org/gguf:Q4_0", "org/gguf:model-Q8_0", "org/gguf:other-UD-Q8_0", "org/model"]
    out, _ = ferrule(environment, "list")
    assert "org/gguf:Q4_0\n    downloaded, 29 B, used just now\n" in out
    assert "\n4 models, " in out
    blobs = Path(environment["HF_HOME"], "hub", "models--org--gguf", "blobs")
    assert len(list(blobs.iterdir())) == 4
    assert ferrule(environment, "rm", "org/gguf:Q4_0")[1] == "1 removed, 29 B\n"
    assert len(list(blobs.iterdir())) == 2
    assert names(environment) == ["org/gguf:model-Q8_0", "org/gguf:other-UD-Q8_0", "org/model"]
    _, err = ferrule(environment, "rm", "org/gguf:Q4_0", code=2)
    assert "'org/gguf:Q4_0' is not in the cache, which has " in err
    assert "org/model" in err
    ferrule(environment, "rm", "org/gguf", "org/model", "--yes")
    assert names(environment) == []
    assert not blobs.parent.exists()


def test_rm_packed_keeps_downloaded_model(environment: dict[str, str]) -> None:
    ferrule(environment, "pull", "org/model")
    assert "is not in the cache, which has nothing" in ferrule(environment, "rm", "--packed", "org/model", code=2)[1]
    ferrule(environment, "rm", "--all")
    assert names(environment) == ["org/model"]


def test_rm_asks_for_confirmation_on_terminal(environment: dict[str, str]) -> None:
    ferrule(environment, "pull", "org/model")
    for answer, code, left in (("n", 130, ["org/model"]), ("y", 0, [])):
        with Terminal([*COMMAND, "rm", "org/model"], environment) as terminal:
            terminal.read_until("Remove org/model")
            terminal.send(f"{answer}\n")
            assert terminal.end() == code
        assert names(environment) == left
