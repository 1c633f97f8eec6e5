"""Models over several processes (pipeline stages, tensor parallelism): output, lost workers, and limits."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from conftest import TINY
from ferrule import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineError,
    InvalidParameterError,
    MissingDependencyError,
    PipelineStageError,
    SamplingParams,
    UnsupportedModelError,
    UnsupportedTaskError,
)
from ferrule._engine.encoding.queue import EncodeQueue, Portion
from ferrule._loading import read_model_files
from ferrule._params.options import LONGEST_STEP, EngineOptions
from ferrule._pipeline import worker
from ferrule._pipeline.connections import HELLO, Listener, connect
from ferrule._pipeline.processes import StageProcesses
from ferrule._pipeline.stages import StageArguments
from ferrule._text.prompt import TokensPrompt
from lora_files import random_adapter
from test_batch_invariance import FEW_PAGES, PAGE_TOKENS
from test_invariance import GOLDEN, alone, bits, load, params, prompts

pytestmark = pytest.mark.native

ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
TWO_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "threads": 1}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "threads": 1}
SECONDS = 300.0
"""Timeout for the end of a process, in seconds."""


def stage_processes() -> list[int]:
    """Returns the process ids of the workers of this process, first to last."""
    children: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            children += map(int, path.read_text().split())
    stages: list[tuple[int, int]] = []
    for pid in children:
        with suppress(FileNotFoundError, ProcessLookupError):
            started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
            if worker.__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                stages.append((started, pid))
    return [pid for _, pid in sorted(stages)]


def wait_until_ended(pid: int) -> None:
    """Waits until a process has ended; as an orphan, it may remain as a zombie."""
    deadline = time.monotonic() + SECONDS
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {pid} has not ended"
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("model", "formats", "stages", "ranks"),
    [
        ("tiny", ("int4", "int8"), 3, 1),
        ("qwen2_moe", ("int8", "auto"), 2, 1),
        ("lfm2", ("f32", "auto"), 2, 1),
        ("tiny", ("int4", "int8"), 1, 3),
        ("qwen2_moe", ("int8", "auto"), 1, 2),
        ("lfm2", ("f32", "auto"), 2, 2),
        # Mixers, and int8 keys and values of divided heads.
        ("tiny", ("int4", "int8"), 1, 2),
        ("deepseek_v3", ("bf16", "int8"), 1, 2),  # latent attention
        ("qwen3_5_text", ("int8", "auto"), 1, 2),  # delta nets, gated attention
        ("nemotron_h", ("int4", "int8"), 1, 2),  # Mamba 2, experts on a latent
        ("gpt_oss", ("int8", "auto"), 1, 2),  # sinks
        ("bloom", ("int8", "auto"), 1, 2),  # ALiBi
        ("zamba2", ("int4", "int8"), 1, 2),  # weights that layers share
    ],
)
def test_output_equals_that_of_one_process(model: str, formats: tuple[str, str], stages: int, ranks: int) -> None:
    with load(model, formats, 64, 1) as llm:
        whole = llm.info()
    given, sampling = prompts(model), [params(number) for number in range(8)]
    with load(model, formats, 64, 1, pipeline_parallel_size=stages, tensor_parallel_size=ranks) as llm:
        info = llm.info()
        assert [bits(output.outputs[0]) for output in llm.generate(given, sampling)] == alone(model, formats)
        assert len(stage_processes()) == stages * ranks
        # The cached prefixes are in the stages.
        assert [bits(output.outputs[0]) for output in llm.generate(given, sampling)] == alone(model, formats)
        assert llm.metrics().prefix_hits_tokens > 0
    assert stage_processes() == []
    assert [part["rank"] for part in info["workers"]] == [*range(ranks)] * stages
    parts = [part for part in info["workers"] if part["rank"] == 0]
    assert [part["first_layer"] for part in parts[1:]] == [part["first_layer"] + part["layers"] for part in parts[:-1]]
    assert sum(part["layers"] for part in parts) == whole["layers"]
    # Each matrix is in one stage; several workers of a stage may have the same small matrices.
    of_stages, of_whole = sum(part["weight_bytes"] for part in parts), whole["weight_bytes"] + whole["vector_bytes"]
    assert of_stages == of_whole if ranks == 1 else of_stages < of_whole
    assert whole["workers"] == []


@pytest.mark.parametrize("several", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_preemption_and_speculation(several: str) -> None:
    formats = ("int4", "int8")
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5, "adaptive": False}
    with load("tiny", formats, 64, 1) as llm:
        page_bytes = PAGE_TOKENS * llm.info()["kv_bytes_per_token"]
    # With the largest `target_itl`, the schedule does not depend on the time that steps take.
    few = {"kv_cache_memory": FEW_PAGES * page_bytes, "speculative_config": drafts, "target_itl": LONGEST_STEP}
    with load("tiny", formats, 64, 1, **{several: 2}, **few) as llm:
        # Each sequence begins with one page and ends with two.
        given: list[TokensPrompt] = [{"prompt_token_ids": [7 + number] * 15} for number in range(2 * FEW_PAGES)]
        sampling = [params(number) for number in range(2 * FEW_PAGES)]
        outputs = llm.generate(given, sampling)
        metrics = llm.metrics()
    assert metrics.preemptions > 0
    assert 0 < metrics.accepted_tokens < metrics.drafted_tokens
    assert metrics.pages_free == metrics.pages_total
    with load("tiny", formats, 512, 1) as llm:
        assert [bits(output.outputs[0]) for output in outputs] == [
            bits(output.outputs[0]) for output in llm.generate(given, sampling)
        ]


def test_each_of_two_batches_has_half_of_the_requests() -> None:
    given: list[TokensPrompt] = [{"prompt_token_ids": [7 + number] * 3} for number in range(8)]
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(**TWO_STAGES) as llm:
        llm.generate(given, sampling, use_tqdm=False)
        metrics = llm.metrics()
    assert metrics.steps == 2 * 64
    assert metrics.step_tokens.sum == 8 * (3 + 63)


@pytest.mark.parametrize(
    ("several", "worker", "stage"),
    [(TWO_STAGES, "pipeline stage 1", 1), (TWO_RANKS, "pipeline stage 0, tensor-parallel rank 1", 0)],
)
def test_killed_worker_ends_requests_and_engine(several: dict[str, Any], worker: str, stage: int) -> None:
    with LLM(**several) as llm:
        stream = llm.stream("Once", ENDLESS)
        next(stream)
        os.kill(stage_processes()[1], signal.SIGKILL)
        with pytest.raises(PipelineStageError, match=f"{worker}: the connection ended") as caught:
            list(stream)
        assert caught.value.stage == stage
        with pytest.raises(PipelineStageError, match=worker):
            llm.generate("Once", ENDLESS)
    assert stage_processes() == []


def test_killed_stage_ends_every_stream() -> None:
    async def read(llm: AsyncLLM, started: asyncio.Barrier) -> int:
        stream = llm.stream("Once", ENDLESS)
        await anext(stream)
        await started.wait()
        try:
            async for _ in stream:
                pass
        except PipelineStageError as error:
            return error.stage
        return -1

    async def run() -> None:
        async with AsyncLLM(**TWO_STAGES) as llm:
            [first, _] = stage_processes()
            started = asyncio.Barrier(3)
            readers = [asyncio.create_task(read(llm, started)) for _ in range(2)]
            await started.wait()
            os.kill(first, signal.SIGKILL)
            assert await asyncio.gather(*readers) == [0, 0]
            with pytest.raises(EngineError, match="pipeline stage 0"):
                await llm.check_health()

    asyncio.run(run())
    assert stage_processes() == []


async def failure_of(llm: AsyncLLM) -> PipelineStageError:
    """Waits until the engine is unhealthy because of a lost stage, and returns the error."""
    while True:
        try:
            await llm.check_health()
        except PipelineStageError as error:
            return error
        await asyncio.sleep(0.01)


def test_stage_killed_while_the_engine_is_idle_is_noticed() -> None:
    async def run() -> None:
        async with AsyncLLM(**TWO_STAGES) as llm:
            await llm.check_health()
            os.kill(stage_processes()[1], signal.SIGKILL)
            error = await asyncio.wait_for(failure_of(llm), SECONDS)
            assert "pipeline stage 1: the connection ended" in str(error)
            for request in (llm.embed("Once"), anext(llm.stream("Once"))):
                with pytest.raises(PipelineStageError) as caught:
                    await request
                assert caught.value.stage == 1

    asyncio.run(run())
    assert stage_processes() == []


def test_waiting_embeddings_get_the_error_of_a_lost_stage() -> None:
    async def run() -> None:
        waiting = EncodeQueue()
        portion = Portion([], "embed", 0)
        waiting.put(portion)
        waiting.close(PipelineStageError("pipeline stage 1 is lost", 1))
        with pytest.raises(PipelineStageError, match="pipeline stage 1 is lost"):
            await portion.answer
        with pytest.raises(PipelineStageError, match="pipeline stage 1 is lost"):
            waiting.put(portion)

    asyncio.run(run())


def whole_stage() -> StageArguments:
    spec, options = read_model_files(TINY).spec.to_json(), EngineOptions(threads=1).to_json()
    part = {"layers": (0, 1), "stage": (0, 1), "rank": 0, "sharers": 1}
    return cast("StageArguments", {"spec": spec, "weights": str(TINY), "options": options, **part})


def test_stage_that_cannot_be_loaded() -> None:
    arguments = whole_stage()
    cases: list[tuple[Any, type[Exception]]] = [
        ({"layers": (0, 99)}, UnsupportedModelError),
        ({"stage": (2, 2)}, UnsupportedModelError),
        ({"spec": "{}"}, ConfigError),
        ({"options": '{"threads": 0}'}, InvalidParameterError),
    ]
    for wrong, error in cases:
        invalid: Any = {**arguments, **wrong}
        stages = StageProcesses([arguments, invalid], 1)
        with pytest.raises(error):
            stages.wait_until_loaded()
        stages.close()
    assert stage_processes() == []


def test_processes_with_too_many_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    arguments = whole_stage()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        with pytest.raises(EngineError, match=r"cannot start 32 workers .*tensor_parallel_size=32\): .*Too many open"):
            StageProcesses([{**arguments, "rank": rank} for rank in range(32)], 1, 32)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert stage_processes() == []


def test_stage_that_dies_before_it_has_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -KILL $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(PipelineStageError, match=r"pipeline stage [01] ended while it loaded \(exit status -9\)"):
        LLM(**TWO_STAGES)


PROGRAM = """
import os, signal, sys
from ferrule import EngineError, LLM, SamplingParams
llm = LLM(pipeline_parallel_size=2, threads=1)
greedy = SamplingParams(temperature=0, max_tokens=8)
expected = llm.generate("The capital of France is", greedy)[0].outputs[0].text
child = os.fork()
if child == 0:
    try:
        llm.generate("The capital of France is", greedy)
    except EngineError as error:
        assert "stages belong to the parent" in str(error)
        sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert llm.generate("The capital of France is", greedy)[0].outputs[0].text == expected
