"""Checksums of packed files: verified once after each boot; a damaged file ends its model."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from ferrule import LLM, EngineError, ModelFileError, SamplingParams, _native, quantize
from ferrule._loading import WEIGHTS, verification
from ferrule._loading.cache_home import DIRECTORY
from ferrule._loading.packed_cache import PackedCache

pytestmark = pytest.mark.native

LLAMA = Path(__file__).parent / "golden" / "logits" / "llama"
PROMPT: Any = {"prompt_token_ids": list(range(7, 40))}


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights of a packed model in a separate directory."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "cache"))
    return quantize(LLAMA, tmp_path / "packed", format="int8", threads=1) / WEIGHTS


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event for which every verification waits before it begins."""
    event = threading.Event()
    verify = verification.verify

    def late(path: Path, **options: Any) -> None:
        assert event.wait(60)
        verify(path, **options)

    monkeypatch.setattr(verification, "verify", late)
    return event


def flip(path: Path, offset: int = -5000) -> None:
    """Flips one bit of a file in place; a negative offset counts from the end."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of each tensor that is verified."""
    numbers: list[int] = []
    opened = _native.PackedFile

    class Counting:
        def __init__(self, path: str) -> None:
            self._file = opened(path)
            self.tensors = self._file.tensors

        def verify(self, index: int) -> None:
            numbers.append(index)
            self._file.verify(index)

    monkeypatch.setattr(_native, "PackedFile", Counting)
    return numbers


