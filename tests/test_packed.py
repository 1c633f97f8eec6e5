"""Packed weights: bitwise the same results as the checkpoint, from the cache or from a packed directory."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import struct
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from crc32c import crc32c
from ferrule import (
    LLM,
    InsufficientMemoryError,
    InvalidParameterError,
    ModelFileError,
    ModelWriteError,
    _native,
    model_info,
    quantize,
)
from ferrule._api.quantization import FORMATS
from ferrule._cli import main
from ferrule._cli.served_models import load_models
from ferrule._loading import WEIGHTS, packing, read_model_files
from ferrule._loading.cache_home import DIRECTORY
from ferrule._loading.packed_cache import LIMIT, PackedCache, age_text
from ferrule._params.options import EngineOptions
from ferrule.server import OnDemand, ServerSettings
from gguf_convert import convert

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted([*(GOLDEN / "logits").iterdir(), *(GOLDEN / "encoders").iterdir()])
PROMPT = list(range(7, 40))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedCache:
    """An empty cache that also stores small models."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "cache"))
    monkeypatch.delenv(LIMIT, raising=False)
    monkeypatch.setattr(packing, "SMALLEST", 0)
    return PackedCache.open()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a model's directory, which tests may change."""
    return copy_of(GOLDEN / "logits" / "llama", tmp_path / "llama")


def copy_of(model: Path, to: Path) -> Path:
    shutil.copytree(model, to)
    for path in to.iterdir():
        path.chmod(0o644)
    return to


