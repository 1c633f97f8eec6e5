"""The cache of packed weights: what it holds, when it packs again, and what it evicts."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from ferrule import (
    LLM,
    InvalidParameterError,
    _native,
)
from ferrule._cli import main
from ferrule._loading import WEIGHTS, packing, read_model_files
from ferrule._loading.cache_home import DIRECTORY
from ferrule._loading.packed_cache import LIMIT, PackedCache, age_text
from ferrule._params.options import EngineOptions
from gguf_convert import convert
from packed_models import GOLDEN, PROMPT, bits, copy_of, header_of, load

pytestmark = pytest.mark.native


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a model's directory, which tests may change."""
    return copy_of(GOLDEN / "logits" / "llama", tmp_path / "llama")


def test_first_load_packs_and_later_loads_map(packed_cache: PackedCache, model: Path) -> None:
    expected = bits(model, packed_cache_limit=0)
    assert not packed_cache.entries()
    first = load(model)
    [entry] = packed_cache.entries()
    assert first["packed_file"] == str(entry.path)
    assert (entry.model, entry.quantization, entry.bytes) == (str(model), "int8", entry.path.stat().st_size)
    assert first["mapped_bytes"] == first["weight_bytes"]
    inode = entry.path.stat().st_ino
    assert bits(model) == bits(model, mmap=False) == expected
    assert packed_cache.entries()[0].path.stat().st_ino == inode


@pytest.mark.parametrize("case", ["awq_g32", "gptq_asym_actorder", "ct_int8_channel"])
@pytest.mark.parametrize("quantization", ["auto", "int4"])
def test_quantized_checkpoints_are_packed_as_stored_or_requested(
    case: str, quantization: str, packed_cache: PackedCache
) -> None:
    model = GOLDEN / "quantized" / case
    expected = bits(model, quantization=quantization, packed_cache_limit=0)
    assert bits(model, quantization=quantization) == expected
    [entry] = packed_cache.entries()
    assert entry.quantization == ("stored" if quantization == "auto" else quantization)
    assert bits(model, quantization=quantization) == expected
    assert load(model, quantization=quantization)["mapped_bytes"] > 0


def test_gguf_files_are_packed_by_cache(packed_cache: PackedCache, tmp_path: Path) -> None:
    file = convert(TINY, tmp_path / "tiny.gguf", "Q8_0")
    expected = bits(file, packed_cache_limit=0)
    assert bits(file) == bits(file) == expected
    [entry] = packed_cache.entries()
    assert (entry.model, entry.quantization) == (str(file), "stored")
    assert load(file)["packed_file"] == str(entry.path)
    os.utime(file)
    load(file)
    assert len(packed_cache.entries()) == 2


def test_quantizations_have_packed_files_and_floats_have_none(packed_cache: PackedCache, model: Path) -> None:
    for quantization in ("int4", "auto", "int8"):
        load(model, quantization=quantization)
    assert sorted(entry.quantization for entry in packed_cache.entries()) == ["int4", "int8"]
    assert load(model, quantization="bf16")["packed_file"] is None
    # With allow_paging, floating-point weights are stored too.
    assert load(model, quantization="bf16", allow_paging=True)["mapped_bytes"] > 0
    assert len(packed_cache.entries()) == 3


def test_small_and_dummy_models_and_limit_zero_are_not_packed(
    packed_cache: PackedCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, packed_cache_limit=0)
    load(model, load_format="dummy")
    monkeypatch.setenv(LIMIT, "0")
    load(model)
    monkeypatch.delenv(LIMIT)
    monkeypatch.setattr(packing, "SMALLEST", 1 << 30)
    load(model)
    assert not packed_cache.directory.exists()


