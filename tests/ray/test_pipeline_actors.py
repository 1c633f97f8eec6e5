"""Models in several actors of a Ray cluster (`distributed_executor_backend="ray"`)."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import ray.exceptions

from conftest import TINY
from ferrule import (
    LLM,
    EngineArgs,
    EngineError,
    InsufficientMemoryError,
    ModelNotFoundError,
    PipelineStageError,
    SamplingParams,
)
from ferrule._loading import read_model_files
from ferrule._pipeline import ray_actors
from ferrule._pipeline.ray_actors import StageActor, StageActors
from ferrule._pipeline.stages import LOGGER
from ray_server import SECONDS
from serve_process import served
from server.live import until
from test_invariance import bits

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("ray_driver")]

TWO_ACTORS = EngineArgs(pipeline_parallel_size=2, threads=1, distributed_executor_backend="ray")
TWO_RANKS = EngineArgs(tensor_parallel_size=2, threads=1, distributed_executor_backend="ray")
ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
PROMPTS = [f"The capital of {country} is" for country in ("France", "Japan", "Italy", "Peru")]


def processes_of_actors() -> list[int]:
    """Returns the process ids of the workers in the cluster."""
    from ray._private.state import actors

    found = cast("dict[str, dict[str, Any]]", actors())
    return [
        each["Pid"]
        for each in found.values()
        if each["State"] == "ALIVE" and each["ActorClassName"] == StageActor.__name__
    ]


def test_killed_actor_and_a_new_engine_with_the_output_of_one_process() -> None:
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=8, logprobs=5)
    with LLM() as llm:
        expected = [bits(output.outputs[0]) for output in llm.generate(PROMPTS, params)]
    with LLM.from_engine_args(TWO_ACTORS) as llm:
        stream = llm.stream("Once", ENDLESS)
        next(stream)
        first, _ = processes_of_actors()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(PipelineStageError, match=r"pipeline stage [01]: the connection ended"):
            list(stream)
    # Its CPUs are free again.
    for args in (TWO_ACTORS, TWO_RANKS):
        with LLM.from_engine_args(args) as llm:
            assert [bits(output.outputs[0]) for output in llm.generate(PROMPTS, params)] == expected
            workers = llm.info()["workers"]
            assert [worker["layers"] > 0 for worker in workers] == [True, True]
            assert [worker["rank"] for worker in workers] == [0, args.tensor_parallel_size - 1]


def test_server_starts_lost_actors_again(ray_cluster: str, long_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    backend = ("--distributed-executor-backend", "ray", "--pipeline-parallel-size", "2", "--threads", "1")
    command = ("-m", "ferrule", "serve", str(long_model), "--port", "0", *backend)
    with (
        served(*command, stop_within=SECONDS) as url,
        httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client,
    ):

        def answer() -> object:
            request = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0}
            return client.post("/v1/completions", json=request).json()["choices"]

        def has_status(status: int) -> Callable[[], bool]:
            return lambda: client.get("/health").status_code == status

        expected, (first, _) = answer(), processes_of_actors()
        endless = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(first, signal.SIGKILL)
            rest = "\n".join(lines)
        assert '"code": "engine_unavailable"' in rest
        assert "pipeline stage" in rest
        until(has_status(503), SECONDS)
        until(has_status(200), SECONDS)
        assert answer() == expected
        assert first not in processes_of_actors()


@pytest.mark.parametrize(
    ("cpus", "stages", "ranks", "threads", "together"),
    [
        ([8, 8], 2, 2, 4, 2),
        ([16], 2, 2, 4, 2),
        ([8, 8], 2, 2, 5, 1),
        ([8, 4, 4], 2, 2, 4, 1),
        ([8, 8], 2, 1, 4, 1),
        ([8, 8], 1, 2, 4, 1),
    ],
)
def test_workers_of_a_stage_are_together_where_they_fit(
    cpus: list[int], stages: int, ranks: int, threads: int, together: int
) -> None:
    args = EngineArgs(pipeline_parallel_size=stages, tensor_parallel_size=ranks)
    assert ray_actors._workers_in_bundle(cpus, args, threads) == together


@pytest.mark.parametrize("several", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_actors_of_one_host_must_fit_its_memory_together(several: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class LimitedActor(StageActor):
        """Actor whose process has room for one half of the weights of llama-1b in int8, and not for both."""

        def __init__(self) -> None:
            super().__init__()
            found = re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
            size = int(found[1]) * 1024 if found else 0
            resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), resource.RLIM_INFINITY))

    monkeypatch.setattr(ray_actors, "StageActor", LimitedActor)
    arguments: dict[str, Any] = {several: 2, "threads": 1, "distributed_executor_backend": "ray"}
    with pytest.raises(InsufficientMemoryError) as raised:
        LLM.from_shape("llama-1b", quantization="int8", **arguments)
    found = re.match(
        r"the model needs (\d+) bytes for its packed weights, but only (\d+) bytes are available", str(raised.value)
    )
    assert found is not None, raised.value
    needs, available = map(int, found.groups())
    assert needs / 2 < available < needs


def test_ctrl_c_ends_the_wait_for_room() -> None:
    from ray.util import placement_group_table

    messages: list[str] = []

    class CtrlC(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            signal.raise_signal(signal.SIGINT)

    handler = CtrlC()
    LOGGER.addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            LLM(pipeline_parallel_size=2, threads=512, distributed_executor_backend="ray")
    finally:
        LOGGER.removeHandler(handler)
    [message] = messages
    assert "s for room in the Ray cluster for 2 workers with 512 CPUs each (it has 2 CPUs, " in message
    groups: Any = placement_group_table
    until(lambda: {group["state"] for group in groups().values()} <= {"REMOVED"}, SECONDS)


def test_errors_of_ray_are_causes_of_engine_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ray.exceptions.RaySystemError("the head has ended")

    monkeypatch.setattr(ray_actors, "placement_group", fail)
    with pytest.raises(EngineError, match=r"the Ray cluster failed: .*the head has ended") as raised:
        LLM.from_engine_args(TWO_ACTORS)
    assert isinstance(raised.value.__cause__, ray.exceptions.RaySystemError)


def test_actors_that_cannot_be_placed_or_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = read_model_files(TINY).spec
    layers = [(0, 1), (1, len(spec.layers))]

    def load() -> None:
        with closing(StageActors(TWO_ACTORS, str(tmp_path / "missing"), spec.to_json(), layers)) as stages:
            stages.wait_until_loaded()

    with pytest.raises(ModelNotFoundError):
        load()
    monkeypatch.setattr(ray_actors, "PLACEMENT_SECONDS", 0.1)
    found = r"it has 2 CPUs, [012] of them free; hosts: 1"
    with pytest.raises(EngineError, match=rf"no room for 2 .* with 512 CPUs each within 0 s \({found}\); set threads"):
        LLM(pipeline_parallel_size=2, threads=512, distributed_executor_backend="ray")
