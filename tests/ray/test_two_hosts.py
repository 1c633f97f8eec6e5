"""Pipeline stages on two hosts: network namespaces with a link between them, each with its own Ray node of one CPU.

FERRULE_TWO_HOSTS enables these tests. They need the command `ip` and the right to create network namespaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ray_head import ATTEMPTS, OBJECT_STORE_BYTES, SETTINGS

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        "FERRULE_TWO_HOSTS" not in os.environ, reason="starts two Ray nodes; set FERRULE_TWO_HOSTS to run it"
    ),
]

TESTS = Path(__file__).parent.parent
SECONDS = 600
"""Timeout of a program on the hosts."""
ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = 6379
PROGRAM = """
import os, signal, sys
import ray
from ray._private.state import actors
from ferrule import LLM, PipelineStageError, SamplingParams
from test_batch_invariance import FEW_PAGES, PAGE_TOKENS
from test_invariance import alone, bits, load, params, prompts

ray.init(sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False)

def stages():
    return [each for each in actors().values() if each["State"] == "ALIVE"]

stages_on_ray = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
for model, formats in (("tiny", ("int4", "int8")), ("qwen2_moe", ("int8", "auto")), ("lfm2", ("f32", "auto"))):
    with load(model, formats, 64, 1, **stages_on_ray) as llm:
        assert {each["Address"]["IPAddress"] for each in stages()} == set(sys.argv[2:])
        outputs = llm.generate(prompts(model), [params(number) for number in range(8)])
    assert [bits(output.outputs[0]) for output in outputs] == alone(model, formats), model

ranks_on_ray = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
with load(model, formats, 64, 1, **ranks_on_ray) as llm:
    assert {each["Address"]["IPAddress"] for each in stages()} == set(sys.argv[2:])
    outputs = llm.generate(prompts(model), [params(number) for number in range(8)])
assert [bits(output.outputs[0]) for output in outputs] == alone(model, formats), model

with load("tiny", ("int4", "int8"), 64, 1) as llm:
    page_bytes = PAGE_TOKENS * llm.info()["kv_bytes_per_token"]
given = [{"prompt_token_ids": [7 + number] * 15} for number in range(2 * FEW_PAGES)]
sampling = [params(number) for number in range(2 * FEW_PAGES)]
with load("tiny", ("int4", "int8"), 512, 1) as llm:
    expected = [bits(output.outputs[0]) for output in llm.generate(given, sampling)]
with load("tiny", ("int4", "int8"), 64, 1, kv_cache_memory=FEW_PAGES * page_bytes, **stages_on_ray) as llm:
    assert [bits(output.outputs[0]) for output in llm.generate(given, sampling)] == expected
    assert llm.metrics().preemptions > 0
    stream = llm.stream("Once", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    next(stream)
    os.kill(next(each["Pid"] for each in stages() if each["Address"]["IPAddress"] == sys.argv[3]), signal.SIGKILL)
    try:
        list(stream)
    except PipelineStageError as error:
        print(error)
"""


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def inside(host: str, *command: str) -> list[str]:
    """Returns a command that runs in a namespace."""
    return ["ip", "netns", "exec", host, *command]


def end_processes(host: str) -> None:
    found = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def remove(host: str) -> None:
    """Ends all processes of a namespace and removes it, with its end of the link."""
    end_processes(host)
    run("ip", "netns", "delete", host)


def start_node(host: str, *options: str) -> None:
    """Starts a Ray node in a namespace, which `remove` ends."""
    ray = str(Path(sys.executable).with_name("ray"))
    limits = ["--num-cpus=1", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    command = inside(host, ray, "start", *limits, *options)
    error = ""
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            command, env={**os.environ, **SETTINGS}, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode == 0:
            return
        error = done.stderr
        end_processes(host)
    pytest.fail(f"Ray did not start: {error}")


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with a link between them."""
    if shutil.which("ip") is None:
        pytest.skip("the command `ip` is not installed")
    first, second = names = (f"ferrule-{os.getpid()}-a", f"ferrule-{os.getpid()}-b")
    with ExitStack() as ends:
        for host in names:
            made = subprocess.run(["ip", "netns", "add", host], capture_output=True, text=True, check=False)
            if made.returncode != 0:
                pytest.skip(f"network namespaces are not permitted: {made.stderr.strip()}")
            ends.callback(remove, host)
        run("ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for host, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", host, "link", "set", device, "up")
        yield names


def test_stages_on_two_hosts_have_the_output_of_one_process(hosts: tuple[str, str], own_cache: None) -> None:
    # The folders of tests are too long for the names of Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = f"{ADDRESSES[0]}:{PORT}"
        start_node(
            hosts[0],
            "--head",
            f"--port={PORT}",
            f"--node-ip-address={ADDRESSES[0]}",
            "--include-dashboard=false",
            f"--temp-dir={folder}",
        )
        start_node(hosts[1], f"--address={head}", f"--node-ip-address={ADDRESSES[1]}")
        done = subprocess.run(
            inside(hosts[0], sys.executable, "-c", PROGRAM, head, *ADDRESSES),
            cwd=TESTS,
            env={**os.environ, **SETTINGS},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "the connection ended" in done.stdout, done.stdout
