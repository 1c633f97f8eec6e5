"""Two hosts: pipeline stages and ranks on them, and batches and servers that lose one of them.

FERRULE_TWO_HOSTS enables these tests, which take minutes. They need the command `ip` and the right to create network
namespaces.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import ray
import ray.data
from ray import serve

from cli.test_run_batch import chat_request, content_of, read, written
from ferrule import LLM, PipelineStageError, SamplingParams
from ferrule._batch import files
from ferrule._batch.answers import Answer
from ferrule._cli import main
from ferrule.ray import LLMPredictor, build_app
from ferrule.ray.batch_workers import BatchWorkers
from ray_streams import complete, completion, connected, generated, numbers_by_replica, streams_beside_a_loss
from test_batch_invariance import FEW_PAGES, PAGE_TOKENS
from test_invariance import alone, bits, load, params, prompts
from two_hosts import SECONDS, TwoHosts

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        "FERRULE_TWO_HOSTS" not in os.environ, reason="starts two Ray nodes; set FERRULE_TWO_HOSTS to run it"
    ),
]

ROWS = 200
"""Number of rows of a dataset."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32}
LOST = 20
"""Number of lines of the output after which a host is lost, once both have a model."""


def run_stages(head: str, first: str, second: str) -> None:
    """Runs models with a stage, or a rank, on each host; compares their output with one process, and kills one."""
    from ray._private.state import actors

    cast("Any", ray).init(head, _node_ip_address=first, log_to_driver=False)

    def stages() -> list[dict[str, Any]]:
        found = cast("dict[str, dict[str, Any]]", actors())
        return [each for each in found.values() if each["State"] == "ALIVE"]

    def check_addresses() -> None:
        assert {each["Address"]["IPAddress"] for each in stages()} == {first, second}

    stages_on_ray: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    ranks_on_ray: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    for model, formats, workers in (
        ("tiny", ("int4", "int8"), stages_on_ray),
        ("qwen2_moe", ("int8", "auto"), stages_on_ray),
        ("lfm2", ("f32", "auto"), stages_on_ray),
        ("lfm2", ("f32", "auto"), ranks_on_ray),
    ):
        with load(model, formats, 64, 1, **workers) as llm:
            check_addresses()
            outputs = llm.generate(prompts(model), [params(number) for number in range(8)])
        assert [bits(output.outputs[0]) for output in outputs] == alone(model, formats), model

    with load("tiny", ("int4", "int8"), 64, 1) as llm:
        page_bytes = PAGE_TOKENS * llm.info()["kv_bytes_per_token"]
    given: Any = [{"prompt_token_ids": [7 + number] * 15} for number in range(2 * FEW_PAGES)]
    sampling = [params(number) for number in range(2 * FEW_PAGES)]
    with load("tiny", ("int4", "int8"), 512, 1) as llm:
        expected = [bits(output.outputs[0]) for output in llm.generate(given, sampling)]
    with load("tiny", ("int4", "int8"), 64, 1, kv_cache_memory=FEW_PAGES * page_bytes, **stages_on_ray) as llm:
        assert [bits(output.outputs[0]) for output in llm.generate(given, sampling)] == expected
        assert llm.metrics().preemptions > 0
        events = llm.stream("Once", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        next(events)
        os.kill(next(each["Pid"] for each in stages() if each["Address"]["IPAddress"] == second), signal.SIGKILL)
        try:
            list(events)
        except PipelineStageError as error:
            print(error)


def test_stages_on_two_hosts_have_the_output_of_one_process(hosts: TwoHosts) -> None:
    with hosts.both(), hosts.first.start(run_stages, hosts.head, hosts.first.address, hosts.second.address) as program:
        output, errors = program.communicate(timeout=SECONDS)
    assert program.returncode == 0, errors
    assert "the connection ended" in output, output


def run_batch(source: str, target: str, head: str) -> None:
    """Runs `ferrule run-batch --ray`; once both hosts compute requests, prints a line and waits for one."""
    write, add_places = files.BatchOutput.write, BatchWorkers._add_places
    ready: list[int] = []
    lines = 0

    async def add_places_and_note(self: BatchWorkers, actor: int) -> None:
        await add_places(self, actor)
        ready.append(actor)

    def write_or_wait(self: files.BatchOutput, answer: Answer) -> None:
        nonlocal lines
        write(self, answer)
        lines += len(ready) == 2
        if lines == LOST:
            print("both compute", flush=True)
            sys.stdin.readline()

    BatchWorkers._add_places = add_places_and_note
    files.BatchOutput.write = write_or_wait
    sys.exit(main(["run-batch", source, target, "--ray", head, "--threads", "1"]))


def test_batch_that_loses_a_host_loses_and_repeats_no_line(hosts: TwoHosts, tmp_path: Path) -> None:
    requests = [chat_request(number, temperature=0, max_tokens=8) for number in range(2000)]
    source, local, target = written(tmp_path / "in.jsonl", *requests), tmp_path / "local.jsonl", tmp_path / "out.jsonl"
    assert main(["run-batch", str(source), str(local), "--quiet"]) == 0
    with hosts.both(), hosts.first.start(run_batch, str(source), str(target), hosts.head) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "both compute\n", program.communicate()[1]
        hosts.second.lose()
        _, errors = program.communicate("\n", timeout=SECONDS)
    assert program.returncode == 0, errors
    assert "2000 lines answered, 0 errors" in errors
    answers, expected = read(target), read(local)
    assert [answer["custom_id"] for answer in answers] == [answer["custom_id"] for answer in expected]
    assert [content_of(answer) for answer in answers] == [content_of(answer) for answer in expected]


def run_dataset(head: str, first: str, folder: str, target: str) -> None:
    """Runs a dataset with an actor on each host; prints a line once both compute, and writes the answers to a file."""
    cast("Any", ray).init(head, _node_ip_address=first, log_to_driver=False)
    hosts = Path(folder)

    class Recorded(LLMPredictor):
        async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            (hosts / ray.get_runtime_context().get_node_id()).touch()
            while len(list(hosts.iterdir())) < 2:  # until both actors have rows
                await asyncio.sleep(0.05)
            return await super().__call__(batch)

    def report() -> None:
        while len(list(hosts.iterdir())) < 2:
            time.sleep(0.05)
        print("both compute", flush=True)

    threading.Thread(target=report, daemon=True).start()
    items = [{"number": number, "prompt": prompt_of(number)} for number in range(ROWS)]
    dataset = ray.data.from_items(items, override_num_blocks=20).map_batches(
        Recorded, fn_constructor_kwargs={"sampling_params": GREEDY}, num_cpus=1, concurrency=2, batch_size=10
    )
    answers = sorted((row["number"], row["generated_text"]) for row in dataset.take_all())
    Path(target).write_text(json.dumps(answers))


def prompt_of(number: int) -> str:
    return f"Once upon a time, animal {number} met"


def test_dataset_that_loses_a_host_loses_and_repeats_no_row(hosts: TwoHosts, tmp_path: Path) -> None:
    with LLM() as llm:
        outputs = llm.generate([prompt_of(number) for number in range(ROWS)], SamplingParams(**GREEDY))
    expected = [[number, output.outputs[0].text] for number, output in enumerate(outputs)]
    folder, target = tmp_path / "hosts", tmp_path / "answers.json"
    folder.mkdir()
    arguments = hosts.head, hosts.first.address, str(folder), str(target)
    with hosts.both(), hosts.first.start(run_dataset, *arguments) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "both compute\n", program.communicate()[1]
        hosts.second.lose()
        _, errors = program.communicate(timeout=SECONDS)
    assert program.returncode == 0, errors
    assert json.loads(target.read_text()) == expected


def run_server(head: str, first: str, second: str, model: str) -> None:
    """Serves a model with a replica on each host; prints a line before the second host joins, and before it is lost."""
    from ray._private.state import actors

    def wait(event: str) -> None:
        print(event, flush=True)
        sys.stdin.readline()

    def has_ingress() -> bool:
        application = api.status().applications.get("ferrule")
        return application is not None and "RUNNING" in application.deployments["Ingress"].replica_states

    def address_of(replica: str) -> str:
        found = cast("dict[str, dict[str, Any]]", actors())
        return next(each["Address"]["IPAddress"] for each in found.values() if each["Name"].endswith(replica))

    async def lose_host() -> tuple[list[dict[str, Any]], list[str]]:
        """Returns the requests of the replica that is left, and their texts."""
        async with connected("http://127.0.0.1:8000") as client:
            numbers = await numbers_by_replica(client)
            lost, survivor = sorted(numbers, key=lambda replica: address_of(replica) != second)
            assert [address_of(lost), address_of(survivor)] == [second, first]
            found = await streams_beside_a_loss(client, lost, numbers, lambda: asyncio.to_thread(wait, "both stream"))
            replica, _ = await complete(client, completion(0))
            assert replica == survivor
            return found

    api: Any = serve
    cast("Any", ray).init(head, _node_ip_address=first, log_to_driver=False)
    api.start(http_options={"host": "127.0.0.1", "port": 8000})
    app = build_app(model, served_model_names=["tiny"], num_replicas=2, settings={"drain_timeout": 1})
    deployment = threading.Thread(target=lambda: api.run(app, name="ferrule"))
    deployment.start()
    while not has_ingress():
        time.sleep(0.1)
    wait("ingress on this host, since there is no other one")
    deployment.join()
    requests, texts = asyncio.run(lose_host())
    assert texts == generated(Path(model), requests)


def test_lost_host_ends_only_the_streams_of_its_replica(hosts: TwoHosts, long_model: Path) -> None:
    addresses = hosts.first.address, hosts.second.address
    with hosts.first.start(run_server, hosts.head, *addresses, str(long_model)) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline(), program.communicate()[1]
        with hosts.both():
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == "both stream\n", program.communicate()[1]
            hosts.second.lose()
            _, errors = program.communicate("\n", timeout=SECONDS)
    assert program.returncode == 0, errors
