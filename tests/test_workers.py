"""Worker threads beside an event loop: their number is limited, and neither a loop nor a process waits for them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ferrule._engine.workers import Workers

TESTS = Path(__file__).parent

PROGRAM = """
import asyncio, threading, time
from ferrule._engine.workers import Workers

begun = threading.Event()

async def main():
    work = asyncio.ensure_future(workers.run(spin))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    work.cancel()

def spin():
    begun.set()
    while True:
        time.sleep(0.01)

workers = Workers(1)
asyncio.run(main())
assert not workers.settle(0.1)
print("ended")
"""


def test_endless_work_does_not_block_exit() -> None:
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, "ended\n"), found.stderr


def test_worker_count_is_limited_and_cancelled_work_is_skipped() -> None:
    gate, done = threading.Event(), list[int]()
    workers = Workers(2)

    def work(number: int) -> int:
        assert gate.wait(60)
        done.append(number)
        return number

    async def ask() -> None:
        tasks = [asyncio.ensure_future(workers.run(work, number)) for number in range(6)]
        await asyncio.sleep(0.1)
        for task in tasks[2:5]:
            task.cancel()
        await asyncio.sleep(0)
        gate.set()
        assert [await task for task in (*tasks[:2], tasks[5])] == [0, 1, 5]

    asyncio.run(ask())
    assert workers.settle(60)
    assert sorted(done) == [0, 1, 5]


def test_exceptions_are_returned_to_caller() -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(Workers(1).run(fail))


BUSY = """
import asyncio, fakes, sys, threading, time
fakes.install()
from ferrule import AsyncLLM, LoRARequest

begun = threading.Event()
def forever(*_, **__):
    begun.set()
    time.sleep(600)

llm = AsyncLLM()
llm._adapters.load = llm._adapters.find = llm._request = llm.chat_prompt = llm._encoding.embed = forever

async def ask():
    match sys.argv[1]:
        case "an adapter":
            await llm.load_lora_adapter("a", "somewhere")
        case "a request's adapter":
            await anext(llm.generate("x", lora_request=LoRARequest("a", 1, "somewhere")))
        case "a long prompt":
            await anext(llm.generate("x" * 10_000))
        case "a conversation":
            await anext(llm.chat([{"role": "user", "content": "x"}]))
        case "texts":
            await llm.embed(["x"])

async def main():
    task = asyncio.create_task(ask())
    while not begun.is_set():
        await asyncio.sleep(0.01)
        assert not task.done(), task

asyncio.run(main())
print("the loop ended", flush=True)
"""


@pytest.mark.parametrize("work", ["an adapter", "a request's adapter", "a long prompt", "a conversation", "texts"])
def test_program_exits_during_background_work(work: str) -> None:
    command = [sys.executable, "-c", BUSY, work]
    found = subprocess.run(command, cwd=TESTS, capture_output=True, check=False, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, "the loop ended\n", "")


FORK = """
import asyncio, os, threading
from ferrule._engine.workers import WORKERS

async def main():
    return [await WORKERS.run(os.getpid), *await asyncio.gather(*(WORKERS.run(os.getpid) for _ in range(20)))]

assert set(asyncio.run(main())) == {os.getpid()}
begun, gate = threading.Event(), threading.Event()
def wait():
    begun.set()
    gate.wait()
async def leave_work():
    asyncio.ensure_future(WORKERS.run(wait))
    while not begun.is_set():
        await asyncio.sleep(0.01)
asyncio.run(leave_work())
child = os.fork()
if child == 0:
    assert WORKERS.settle(1)
    assert set(asyncio.run(main())) == {os.getpid()}
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert not WORKERS.settle(0)
gate.set()
assert WORKERS.settle(60)
"""


def test_forked_child_has_separate_workers() -> None:
    found = subprocess.run([sys.executable, "-c", FORK], capture_output=True, check=False, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")
