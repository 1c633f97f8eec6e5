"""Fixtures shared by several test files."""

from __future__ import annotations

import gc
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

import fakes
import ferrule
import ray_head
from ferrule import LLM
from ferrule._engine.driver import Driver, Inbox, Work
from ferrule._loading import packing
from ferrule._loading.cache_home import DIRECTORY
from ferrule._loading.packed_cache import LIMIT, PackedCache
from two_hosts import TwoHosts, two_hosts

PARITY = pytest.StashKey[list[tuple[str, str, float, bool]]]()
"""Case, format, distance from the golden logits, whether the greedy continuations are equal."""

# Outside CI, Hypothesis fails examples above 200 ms and slow generation of examples, as a busy machine causes them.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

WAITING = re.compile(
    r"(cli|clients|hub|llama_cpp_server|ray|server)/|test_(async_\w+|docs_run|embedded|pipeline|process|threads)\.py"
)
"""Test files that wait for processes, servers, terminals, browsers or threads."""
RAY_SECONDS = 600
"""Timeout for the start and for the end of a Ray cluster, in seconds."""

TINY = Path(ferrule.__file__).parent / "models" / "tiny"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps tests from the user's packed files, history and models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("FERRULE_CACHE", str(tmp_path_factory.mktemp("ferrule")))
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Exempts the objects of imported modules and earlier tests from collections, which would visit them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ray_cluster(own_cache: None) -> Iterator[str]:
    """Address of a Ray cluster on this host with two CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_head.SETTINGS.items():
            patch.setenv(name, value)
        command = [sys.executable, ray_head.__file__]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
            assert head.stdin is not None
            assert head.stdout is not None
            # A head that hangs is killed, which ends the wait for its address.
            timer = threading.Timer(RAY_SECONDS, head.kill)
            timer.start()
            address = head.stdout.readline().strip()
            timer.cancel()
            assert address, "Ray did not start"
            yield address
            head.stdin.close()
            try:
                head.wait(RAY_SECONDS)
            except subprocess.TimeoutExpired:
                head.kill()


@pytest.fixture(scope="module")
def ray_driver(ray_cluster: str) -> Iterator[None]:
    """Connects this process to the Ray cluster."""
    import ray

    connect: Any = ray.init
    connect(ray_cluster, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def hosts(own_cache: None) -> Iterator[TwoHosts]:
    """Two hosts, of which the first has the head of a Ray cluster."""
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a context in which a prefill takes seconds."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(TINY, folder)
    config = json.loads((TINY / "config.json").read_text()) | {"max_position_embeddings": 32_768}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """The work that engines get during the test."""
    submit, found = Driver.submit, list[Work]()

    def record(self: Driver, inbox: Inbox, work: Iterable[Work]) -> None:
        new = list(work)
        found.extend(new)
        submit(self, inbox, new)

    monkeypatch.setattr(Driver, "submit", record)
    return found


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> type[fakes.Engine]:
    """A fake engine in place of the native one; its class attributes set its behavior."""

    class Engine(fakes.Engine):
        pass

    module = fakes.module(Engine)
    monkeypatch.setitem(sys.modules, "ferrule._native", module)
    monkeypatch.setattr(ferrule, "_native", module, raising=False)
    return Engine


@pytest.fixture
def engine(fake_engine: type[fakes.Engine]) -> Iterator[type[fakes.Engine]]:
    """The fake engine for tests of AsyncLLM; checks that no thread is left."""
    yield fake_engine
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "ferrule-engine"]


@pytest.fixture
def llm(fake_engine: type[fakes.Engine]) -> Iterator[LLM]:
    """The embedded model's tokenizer and configuration on a fake engine."""
    with LLM(seed=0) as llm:
        yield llm


@pytest.fixture
def engine_of(fake_engine: type[fakes.Engine]) -> Callable[[LLM], fakes.Engine]:
    """Returns the fake engine of an LLM."""

    def engine_of(llm: LLM) -> fakes.Engine:
        engine: Any = llm._driver._engine
        assert isinstance(engine, fakes.Engine)
        return engine

    return engine_of


@pytest.fixture
def packed_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedCache:
    """An empty cache of packed weights that also stores small models."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "cache"))
    monkeypatch.delenv(LIMIT, raising=False)
    monkeypatch.setattr(packing, "SMALLEST", 0)
    return PackedCache.open()


@pytest.fixture
def model_with(tmp_path: Path) -> Callable[..., Path]:
    """Creates a model directory without weights: the embedded model's config.json with changed values."""

    def make(changes: dict[str, object] | None = None, *, without: tuple[str, ...] = (), **files: str) -> Path:
        config = json.loads((TINY / "config.json").read_text()) | (changes or {})
        for field in without:
            del config[field]
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(content)
        return tmp_path

    return make


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds an option to divide the tests among processes."""
    parser.addoption("--share", default="0/1", help="run share K of N alone, as K/N: each test is in one of N shares")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the tests of --share, and runs a failed test of WAITING once more, since a busy machine can starve it.

    The report shows its first traceback below RERUN: a test or a part of ferrule to mend.
    """
    share, shares = map(int, str(config.getoption("share")).split("/"))
    by_share: list[list[pytest.Item]] = [[] for _ in range(shares)]
    for item in items:
        by_share[crc32(item.nodeid.encode()) % shares].append(item)
    items[:] = by_share.pop(share)
    if others := [item for items in by_share for item in items]:
        config.hook.pytest_deselected(items=others)
    for item in items:
        if WAITING.match(item.path.relative_to(Path(__file__).parent).as_posix()):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Sends the tests of Ray to one process, since a Ray cluster is slow to start and uses both processors."""
    from xdist.scheduler import LoadFileScheduling  # pyright: ignore[reportMissingTypeStubs]

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ray" if file.startswith("tests/ray/") else file

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the distances from the golden logits after the tests."""
    rows = config.stash.get(PARITY, [])
    if not rows:
        return
    terminalreporter.section("parity with transformers")
    terminalreporter.write_line(f"{'case':16} {'format':15} {'max |difference| / max |logit|':>32}  greedy")
    for case, quantization, distance, equal in rows:
        terminalreporter.write_line(f"{case:16} {quantization:15} {distance:32.2e}  {'equal' if equal else 'differs'}")
