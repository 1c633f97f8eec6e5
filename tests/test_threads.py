"""One engine used by many threads: concurrency, interrupts, closing, exits and forks."""

from __future__ import annotations

import dis
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fakes
import ferrule
from ferrule import LLM, EngineError, SamplingParams
from ferrule._engine import driver

TESTS = Path(__file__).parent
PACKAGE = Path(ferrule.__file__).parent
EngineOf = Callable[[LLM], fakes.Engine]


def params(length: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=length, ignore_eos=True)


class InOrder:
    """A lock that its waiters get in order, as on a machine whose processors are idle."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entered = self._left = 0

    @property
    def waiting(self) -> int:
        return self._entered - self._left - 1

    def __enter__(self) -> None:
        with self._changed:
            turn, self._entered = self._entered, self._entered + 1
            self._changed.wait_for(lambda: self._left == turn)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._left += 1
            self._changed.notify_all()


def test_eight_threads_share_steps(
    llm: LLM, fake_engine: type[fakes.Engine], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread gets the same output as alone, and the threads share steps."""
    jobs = [(f"prompt {number}", params(20 + number, seed=number)) for number in range(8)]
    alone = [llm.generate(*job)[0].outputs[0].token_ids for job in jobs]
    before = engine_of(llm).steps
    lock = InOrder()
    monkeypatch.setattr(llm._driver, "_lock", lock)
    fake_engine.gate = threading.Event()  # the first step ends when all threads are there

    def work(number: int) -> list[int]:
        if number % 2:
            return [token for delta in llm.stream(*jobs[number]) for token in delta.token_ids]
        return llm.generate(*jobs[number])[0].outputs[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        found = pool.map(work, range(8))
        while lock.waiting < 7:
            time.sleep(0.001)
        fake_engine.gate.set()
        assert list(found) == alone
    steps = engine_of(llm).steps - before
    assert steps < sum(len(tokens) for tokens in alone) / 2, "the threads took turns instead of sharing steps"
    assert not engine_of(llm).running


def test_short_request_finishes_before_long_one(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    fake_engine.step_seconds = 0.002
    long_done = threading.Event()

    def long() -> None:
        llm.generate("long", params(600))
        long_done.set()

    thread = threading.Thread(target=long)
    thread.start()
    for _ in range(5):
        llm.generate("short", params(3))
    assert not long_done.is_set(), "a short request waited for a long one"
    thread.join()


class SlowToWake:
    """A lock whose waiters take half a millisecond or more to wake up, as on a machine whose processors are busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        while not self._lock.acquire(blocking=False):
            time.sleep(0.0005)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_requests_are_not_blocked_by_prefill_of_another_thread(
    llm: LLM, fake_engine: type[fakes.Engine], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that steps without a token for itself lets other threads use the engine."""
    monkeypatch.setattr(llm._driver, "_lock", SlowToWake())
    monkeypatch.setattr(driver, "LOCK_HANDOVER_SECONDS", 0.02)
    fake_engine.step_seconds, fake_engine.prefill_chunk = 0.002, 2
    long: Any = {"prompt_token_ids": [9] * 1000}
    thread = threading.Thread(target=llm.generate, args=(long, params(1)))
    thread.start()
    while not engine_of(llm).steps:
        time.sleep(0.001)
    before = engine_of(llm).steps
    for _ in range(5):
        llm.generate({"prompt_token_ids": [7]}, params(3))
    steps = engine_of(llm).steps - before
    fake_engine.step_seconds = 0
    monkeypatch.setattr(driver, "LOCK_HANDOVER_SECONDS", 0)
    thread.join()
    assert steps < 100, "requests of three steps waited for a prompt of 500"


def test_interrupt_in_one_thread_does_not_affect_others(
    llm: LLM, fake_engine: type[fakes.Engine], engine_of: EngineOf
) -> None:
    """A KeyboardInterrupt in the thread that runs the step affects no other thread."""
    fake_engine.step_seconds = 0.001
    expected = llm.generate("other", params(100))[0].outputs[0].token_ids
    for interrupt_after in range(5, 45, 8):
        fake_engine.interrupt_at = engine_of(llm).steps + interrupt_after
        results: list[list[int] | type[BaseException]] = []

        def work(results: list[list[int] | type[BaseException]] = results) -> None:
            try:
                results.append(llm.generate("other", params(100))[0].outputs[0].token_ids)
            except KeyboardInterrupt:
                results.append(KeyboardInterrupt)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, results)) == sorted(map(str, [expected, KeyboardInterrupt]))
        assert not engine_of(llm).running