@pytest.mark.parametrize("threads", [1, 3])
def test_file_is_verified_once_per_boot(packed: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    numbers = count_reads(monkeypatch)
    verification.verify(packed, threads=threads)
    tensors = _native.PackedFile(str(packed)).tensors
    assert sorted(numbers) == list(range(len(tensors)))
    verification.verify(packed, threads=threads)
    assert len(numbers) == len(tensors)
    boot = packed.with_name("boot_id")
    boot.write_text("another-boot\n")
    monkeypatch.setattr(verification, "BOOT_ID", boot)
    verification.verify(packed)
    assert len(numbers) == 2 * len(tensors)
    [record] = (PackedCache.open().directory.with_name("verified")).iterdir()
    assert record.read_text().startswith("another-boot ")


def test_changed_file_is_verified_again(packed: Path) -> None:
    verification.verify(packed)
    flip(packed)
    with pytest.raises(ModelFileError, match=r"is damaged: the checksum of tensor \"[^\"]+\" must be [0-9a-f]{8}"):
        verification.verify(packed)


def test_without_a_boot_id_every_load_verifies(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "BOOT_ID", packed.with_name("missing"))
    numbers = count_reads(monkeypatch)
    verification.verify(packed)
    once = len(numbers)
    verification.verify(packed)
    assert len(numbers) == 2 * once


def test_unwritable_record_is_ignored(packed: Path) -> None:
    records = PackedCache.open().directory.with_name("verified")
    records.parent.mkdir(parents=True, exist_ok=True)
    records.write_text("a file in place of the directory")
    verification.verify(packed)


def test_use_of_a_cached_file_keeps_its_record(packed_cache: PackedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(LLAMA, quantization="int8", threads=1) as llm:
        llm._verification.join()
    before = packed_cache.entries()[0].last_used
    numbers = count_reads(monkeypatch)
    with LLM(LLAMA, quantization="int8", threads=1) as llm:
        llm._verification.join()
    assert numbers == []
    monkeypatch.undo()
    assert PackedCache(packed_cache.directory, packed_cache.limit).entries()[0].last_used > before


def test_damaged_cached_file_ends_the_engine_and_is_packed_again(packed_cache: PackedCache) -> None:
    with LLM(LLAMA, quantization="int8", threads=1) as llm:
        llm._verification.join()
        expected = llm.logits(PROMPT["prompt_token_ids"]).tobytes()
    [entry] = packed_cache.entries()
    flip(entry.path)
    with LLM(LLAMA, quantization="int8", threads=1) as llm:
        llm._verification.join()
        with pytest.raises(EngineError, match=r"is damaged: .*; it has been removed from the cache, and the next load"):
            llm.generate(PROMPT)
    assert not packed_cache.entries()
    with LLM(LLAMA, quantization="int8", threads=1) as llm:
        assert llm.logits(PROMPT["prompt_token_ids"]).tobytes() == expected
        llm._verification.join()
        llm.generate(PROMPT)


def test_damage_ends_a_running_generation(packed: Path, go_on: threading.Event) -> None:
    flip(packed)
    with LLM(packed.parent, threads=1) as llm:
        tokens = llm.stream(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        next(tokens)
        go_on.set()
        llm._verification.join()
        with pytest.raises(EngineError, match=r"is damaged: .*; pack the model again"):
            for _ in tokens:
                pass
        with pytest.raises(EngineError, match="is damaged"):
            llm.generate(PROMPT)
    assert packed.exists()


def test_damage_is_reported_where_the_cache_cannot_be_changed(
    packed_cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(LLAMA, quantization="int8", threads=1) as llm:
        llm._verification.join()
    [entry] = packed_cache.entries()
    flip(entry.path)

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(Path, "unlink", refuse)
    with LLM(LLAMA, quantization="int8", threads=1) as llm:
        llm._verification.join()
        with pytest.raises(
            EngineError, match=r"; it cannot be removed from the cache \(Permission denied\); remove it"
        ):
            llm.generate(PROMPT)


def test_verify_weights_refuses_a_damaged_directory_before_the_first_token(packed: Path) -> None:
    flip(packed)
    with pytest.raises(ModelFileError, match="is damaged"):
        LLM(packed.parent, threads=1, verify_weights=True)


def test_verify_weights_packs_a_damaged_cached_file_again(packed_cache: PackedCache) -> None:
    options: dict[str, Any] = {"quantization": "int8", "threads": 2, "verify_weights": True}
    with LLM(LLAMA, **options) as llm:
        expected = llm.logits(PROMPT["prompt_token_ids"]).tobytes()
    [entry] = packed_cache.entries()
    flip(entry.path)
    with LLM(LLAMA, **options) as llm:
        assert llm.logits(PROMPT["prompt_token_ids"]).tobytes() == expected
        llm._verification.join()
        llm.generate(PROMPT)


def test_close_stops_the_verification(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "BOOT_ID", packed.with_name("missing"))
    numbers = count_reads(monkeypatch)
    verification.verify(packed, stopped=lambda: True)
    assert numbers == []
    llm = LLM(packed.parent, threads=1)
    llm.close()
    llm._verification.join()


def unhandled_errors(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Verifies a file in the background, and returns the errors that the thread reports."""

    class Owner:
        def fail(self, message: str) -> None:
            raise AssertionError(message)

    errors: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda found: errors.append(str(found.exc_value)))
    owner = Owner()
    thread = verification.Verification([path], owner.fail)
    thread.start()
    thread.join()
    return errors


def test_verification_that_begins_when_the_program_ends_is_silent(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    with pytest.raises(RuntimeError, match="shutdown"):
        verification.verify(packed)
    assert unhandled_errors(packed, monkeypatch) == []
    assert not list(PackedCache.open().directory.with_name("verified").glob("*"))


def test_verification_that_cannot_start_a_thread_reports_an_error(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor.submit", refuse)
    assert unhandled_errors(packed, monkeypatch) == ["can't start new thread"]


def test_verification_keeps_no_engine_alive(
    packed: Path, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.disable()
    try:
        llm = LLM(packed.parent, threads=1)
        driver, thread = weakref.ref(llm._driver), llm._verification
        del llm
        assert driver() is None
    finally:
        gc.enable()
    numbers = count_reads(monkeypatch)
    go_on.set()
    thread.join()
    assert numbers == []