print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["exit", "killed"])
def test_stages_end_with_their_process_and_survive_a_fork(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, end], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == (0 if end == "exit" else -signal.SIGKILL), done.stderr
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2
    for pid in workers:
        wait_until_ended(pid)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_modules", {"a": "adapter"}),
        ("prefix_cache_dir", "pages"),
        ("speculative_config", {"model": str(TINY), "num_speculative_tokens": 2}),
    ],
)
def test_options_that_stages_do_not_support(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match="not supported with pipeline_parallel_size above 1") as caught:
        LLM(pipeline_parallel_size=2, **{field: value})
    assert caught.value.field.startswith(field)


def test_invalid_numbers_of_stages_and_backends() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer from 1 to 1024, got 0"),
        ({"pipeline_parallel_size": 99}, r"must be an integer from 1 to \d+ for this model, got 99"),
        ({"distributed_executor_backend": "gloo"}, "must be one of mp, ray, uni, got 'gloo'"),
        (
            {"distributed_executor_backend": "uni", "pipeline_parallel_size": 2},
            "must be mp or ray with pipeline_parallel_size above 1, got 'uni'",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer from 1 to 1024, got 0"),
        ({"tensor_parallel_size": 999}, r"must be an integer from 1 to \d+ for this model .*, got 999"),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
            "must be mp or ray with tensor_parallel_size above 1, got 'uni'",
        ),
    ]
    for options, message in cases:
        with pytest.raises(InvalidParameterError, match=message):
            LLM(**options)