def handler(code: types.CodeType, offset: int) -> int | None:
    """Returns the handler of an exception that an instruction raises."""
    table: Any = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return next((entry.target for entry in table if entry.start <= offset < entry.end), None)


def interrupting(number: int) -> tuple[Callable[..., Any], list[int]]:
    """Returns a trace function that raises KeyboardInterrupt at the number-th possible position in ferrule's code.

    CPython checks for signals at the end of a call. A trace function can only raise before the next instruction, so
    positions whose next instruction belongs to another handler are skipped. The list counts the positions passed.
    """
    passed = [0]
    last: dict[Any, int] = {}

    def trace(frame: Any, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            code, before = frame.f_code, last.get(frame, 0)
            called = dis.opname[code.co_code[before]].startswith("CALL")
            called = called and handler(code, before) == handler(code, frame.f_lasti)
            last[frame] = frame.f_lasti
            passed[0] += called
            if called and passed[0] == number:
                raise KeyboardInterrupt
        return trace

    return trace, passed


def test_keyboard_interrupt_at_any_line_does_not_affect_others(llm: LLM, engine_of: EngineOf) -> None:
    """Interrupts at each position in turn while another request runs; afterwards that request is complete."""
    expected = llm.generate("beside", params(12))[0].outputs[0].token_ids
    stop = SamplingParams(temperature=0, max_tokens=2, stop=["zz"])
    forked = SamplingParams(temperature=0, max_tokens=2, n=2)
    number = 0
    while True:
        number += 1
        beside = llm.stream("beside", params(12))
        tokens = next(beside).token_ids
        trace, passed = interrupting(number)
        sys.settrace(trace)
        try:
            llm.generate(["mine", "mine too"], [stop, forked])
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        tokens += [token for delta in beside for token in delta.token_ids]
        assert tokens == expected, f"place {number}"
        assert not engine_of(llm).running, f"place {number}"
        if passed[0] < number:
            break
    assert number > 100


def test_close_during_generation_in_another_thread(fake_engine: type[fakes.Engine]) -> None:
    fake_engine.step_seconds = 0.001
    llm = LLM()
    caught: list[BaseException] = []

    def work() -> None:
        try:
            llm.generate("x", params(2000))
        except EngineError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.05)
    llm.close()
    thread.join(60)
    assert [str(error) for error in caught] == ["the engine is closed"]


def test_close_releases_engine(llm: LLM, engine_of: EngineOf) -> None:
    engine = engine_of(llm)
    llm.generate("x", params(3))
    llm.close()
    assert engine.closed
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.step()
    llm.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        llm.generate("x", params(3))


EXIT = """
import fakes, threading, time
fakes.install()
fakes.Engine.step_seconds = 0.01
from ferrule import LLM, SamplingParams
llm = LLM()
def work():
    while True:
        llm.generate("x", SamplingParams(ignore_eos=True))
threading.Thread(target=work, daemon=True).start()
while not llm._driver._engine.steps:
    time.sleep(0.01)
print("leaving")
"""


def test_exit_during_generation_is_clean() -> None:
    process = subprocess.run(
        [sys.executable, "-c", EXIT], cwd=TESTS, capture_output=True, text=True, timeout=60, check=False
    )
    assert (process.returncode, process.stdout) == (0, "leaving\n")
    assert "Fatal" not in process.stderr


FORK = """
import fakes, os, threading, time
fakes.install()
from ferrule import LLM, SamplingParams, EngineError
params = SamplingParams(max_tokens=3)
llm = LLM()
llm.generate("x", params)
def in_child(expected):
    child = os.fork()
    if child == 0:
        try:
            llm.generate("x", params)
            os._exit(3)
        except EngineError as error:
            os._exit(4 if "forked" in str(error) else 5)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == expected, status
in_child(3)
gate = fakes.Engine.gate = threading.Event()
threading.Thread(target=lambda: llm.generate("x", SamplingParams(max_tokens=40, ignore_eos=True))).start()
while not llm._driver._engine.stepping:
    time.sleep(0.01)
in_child(4)
gate.set()
"""


def test_forked_child_works_or_raises() -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], cwd=TESTS, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