def test_changed_model_is_packed_again(
    packed_cache: PackedCache, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model)
    load(copy_of(model, tmp_path / "elsewhere"))
    assert len(packed_cache.entries()) == 2, "real paths count"
    (model / WEIGHTS).touch()
    load(model)
    assert len(packed_cache.entries()) == 3, "times count"
    stat = (model / WEIGHTS).stat()
    header, data = header_of(model / WEIGHTS)
    header["__metadata__"] = {"format": "PT"}
    text = json.dumps(header).encode()
    (model / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data)
    os.utime(model / WEIGHTS, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    load(model)
    assert len(packed_cache.entries()) == 4, "headers count"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    load(model)
    assert len(packed_cache.entries()) == 5, "the config counts"
    monkeypatch.setattr(_native, "arithmetic_version", 0)
    load(model)
    assert len(packed_cache.entries()) == 6, "versions count"


def test_damaged_packed_file_is_replaced_silently(packed_cache: PackedCache, model: Path) -> None:
    expected = bits(model)
    [entry] = packed_cache.entries()
    whole = entry.path.read_bytes()
    header, data = header_of(entry.path)
    without = {name: tensor for name, tensor in header.items() if name == "__metadata__"}
    text = json.dumps(without).encode()
    empty = struct.pack("<Q", 4088) + text.ljust(4088)
    for damaged in (b"", b"x" * 100, whole[:-1], whole.replace(b'"version":"', b'"version":"9', 1)[:-1], empty):
        entry.path.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert bits(model) == expected
        assert entry.path.read_bytes() == whole
    assert len(data) % 64 == 0


def test_least_recently_used_files_are_evicted(
    packed_cache: PackedCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [copy_of(GOLDEN / "logits" / "llama", tmp_path / name) for name in "abc"]
    for age, model in zip((30, 10, 20), models, strict=True):
        path = Path(load(model)["packed_file"])
        os.utime(path, (time.time() - age, time.time() - age))
    each = packed_cache.entries()[0].bytes
    assert [entry.model for entry in packed_cache.entries()] == [str(models[1]), str(models[2]), str(models[0])]
    fourth = copy_of(models[0], tmp_path / "d")
    load(fourth, packed_cache_limit=3 * each + each // 2)
    assert [entry.model for entry in packed_cache.entries()] == [str(fourth), str(models[1]), str(models[2])]
    # Loading a file counts as a use, although nothing is written.
    load(models[2])
    load(models[0], packed_cache_limit=3 * each + each // 2)
    left = [str(models[0]), str(models[2]), str(fourth)]
    assert [entry.model for entry in packed_cache.entries()] == left
    # A file that a model has open is not evicted until the model is closed.
    with LLM(models[0]), LLM(models[2]), LLM(fourth):
        with (
            pytest.warns(RuntimeWarning, match="packed_cache_limit"),
            LLM(models[1], packed_cache_limit=3 * each) as llm,
        ):
            assert llm.info()["packed_file"] is None
        assert {entry.model for entry in packed_cache.entries()} == set(left)
    load(models[1], packed_cache_limit=3 * each)
    assert len(packed_cache.entries()) == 3


def test_unreadable_files_beside_weights_are_ignored(packed_cache: PackedCache, model: Path) -> None:
    (model / "consolidated.safetensors").symlink_to("/nowhere")
    (model / "folder.safetensors").mkdir()
    assert load(model)["packed_file"] == str(packed_cache.entries()[0].path)


def test_packed_file_removed_before_open(
    packed_cache: PackedCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights_of(*arguments: Any) -> Path:
        path = packing.weights_of(*arguments)
        path.unlink()
        return path

    monkeypatch.setattr("ferrule._api.loaded.weights_of", weights_of)
    assert load(model)["packed_file"] is None


def test_temporary_files_count_and_abandoned_ones_are_removed(
    packed_cache: PackedCache, model: Path, tmp_path: Path
) -> None:
    packed_cache.directory.mkdir(parents=True)
    abandoned, written = (packed_cache.directory / f".{name}.safetensors.1-2.tmp" for name in ("abandoned", "written"))
    for path in (abandoned, written):
        path.write_bytes(bytes(1 << 20))
        os.utime(path, (time.time() - 60, time.time() - 60))
    with pytest.warns(RuntimeWarning, match="packed_cache_limit"), LLM(model, packed_cache_limit=(2 << 20) + 100):
        pass
    with written.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert main(["rm", "--all"]) == 0
    assert list(packed_cache.directory.iterdir()) == [written]


@pytest.mark.parametrize("place", ["/dev/null", "file"])
def test_unwritable_cache_packs_in_memory(
    place: str, packed_cache: PackedCache, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(DIRECTORY, str(tmp_path / place))
    expected = bits(model, packed_cache_limit=0)
    with pytest.warns(RuntimeWarning, match=f"{place}.*: cannot be created: Not a directory"):
        assert bits(model) == expected


def test_invalid_cache_options(packed_cache: PackedCache, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidParameterError, match="packed_cache_limit must be an integer from 0 to 9223372036854775807, got -1"
    ):
        LLM(model, packed_cache_limit=-1)
    with pytest.raises(InvalidParameterError, match="mmap must be True or False, got 1"):
        LLM(model, mmap=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidParameterError, match="allow_paging must be False with mmap=False, got True"):
        LLM(model, mmap=False, allow_paging=True)
    monkeypatch.setenv(LIMIT, "1 GB")
    with pytest.raises(InvalidParameterError, match=f"{LIMIT} must be a number of bytes, got '1 GB'"):
        LLM(model)


def test_cache_directory_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(DIRECTORY, raising=False)
    assert PackedCache.open().directory == Path("/home/someone/.cache/ferrule/packed")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert PackedCache.open().directory == Path("/var/cache/ferrule/packed")
    monkeypatch.setenv(DIRECTORY, "/data")
    assert PackedCache.open(7) == PackedCache(Path("/data/packed"), 7)
    path = PackedCache.open().path_of("org/repo", "int4", "0123")
    assert path == Path("/data/packed/org--repo-int4-0123.safetensors")
    assert PackedCache.open().path_of("/a/b/Ünlike :model", "int4", "0").name == "nlike--model-int4-0.safetensors"


def test_list_and_rm_commands(
    packed_cache: PackedCache, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy_of(model, tmp_path / "other")
    for quantization in ("int8", "int4"):
        load(model, quantization=quantization)
    load(other)
    (packed_cache.directory / "foreign.safetensors").write_bytes(b"what is this?")
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    packed = r"packed, (int4|int8), [\d.]+ \w+, used just now"
    assert re.search(rf"^{model}\n    {packed}\n    {packed}\n", text, re.MULTILINE)
    assert "foreign\n    packed, ?, 13 B" in text
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["bytes"] == sum(file["bytes"] for file in listed["files"])
    names = {file["name"]: file["model"] for file in listed["files"]}
    assert len(names) == 4
    [name] = [name for name, of in names.items() if of == str(other)]
    assert main(["rm", name, "foreign"]) == 0
    assert "2 removed" in capsys.readouterr().err
    for wrong in (["rm"], ["rm", "--all", name], ["rm", name]):
        assert main(wrong) == 2
    assert {entry.model for entry in packed_cache.entries()} == {str(model)}
    with LLM(model, threads=1) as llm:
        expected = llm.logits(PROMPT)
        assert main(["rm", str(model)]) == 0
        assert not packed_cache.entries()
        assert (llm.logits(PROMPT) == expected).all(), "a mapped file stays readable"
    load(model)
    assert main(["rm", "--all"]) == 0
    assert not packed_cache.entries()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "just now"), (61, "1 minute ago"), (7300, "2 hours ago"), (200_000, "2 days ago"), (-9, "just now")],
)
def test_age_text(seconds: float, text: str) -> None:
    assert age_text(time.time() - seconds) == text


def test_missing_memory_is_that_of_the_file_that_is_loaded(
    packed_cache: PackedCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, name, files = _native.measure, str(model), read_model_files(model)

    def measure(*arguments: Any) -> str:
        figures = json.loads(native(*arguments))
        figures["memory"]["available"] = figures["weight_bytes"] - (3 if figures["mapped_bytes"] else 5)
        return json.dumps(figures)

    def missing(**options: Any) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(_native, "measure", measure)
            return packing.missing_memory(files, name, EngineOptions(**options))

    assert packing.missing_memory(files, name, EngineOptions()) == 0
    assert missing() == 5
    load(model)
    assert (missing(), missing(packed_cache_limit=0), missing(allow_paging=True)) == (3, 5, 0)
