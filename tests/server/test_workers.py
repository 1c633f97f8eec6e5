"""Threads of the server's own: few, and none that a process waits for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from event_loop import SLACK
from ferrule.server.workers import Workers

PROGRAM = """
import asyncio, time
from ferrule.server.workers import Workers

async def main():
    work = asyncio.ensure_future(workers.run(spin))
    await asyncio.sleep(0.2)
    work.cancel()

def spin():
    while True:
        time.sleep(0.01)

workers = Workers(1)
asyncio.run(main())
assert not workers.settle(0.1)
print("ended")
"""


def test_what_never_ends_does_not_keep_a_process() -> None:
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, capture_output=True, check=False, text=True, timeout=5 * SLACK)
    assert (found.returncode, found.stdout) == (0, "ended\n"), found.stderr


def test_work_is_done_by_few_and_not_for_whoever_has_gone() -> None:
    gate, done = threading.Event(), list[int]()
    workers = Workers(2)

    def work(number: int) -> int:
        gate.wait(10)
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
    assert workers.settle(10)
    assert sorted(done) == [0, 1, 5]


def test_what_it_raises_comes_back() -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(Workers(1).run(fail))