@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_ray_backend_without_ray(engine: type[LLM | AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    message = re.escape("distributed_executor_backend='ray' requires Ray: pip install 'ferrule[ray]'")
    for options in (TWO_STAGES, TWO_RANKS):
        with pytest.raises(MissingDependencyError, match=message):
            engine(**options, distributed_executor_backend="ray")


def test_methods_that_stages_do_not_support(tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path / "adapter", TINY)
    with LLM(**TWO_STAGES) as llm:
        with pytest.raises(UnsupportedTaskError, match="adapters are not supported with pipeline or tensor"):
            llm.load_lora_adapter("a", adapter)
        with pytest.raises(UnsupportedTaskError, match="not supported with pipeline or tensor parallelism"):
            llm.save_state("Once upon a time")
    with pytest.raises(UnsupportedModelError, match="do not support bidirectional attention"):
        LLM(GOLDEN.parent / "encoders" / "bert", **TWO_STAGES)


def test_strangers_do_not_become_stages() -> None:
    with Listener("127.0.0.1") as listener:
        address, token = (listener.destination.host, listener.destination.port), listener.destination.token
        hellos = [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, HELLO.pack(bytes(32), 0), HELLO.pack(token, 1)]
        strangers = [socket.create_connection(address, SECONDS) for _ in hellos]
        for stranger, hello in zip(strangers, hellos, strict=True):
            stranger.sendall(hello)
        workers = [connect(listener.destination, worker, SECONDS) for worker in (3, 2)]
        accepted = listener.accept((2, 3), SECONDS, lambda: None)
        assert [each.getpeername() for each in accepted] == [each.getsockname() for each in reversed(workers)]
        for stranger in strangers:
            stranger.settimeout(SECONDS)
            with suppress(ConnectionResetError):  # it has sent more than was read
                assert stranger.recv(1) == b""
        for connection in (*strangers, *workers, *accepted):
            connection.close()


def test_stages_that_do_not_connect() -> None:
    def check() -> None:
        raise PipelineStageError("pipeline stage 1 ended", 1)

    with Listener("127.0.0.1") as listener:
        with connect(listener.destination, 0, SECONDS), pytest.raises(EngineError, match=r"within 0 s: (0, )?1"):
            listener.accept(range(2), 0.4, lambda: None)
        with pytest.raises(PipelineStageError, match="pipeline stage 1 ended"):
            listener.accept(range(2), SECONDS, check)