def load(model: Path, **options: Any) -> dict[str, Any]:
    """Returns the information about a loaded model; fails on a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(model, threads=1, **options) as llm:
            return llm.info()


def bits(model: Path, **options: Any) -> bytes:
    """Returns all results of a prompt: the logits of a decoder, and its state, which identifies the model."""
    prompt: Any = {"prompt_token_ids": PROMPT}
    spec = read_model_files(model).spec
    with LLM(model, threads=1, **options) as llm:
        if not spec.generates:
            return (
                llm.embed(prompt)[0].outputs.embedding
                if spec.classifier is None
                else llm.classify(prompt)[0].outputs.probs
            ).tobytes()
        return llm.save_state(prompt) + llm.logits(PROMPT).tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_packed_model_equals_checkpoint_bit_for_bit(case: Path, tmp_path: Path) -> None:
    number = CASES.index(case)
    quantization = FORMATS[number % len(FORMATS)]
    packed = quantize(case, tmp_path / "packed", format=quantization, threads=1)
    expected = bits(case, quantization=quantization)
    assert bits(packed) == expected
    assert bits(packed, mmap=False) == expected
    assert bits(packed, quantization=quantization) == expected


def test_every_format_is_packed(tmp_path: Path) -> None:
    for quantization in FORMATS:
        packed = quantize(None, tmp_path / quantization, format=quantization)
        info, before = load(packed), model_info(packed)
        assert (info["quantization"], info["packed_file"]) == (quantization, str(packed / WEIGHTS))
        assert info["mapped_bytes"] == info["weight_bytes"] == model_info(quantization=quantization)["weight_bytes"]
        assert before["fits"]
        assert {name: before[name] for name in before.keys() & info.keys() - {"threads"}} == {
            name: info[name] for name in before.keys() & info.keys() - {"threads"}
        }
        assert load(packed, mmap=False)["mapped_bytes"] == 0
        config = json.loads((packed / "config.json").read_text())
        assert config.pop("quantization_config") == {"quant_method": "ferrule", "format": quantization}
        assert config == json.loads((TINY / "config.json").read_text())
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (packed / name).read_bytes() == (TINY / name).read_bytes()
    with LLM(tmp_path / "int8") as llm, LLM(quantization="int8") as plain:
        assert llm.generate("The capital of France is")[0].prompt == "The capital of France is"
        assert llm.chat_prompt([{"role": "user", "content": "Hi"}]) == plain.chat_prompt(
            [{"role": "user", "content": "Hi"}]
        )


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    [length] = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def test_packed_file_is_aligned_safetensors(tmp_path: Path) -> None:
    path = quantize(GOLDEN / "logits" / "qwen2", tmp_path / "packed", format="int8") / WEIGHTS
    header, data = header_of(path)
    metadata = header.pop("__metadata__")
    assert len(metadata.pop("source")) == 16
    assert metadata == {
        "layout": "ferrule-2",
        "version": str(_native.layout_version),
        "quantization": "int8",
        "model": str(GOLDEN / "logits" / "qwen2"),
    }
    assert (path.stat().st_size - len(data)) % 4096 == 0
    spans = sorted(tuple(tensor["data_offsets"]) for tensor in header.values())
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == len(data)
    assert all(end % 64 == 0 for _, end in spans)
    assert {"embedding.0.int8", "embedding.0.int8.steps", "layers.0.attention.q+k+v.0.int8"} < header.keys()
    assert {"final_norm.weight", "layers.0.attention.q.bias"} < header.keys()


def test_first_load_packs_and_later_loads_map(cache: PackedCache, model: Path) -> None:
    expected = bits(model, packed_cache_limit=0)
    assert not cache.entries()
    first = load(model)
    [entry] = cache.entries()
    assert first["packed_file"] == str(entry.path)
    assert (entry.model, entry.quantization, entry.bytes) == (str(model), "int8", entry.path.stat().st_size)
    assert first["mapped_bytes"] == first["weight_bytes"]
    inode = entry.path.stat().st_ino
    assert bits(model) == bits(model, mmap=False) == expected
    assert cache.entries()[0].path.stat().st_ino == inode


@pytest.mark.parametrize("case", ["awq_g32", "gptq_asym_actorder", "ct_int8_channel"])
@pytest.mark.parametrize("quantization", ["auto", "int4"])
def test_quantized_checkpoints_are_packed_as_stored_or_requested(
    case: str, quantization: str, cache: PackedCache
) -> None:
    model = GOLDEN / "quantized" / case
    expected = bits(model, quantization=quantization, packed_cache_limit=0)
    assert bits(model, quantization=quantization) == expected
    [entry] = cache.entries()
    assert entry.quantization == ("stored" if quantization == "auto" else quantization)
    assert bits(model, quantization=quantization) == expected
    assert load(model, quantization=quantization)["mapped_bytes"] > 0


def test_gguf_files_are_packed_by_cache(cache: PackedCache, tmp_path: Path) -> None:
    file = convert(TINY, tmp_path / "tiny.gguf", "Q8_0")
    expected = bits(file, packed_cache_limit=0)
    assert bits(file) == bits(file) == expected
    [entry] = cache.entries()
    assert (entry.model, entry.quantization) == (str(file), "stored")
    assert load(file)["packed_file"] == str(entry.path)
    os.utime(file)
    load(file)
    assert len(cache.entries()) == 2


def test_quantizations_have_packed_files_and_floats_have_none(cache: PackedCache, model: Path) -> None:
    for quantization in ("int4", "auto", "int8"):
        load(model, quantization=quantization)
    assert sorted(entry.quantization for entry in cache.entries()) == ["int4", "int8"]
    assert load(model, quantization="bf16")["packed_file"] is None
    # With allow_paging, floating-point weights are stored too.
    assert load(model, quantization="bf16", allow_paging=True)["mapped_bytes"] > 0
    assert len(cache.entries()) == 3


def test_small_and_dummy_models_and_limit_zero_are_not_packed(
    cache: PackedCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, packed_cache_limit=0)
    load(model, load_format="dummy")
    monkeypatch.setenv(LIMIT, "0")
    load(model)
    monkeypatch.delenv(LIMIT)
    monkeypatch.setattr(packing, "SMALLEST", 1 << 30)
    load(model)
    assert not cache.directory.exists()


def test_changed_model_is_packed_again(
    cache: PackedCache, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model)
    load(copy_of(model, tmp_path / "elsewhere"))
    assert len(cache.entries()) == 2, "real paths count"
    (model / WEIGHTS).touch()
    load(model)
    assert len(cache.entries()) == 3, "times count"
    stat = (model / WEIGHTS).stat()
    header, data = header_of(model / WEIGHTS)
    header["__metadata__"] = {"format": "PT"}
    text = json.dumps(header).encode()
    (model / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data)
    os.utime(model / WEIGHTS, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    load(model)
    assert len(cache.entries()) == 4, "headers count"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    load(model)
    assert len(cache.entries()) == 5, "the config counts"
    monkeypatch.setattr(_native, "arithmetic_version", 0)
    load(model)
    assert len(cache.entries()) == 6, "versions count"


def test_damaged_packed_file_is_replaced_silently(cache: PackedCache, model: Path) -> None:
    expected = bits(model)
    [entry] = cache.entries()
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
    cache: PackedCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [copy_of(GOLDEN / "logits" / "llama", tmp_path / name) for name in "abc"]
    for age, model in zip((30, 10, 20), models, strict=True):
        path = Path(load(model)["packed_file"])
        os.utime(path, (time.time() - age, time.time() - age))
    each = cache.entries()[0].bytes
    assert [entry.model for entry in cache.entries()] == [str(models[1]), str(models[2]), str(models[0])]
    fourth = copy_of(models[0], tmp_path / "d")
    load(fourth, packed_cache_limit=3 * each + each // 2)
    assert [entry.model for entry in cache.entries()] == [str(fourth), str(models[1]), str(models[2])]
    # Loading a file counts as a use, although nothing is written.
    load(models[2])
    load(models[0], packed_cache_limit=3 * each + each // 2)
    left = [str(models[0]), str(models[2]), str(fourth)]
    assert [entry.model for entry in cache.entries()] == left
    # A file that a model has open is not evicted until the model is closed.
    with LLM(models[0]), LLM(models[2]), LLM(fourth):
        with (
            pytest.warns(RuntimeWarning, match="packed_cache_limit"),
            LLM(models[1], packed_cache_limit=3 * each) as llm,
        ):
            assert llm.info()["packed_file"] is None
        assert {entry.model for entry in cache.entries()} == set(left)
    load(models[1], packed_cache_limit=3 * each)
    assert len(cache.entries()) == 3


def test_unreadable_files_beside_weights_are_ignored(cache: PackedCache, model: Path) -> None:
    (model / "consolidated.safetensors").symlink_to("/nowhere")
    (model / "folder.safetensors").mkdir()
    assert load(model)["packed_file"] == str(cache.entries()[0].path)


def test_packed_file_removed_before_open(cache: PackedCache, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights_of(*arguments: Any) -> Path:
        path = packing.weights_of(*arguments)
        path.unlink()
        return path

    monkeypatch.setattr("ferrule._api.loaded.weights_of", weights_of)
    assert load(model)["packed_file"] is None


def test_temporary_files_count_and_abandoned_ones_are_removed(cache: PackedCache, model: Path, tmp_path: Path) -> None:
    cache.directory.mkdir(parents=True)
    abandoned, written = (cache.directory / f".{name}.safetensors.1-2.tmp" for name in ("abandoned", "written"))
    for path in (abandoned, written):
        path.write_bytes(bytes(1 << 20))
        os.utime(path, (time.time() - 60, time.time() - 60))
    with pytest.warns(RuntimeWarning, match="packed_cache_limit"), LLM(model, packed_cache_limit=(2 << 20) + 100):
        pass
    with written.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert main(["rm", "--all"]) == 0
    assert list(cache.directory.iterdir()) == [written]


@pytest.mark.parametrize("place", ["/dev/null", "file"])
def test_unwritable_cache_packs_in_memory(
    place: str, cache: PackedCache, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(DIRECTORY, str(tmp_path / place))
    expected = bits(model, packed_cache_limit=0)
    with pytest.warns(RuntimeWarning, match=f"{place}.*: cannot be created: Not a directory"):
        assert bits(model) == expected


def test_invalid_cache_options(cache: PackedCache, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    cache: PackedCache, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy_of(model, tmp_path / "other")
    for quantization in ("int8", "int4"):
        load(model, quantization=quantization)
    load(other)
    (cache.directory / "foreign.safetensors").write_bytes(b"what is this?")
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
    assert {entry.model for entry in cache.entries()} == {str(model)}
    with LLM(model, threads=1) as llm:
        expected = llm.logits(PROMPT)
        assert main(["rm", str(model)]) == 0
        assert not cache.entries()
        assert (llm.logits(PROMPT) == expected).all(), "a mapped file stays readable"
    load(model)
    assert main(["rm", "--all"]) == 0
    assert not cache.entries()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "just now"), (61, "1 minute ago"), (7300, "2 hours ago"), (200_000, "2 days ago"), (-9, "just now")],
)
def test_age_text(seconds: float, text: str) -> None:
    assert age_text(time.time() - seconds) == text


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_quantize_rejects_outputs_that_hold_other_files(model: Path, tmp_path: Path) -> None:
    """Quantize rejects its own input under any name, and a directory that is not a packed model."""
    before = contents(model)
    link = tmp_path / "link"
    link.symlink_to(model)
    for output in (model, link, model / ".." / model.name, tmp_path):
        for overwrite in (False, True):
            with pytest.raises(
                InvalidParameterError, match="output must be a directory other than the model's own and its parents"
            ):
                quantize(model, output, overwrite=overwrite)
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for overwrite in (False, True):
        requirement = r"output must be empty, or written by ferrule quantize \(it holds other files\)"
        with pytest.raises(InvalidParameterError, match=requirement):
            quantize(model, full, overwrite=overwrite)
        with pytest.raises(InvalidParameterError, match="output must be a directory, or a new path"):
            quantize(model, tmp_path / "file", overwrite=overwrite)
        with pytest.raises(InvalidParameterError, match=requirement):
            quantize(None, model, overwrite=overwrite)
    assert contents(model) == before
    assert contents(full) == {"notes.txt": b"mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link", model.name]


def test_files_created_in_output_during_quantize_are_kept(model: Path, tmp_path: Path) -> None:
    for overwrite in (False, True):
        output = tmp_path / f"overwrite {overwrite}"

        def come(*_: int, output: Path = output) -> None:
            output.mkdir(exist_ok=True)
            (output / "notes.txt").write_text("mine")

        with pytest.raises(ModelWriteError, match="cannot be written: Directory not empty"):
            quantize(model, output, overwrite=overwrite, progress=come)
        assert contents(output) == {"notes.txt": b"mine"}
    assert len(list(tmp_path.iterdir())) == 3


def test_overwritten_model_is_kept_until_new_one_is_complete(model: Path, tmp_path: Path) -> None:
    """State after a process was killed between the two renames."""
    old = tmp_path / ".out.1-2.old"
    quantize(model, old)
    os.utime(old, (0, 0))
    seen: list[bool] = []
    quantize(model, tmp_path / "out", progress=lambda *_: seen.append(old.exists()))
    assert all(seen)
    assert not old.exists()


def test_quantize_rejects_mount_points(model: Path) -> None:
    with pytest.raises(
        InvalidParameterError, match="output must be a directory inside the mount point, since the output is renamed"
    ):
        quantize(model, "/dev/shm" if Path("/dev/shm").is_mount() else "/proc")


def test_overwrite_replaces_packed_model(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    assert quantize(model, output, format="int8") == output
    first = contents(output)
    requirement = r"output must be empty, unless overwrite is true \(it holds a packed model\)"
    with pytest.raises(InvalidParameterError, match=requirement):
        quantize(model, output, format="int4")
    assert contents(output) == first
    quantize(model, output, format="int4", overwrite=True)
    assert load(output)["quantization"] == "int4"
    assert sorted(path.name for path in tmp_path.iterdir()) == [model.name, "out"]
    with pytest.raises(InvalidParameterError, match=r"model must be an unpacked model .this one is packed as 'int4'."):
        quantize(output, tmp_path / "again")
    for unknown in ("int5", ""):
        message = f"format must be one of bf16, f16, int8, int4, got '{unknown}'"
        with pytest.raises(InvalidParameterError, match=message):
            quantize(model, tmp_path / "other", format=unknown)


def test_packed_model_rejects_other_quantization(tmp_path: Path) -> None:
    packed = quantize(GOLDEN / "logits" / "llama", tmp_path / "packed", format="int8")
    with pytest.raises(InvalidParameterError, match="quantization must be auto or int8, the format in which"):
        LLM(packed, quantization="int4")
    with pytest.raises(
        InvalidParameterError, match=r"quantization must be auto or int8, the format in which .* is packed"
    ):
        model_info(packed, quantization="f32")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["format"] = "int4"
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match='is packed as "int8", but "int4" was requested'):
        LLM(packed)
    config["quantization_config"]["format"] = "int5"
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InvalidParameterError, match="quantization must be one of auto, f32, bf16, f16, int8, int4, got 'int5'"
    ):
        LLM(packed)


def test_symlinks_leaving_the_model_are_rejected(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (model / "vocab.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ModelFileError, match=r"vocab.txt: a link to .*secret.txt, which is outside"):
        quantize(model, tmp_path / "out")
    (model / "vocab.txt").unlink()
    (model / "merges.txt").write_text("a b")
    (model / "vocab.txt").symlink_to("merges.txt")
    out = quantize(model, tmp_path / "out")
    assert (out / "vocab.txt").read_text() == "a b"
    assert not (out / "vocab.txt").is_symlink()


def test_hub_snapshot_is_packed_with_subfolders(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 64, "pooling_mode": "mean"}')
    modules = [{"type": "models.Transformer", "path": ""}, {"type": "models.Pooling", "path": "1_Pooling"}]
    (model / "modules.json").write_text(json.dumps(modules))
    for number, path in enumerate(path for path in model.rglob("*") if path.is_file()):
        blob = repository / "blobs" / str(number)
        shutil.copy(path, blob)
        link = snapshot / path.relative_to(model)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(blob)
    out = quantize(snapshot, tmp_path / "out", format="int8")
    assert (out / "1_Pooling" / "config.json").is_file()
    with LLM(out) as llm, LLM(model, quantization="int8") as plain:
        prompt: Any = {"prompt_token_ids": PROMPT}
        assert (llm.embed(prompt)[0].outputs.embedding == plain.embed(prompt)[0].outputs.embedding).all()


def test_unwritable_output_is_reported(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelWriteError, match=r"file/out: cannot be written: File exists"):
        quantize(model, tmp_path / "file" / "out")


def test_quantize_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(model), "--format", "int8", "-o", str(out), "--threads", "1"]) == 0
    assert capsys.readouterr().err.startswith(f"{out}: int8, ")
    assert main(["quantize", str(model), "-o", str(out)]) == 2
    assert main(["quantize", str(model), "-o", str(model), "--overwrite"]) == 2
    assert main(["quantize", str(model)]) == 2
    assert main(["quantize", str(tmp_path / "none"), "-o", str(out)]) == 2
    assert main(["info", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantization"] == "int8"


class Sparse:
    """A packed bf16 model in a sparse file with a declared size, of which only a few pages are on the disk."""

    HIDDEN = 8192

    def __init__(self, directory: Path, claimed: int) -> None:
        directory.mkdir()
        hidden = self.HIDDEN
        vocab = claimed // (2 * hidden) // 16 * 16
        config = json.loads((GOLDEN / "logits" / "llama" / "config.json").read_text())
        config |= {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": 1, "tie_word_embeddings": True}
        config |= {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 64, "intermediate_size": 64}
        config["quantization_config"] = {"quant_method": "ferrule", "format": "bf16"}
        (directory / "config.json").write_text(json.dumps(config))
        vectors = ["final_norm", "layers.0.attention_norm", "layers.0.ffn_norm"]
        sizes = {f"{name}.weight": ("F32", 4 * hidden) for name in vectors}
        matrices = {
            "embedding": vocab * hidden,
            "layers.0.attention.q+k+v": 3 * hidden * hidden,
            "layers.0.attention.output": hidden * hidden,
            "layers.0.ffn.gate+up": 128 * hidden,
            "layers.0.ffn.down": hidden * 64,
        }
        sizes |= {f"{name}.0.bf16": ("U8", 2 * numbers) for name, numbers in matrices.items()}
        metadata = {"layout": "ferrule-2", "version": str(_native.layout_version), "quantization": "bf16"}
        header: dict[str, Any] = {"__metadata__": metadata}
        self.bytes = 0
        for name, (dtype, size) in sizes.items():
            shape = [size // (4 if dtype == "F32" else 1)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self.bytes, self.bytes + size]}
            self.bytes += size
        # The checksum of the header is right; the checksums of the tensors are not.
        checksums = 4 * (len(sizes) + 1)
        checksums += -checksums % 64
        end = self.bytes + checksums
        header["checksums"] = {"dtype": "U8", "shape": [checksums], "data_offsets": [self.bytes, end]}
        text = json.dumps(header).encode()
        text = struct.pack("<Q", -(len(text) + 8) % 4096 + len(text)) + text.ljust(-(len(text) + 8) % 4096 + len(text))
        with (directory / WEIGHTS).open("wb") as file:
            file.write(text)
            file.truncate(len(text) + end)
            file.seek(len(text) + self.bytes)
            file.write(struct.pack("<I", crc32c(text)))


def test_packed_weights_larger_than_memory_require_allow_paging(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    directory = tmp_path / "model"
    sparse = Sparse(directory, 4 * memory)
    weights = model_info(directory)["weight_bytes"]
    assert weights == sparse.bytes - 3 * 4 * Sparse.HIDDEN
    for options in ({}, {"mmap": False}):
        with pytest.raises(
            InsufficientMemoryError,
            match=rf"needs {weights} bytes for its packed weights, but only \d+ bytes are available.*allow_paging",
        ):
            LLM(directory, **options)  # pyright: ignore[reportArgumentType]
    assert not model_info(directory)["fits"]
    assert model_info(directory, allow_paging=True)["fits"]
    # Random numbers are not mapped.
    dummy = model_info(directory, allow_paging=True, load_format="dummy")
    assert not dummy["fits"]
    assert "allow_paging" not in dummy["verdict"]
    name = str(directory)
    served = load_models({"m": name}, {}, ServerSettings(), on_demand={name})["m"]
    assert isinstance(served, OnDemand)
    assert served.missing_memory() >= weights - memory
    with LLM(directory, allow_paging=True, threads=1) as llm:
        assert llm.info()["mapped_bytes"] == weights
        assert llm.info()["kv_cache_bytes"] > 0


def test_missing_memory_is_that_of_the_file_that_is_loaded(
    cache: PackedCache, model: Path, monkeypatch: pytest.MonkeyPatch
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


class Stop(SystemExit):
    """Exception that a handler of SIGTERM may raise."""


@pytest.mark.parametrize("raised", [KeyboardInterrupt, Stop])
@pytest.mark.parametrize("calibration", [None, [[7, 8, 9]]], ids=["plain", "calibrated"])
def test_interrupt_in_progress_callback_ends_work(
    raised: type[BaseException], calibration: list[list[int]] | None, model: Path, tmp_path: Path
) -> None:
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        raise raised

    files, options = read_model_files(model), EngineOptions(quantization="int4", threads=1)
    arguments = (files.spec.to_json(), str(model), options.to_json(), str(tmp_path / "out"), {})
    with pytest.raises(raised):
        _native.pack(*arguments, calibration, progress)
    assert calls == 1
    assert not (tmp_path / "out").exists()


def test_other_exceptions_in_progress_callback_are_ignored(model: Path, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        raise ValueError("a bar that is too long")

    quantize(model, tmp_path / "out", format="int4", progress=progress)
    with LLM(tmp_path / "out", threads=1) as llm:
        assert llm.info()["quantization"] == "int4"


@pytest.mark.parametrize("calibration", [None, [[7, 8, 9]]], ids=["plain", "calibrated"])
def test_packed_weights_are_not_packed_again(calibration: list[list[int]] | None, model: Path, tmp_path: Path) -> None:
    packed = quantize(model, tmp_path / "int4", format="int4") / WEIGHTS
    spec, options = read_model_files(model).spec.to_json(), EngineOptions(quantization="int4", threads=1).to_json()
    with pytest.raises(InvalidParameterError, match="model must be a checkpoint whose weights are not packed yet"):
        _native.pack(spec, str(packed), options, str(tmp_path / "out"), {}, calibration)
    assert not (tmp_path / "out").exists()
