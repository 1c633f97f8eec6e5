"""The test harness detects crashes, hangs, and excessive time and memory."""

from dataclasses import replace

import pytest

from faults.isolated import MAX_ELAPSED_SECONDS, assert_refused, run


def test_typed_error_is_reported_with_its_bases() -> None:
    outcome = run("raise ferrule.PromptError('empty')")
    assert (outcome.error, outcome.message) == ("PromptError", "empty")
    assert {"FerruleError", "ValueError"} <= set(outcome.bases)
    assert_refused(outcome, "PromptError", ["empty"])


def test_other_error_type_fails_assertion() -> None:
    with pytest.raises(AssertionError, match="KeyError"):
        assert_refused(run("raise KeyError('empty')"), "PromptError", ["empty"])
    with pytest.raises(AssertionError, match="was accepted"):
        assert_refused(run("pass"), "PromptError", [])


def test_signal_fails_run() -> None:
    with pytest.raises(AssertionError, match="died of signal 11"):
        run("import ctypes; ctypes.string_at(0)")


def test_timeout_fails_run() -> None:
    with pytest.raises(AssertionError, match="hangs"):
        run("time.sleep(60)", warm_up="import time", timeout=1.0)


def test_blocked_fault_fails_assertion() -> None:
    outcome = run("time.sleep(0.2); raise ferrule.PromptError('empty')", warm_up="import ferrule, time")
    assert outcome.elapsed_seconds >= 0.2 > outcome.seconds
    with pytest.raises(AssertionError, match="of elapsed time"):
        assert_refused(replace(outcome, elapsed_seconds=MAX_ELAPSED_SECONDS), "PromptError", ["empty"])


def test_memory_and_time_are_measured() -> None:
    busy = "end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    outcome = run(f"b = bytearray(64 << 20); del b\n{busy}", warm_up="import time")
    assert outcome.extra_bytes >= 60 << 20
    assert outcome.seconds >= 0.2
    assert run("bytearray(1 << 30)", address_space=512 << 20).error == "MemoryError"
    # Memory that the warm-up allocated and freed does not hide memory that the fault allocates.
    assert run("b = bytearray(32 << 20)", warm_up="b = bytearray(64 << 20); del b").extra_bytes >= 30 << 20
