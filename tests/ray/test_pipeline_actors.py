"""Pipeline stages in actors of a Ray cluster (`distributed_executor_backend="ray"`)."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from conftest import TINY
from ferrule import LLM, EngineArgs, EngineError, ModelNotFoundError, PipelineStageError, SamplingParams
from ferrule._loading import read_model_files
from ferrule._pipeline import ray_actors
from ferrule._pipeline.ray_actors import StageActor, StageActors
from test_invariance import bits

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("ray_driver")]

TWO_ACTORS = EngineArgs(pipeline_parallel_size=2, threads=1, distributed_executor_backend="ray")
ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
PROMPTS = [f"The capital of {country} is" for country in ("France", "Japan", "Italy", "Peru")]


def processes_of_actors() -> list[int]:
    """Returns the process ids of the stages in the cluster."""
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
    with LLM.from_engine_args(TWO_ACTORS) as llm:
        assert [bits(output.outputs[0]) for output in llm.generate(PROMPTS, params)] == expected
        assert [stage["layers"] > 0 for stage in llm.info()["pipeline_stages"]] == [True, True]


def test_actors_that_cannot_be_placed_or_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = read_model_files(TINY).spec
    layers = [(0, 1), (1, len(spec.layers))]

    def load() -> None:
        with closing(StageActors(TWO_ACTORS, str(tmp_path / "missing"), spec.to_json(), layers)) as stages:
            stages.wait_until_loaded()

    with pytest.raises(ModelNotFoundError):
        load()
    monkeypatch.setattr(ray_actors, "PLACEMENT_SECONDS", 0.1)
    with pytest.raises(EngineError, match="no room for 2 pipeline stages with 512 CPUs each within 0 s; set threads"):
        LLM(pipeline_parallel_size=2, threads=512, distributed_executor_backend="ray")
