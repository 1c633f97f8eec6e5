"""Broken packed files, and disk and process failures while a packed file is written.

A failed write leaves the previous file or none; a file that loads is always correct.
"""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crc32c import crc32c
from faults.isolated import assert_refused, folder_bytes, run
from ferrule import quantize

GOLDEN = Path(__file__).parents[1] / "golden" / "logits" / "llama"
WEIGHTS = "model.safetensors"
QKV = "layers.0.attention.q+k+v"
DOWN = "layers.0.ffn.down.0"

WARM_UP = """
    from ferrule import LLM
    LLM(arguments[1], threads=1)
"""
LOAD = "LLM(arguments[0], threads=1)"
LOAD_INTO_MEMORY = "LLM(arguments[0], threads=1, mmap=False)"

Header = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid packed model."""
    return quantize(GOLDEN, tmp_path_factory.mktemp("packed") / "int4", format="int4")


@pytest.fixture
def broken(packed: Path, tmp_path: Path) -> Path:
    """A copy of the packed model that tests then break."""
    return Path(shutil.copytree(packed, tmp_path / "broken"))


def read(folder: Path) -> tuple[Header, bytes]:
    raw = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(folder: Path, header: Header, data: bytes, start: int = 1 << 16) -> None:
    """Writes a file whose data begin at byte `start`, with a valid header checksum if the file has checksums."""
    text = json.dumps(header).encode().ljust(start - 8)
    text = struct.pack("<Q", len(text)) + text
    if "checksums" in header:
        at = header["checksums"]["data_offsets"][0]
        data = data[:at] + struct.pack("<I", crc32c(text)) + data[at + 4 :]
    (folder / WEIGHTS).write_bytes(text + data)


def edited(change: Callable[[Header], object]) -> Callable[[Path], None]:
    """Replaces the header before the same data."""

    def edit(folder: Path) -> None:
        header, data = read(folder)
        change(header)
        write(folder, header, data)

    return edit


def metadata_with(**metadata: str) -> Callable[[Path], None]:
    return edited(lambda header: header["__metadata__"].update(metadata))


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return edited(lambda header: header.update({new: header.pop(old)}))


def cut_short(folder: Path) -> None:
    path = folder / WEIGHTS
    os.truncate(path, path.stat().st_size - 1)


def shifted(folder: Path) -> None:
    header, data = read(folder)
    write(folder, header, data, start=(1 << 16) + 64)


def resized(tensor: str, size: int) -> Callable[[Path], None]:
    """Changes a tensor's length and shifts the tensors after it."""

    def edit(folder: Path) -> None:
        header, data = read(folder)
        pieces = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items() if name[0] != "_"}
        pieces[tensor] = pieces[tensor][:size].ljust(size, b"\0")
        end, all_data = 0, b""
        for name, piece in pieces.items():
            element = 4 if header[name]["dtype"] == "F32" else 1
            header[name] |= {"shape": [len(piece) // element], "data_offsets": [end, end + len(piece)]}
            end += len(piece)
            all_data += piece
        write(folder, header, all_data)

    return edit


def both(first: Callable[[Path], None], second: Callable[[Path], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        first(folder)
        second(folder)

    return edit


def in_format(name: str, size: int) -> Callable[[Path], None]:
    """Changes a matrix of 64 x 160 weights to another format with the given number of bytes."""
    return both(resized(f"{DOWN}.int6", size), renamed(f"{DOWN}.int6", f"{DOWN}.{name}"))


def replaced_by_the_model(folder: Path) -> None:
    shutil.copy(GOLDEN / WEIGHTS, folder / WEIGHTS)


def deleted(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


BROKEN: list[tuple[str, Callable[[Path], None], list[str]]] = [
    ("another version", metadata_with(version="99"), ["layout", "ferrule-2 99", "pack the model again"]),
    ("another layout", metadata_with(layout="elsewhere"), ["elsewhere", "pack the model again"]),
    ("another quantization", metadata_with(quantization="int8"), ['packed as "int8"', '"int4"']),
    ("no metadata", edited(lambda header: header.pop("__metadata__")), ["none none", "pack the model again"]),
    ("a checkpoint", replaced_by_the_model, ["none none", "pack the model again"]),
    ("one byte short", cut_short, ["is the file truncated?"]),
    ("data at no page", shifted, ["got 65600", "4096"]),
    ("a tensor of 63 bytes", resized("final_norm.weight", 60), ["final_norm.weight", "got 60", "multiple of 64"]),
    ("a shorter vector", resized("final_norm.weight", 192), ["final_norm.weight", "192 bytes", "256"]),
    ("fewer rows", resized("layers.0.ffn.down.0.int6", 64), ["layers.0.ffn.down", "0 rows"]),
    ("fewer steps", resized("embedding.0.int6.steps", 64), ["embedding.0.int6.steps", "64 bytes"]),
    ("no steps", renamed("embedding.0.int6.steps", "nothing"), ["no tensor", "embedding.0.int6.steps"]),
    ("another format", renamed("embedding.0.int6", "embedding.0.int8"), ["embedding.0.int8"]),
    ("a format whose blocks are longer than rows", in_format("q4_k", 6144), [f"{DOWN}.q4_k", "256 inputs", "160"]),
    ("numbers for codes", in_format("bf16", 2 * 64 * 160), [f"{DOWN}.bf16", "in place of int6"]),
    ("an unknown format", renamed("embedding.0.int6", "embedding.0.int7"), ["no tensor", "embedding.0"]),
    ("no matrix", renamed(f"{QKV}.0.int4", "nothing"), ["no tensor", QKV]),
    ("no file", deleted, [WEIGHTS]),
]


@pytest.mark.parametrize("load", [LOAD, LOAD_INTO_MEMORY], ids=["mapped", "read"])
@pytest.mark.parametrize(("change", "fragments"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_broken_packed_file_is_a_typed_error(
    change: Callable[[Path], None], fragments: list[str], load: str, broken: Path, packed: Path
) -> None:
    change(broken)
    outcome = run(load, str(broken), str(packed), warm_up=WARM_UP)
    assert_refused(outcome, "ModelFileError", [WEIGHTS, *fragments], file_bytes=folder_bytes(broken))


def test_random_weight_bytes_run_or_give_engine_error(broken: Path, packed: Path) -> None:
    """Damaged weights that the header cannot reveal change the numbers, but do not crash."""
    header, data = read(broken)
    rng = random.Random(1)
    write(broken, header, bytes(len(data) // 2) + rng.randbytes(len(data) - len(data) // 2))
    prompt = """
        with LLM(arguments[0], threads=1) as llm:
            try:
                llm.generate({"prompt_token_ids": [7, 8, 9]})
            except RuntimeError as error:
                assert "EngineError" in str(type(error)), error
    """
    outcome = run(prompt, str(broken), str(packed), warm_up=WARM_UP)
    assert outcome.error is None, outcome.message


# A model of three million weights, so that packing takes long enough to be killed.

LAYERS, HIDDEN, INNER, VOCAB = 3, 256, 1024, 1024
KILLS = 20
MOST_ATTEMPTS = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "model"
    folder.mkdir()
    config: dict[str, Any] = json.loads((GOLDEN / "config.json").read_text())
    config |= {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": INNER}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": [VOCAB, HIDDEN], "model.norm": [HIDDEN]}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj": [HIDDEN, HIDDEN] for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj": [INNER, HIDDEN] for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj": [HIDDEN, INNER]}
        shapes |= {f"{at}{name}_layernorm": [HIDDEN] for name in ("input", "post_attention")}
    header: Header = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    # Weights of magnitude 0.01 with random mantissas.
    rng = random.Random(0)
    data = bytearray(rng.randbytes(end))
    data[1::2] = bytes(0x3C | byte & 0x80 for byte in data[1::2])
    write(folder, header, bytes(data))
    return folder


QUANTIZE = """
import sys
from ferrule import quantize
print("begin", flush=True)
quantize(sys.argv[1], sys.argv[2], format=sys.argv[3], threads=1, overwrite=True)
print("end", flush=True)
"""
INTERRUPTED = """
import signal, sys
from ferrule import quantize
# Ctrl-C comes after some processor time, whatever else the machine does.
signal.signal(signal.SIGVTALRM, lambda *_: signal.raise_signal(signal.SIGINT))
signal.setitimer(signal.ITIMER_VIRTUAL, float(sys.argv[4]))
print("begin", flush=True)
quantize(sys.argv[1], sys.argv[2], format=sys.argv[3], threads=1, overwrite=True)
"""
FIRST_LOAD = """
import sys
from ferrule import LLM
from ferrule._loading import packing
packing.SMALLEST = 0
print("begin", flush=True)
LLM(sys.argv[1], quantization=sys.argv[3], threads=1, kv_cache_memory=1 << 24)
print("end", flush=True)
"""


def begun(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts a process and returns once it has begun packing."""
    command = [sys.executable, "-c", program, *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    assert child.stdout is not None
    assert child.stdout.readline() == "begin\n"
    return child


def seconds_of(program: str, *arguments: str, **environment: str) -> float:
    """Returns the seconds that packing takes without interruption."""
    start = time.monotonic()
    child = begun(program, *arguments, **environment)
    with child:
        begin = time.monotonic() - start
        assert child.wait(timeout=120) == 0
    return time.monotonic() - start - begin


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leftovers(folder: Path, kept: set[str]) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in kept]


class Killer:
    """Kills processes at random times during their work, which takes some seconds."""

    def __init__(self, seconds: float, seed: int) -> None:
        self._seconds = seconds
        self._random = random.Random(seed)

    def kill(self, child: subprocess.Popen[str]) -> bool:
        """Kills a process and returns whether it was still running."""
        with child:
            time.sleep(self._random.uniform(0, self._seconds))
            child.kill()
            assert child.stdout is not None
            running = "end" not in child.stdout.read()
        if not running:  # the machine may have become faster
            self._seconds *= 0.8
        return running


def test_sigkill_during_quantize_leaves_old_model_or_none(model: Path, tmp_path: Path) -> None:
    out, new = tmp_path / "out", tmp_path / "new"
    quantize(model, out, format="int8")
    old = contents(out)
    killer = Killer(seconds_of(QUANTIZE, str(model), str(new), "int4"), seed=65)
    whole = contents(new)
    killed = 0
    for attempt in range(MOST_ATTEMPTS):
        # The directory alternately has no packed file, or an older one in another format.
        target, before = (new, None) if attempt % 2 == 0 else (out, old)
        if attempt % 2 == 0:
            shutil.rmtree(new, ignore_errors=True)
        elif not out.exists() or contents(out) != old:
            quantize(model, out, format="int8", overwrite=True)
        killed += killer.kill(begun(QUANTIZE, str(model), str(target), "int4"))
        after = contents(target) if target.exists() else None
        assert after in (before, whole, None), f"attempt {attempt}: neither the old one nor the new, nor none"
        if killed == KILLS:
            break
    assert killed == KILLS
    for path in leftovers(tmp_path, {"out", "new"}):
        os.utime(path, (0, 0))
    for target in (out, new):
        quantize(model, target, format="int4", overwrite=True)
        assert contents(target) == whole
    assert not leftovers(tmp_path, {"out", "new"}), "what the killed ones left is gone"


def test_sigkill_during_first_load_leaves_complete_packed_file_or_none(model: Path, tmp_path: Path) -> None:
    environment = {"FERRULE_CACHE": str(tmp_path / "cache")}
    folder = tmp_path / "cache" / "packed"
    killer = Killer(seconds_of(FIRST_LOAD, str(model), "-", "int4", **environment), seed=66)
    [(name, whole)] = contents(folder).items()
    killed = 0
    for attempt in range(MOST_ATTEMPTS):
        (folder / name).unlink(missing_ok=True)
        killed += killer.kill(begun(FIRST_LOAD, str(model), "-", "int4", **environment))
        found = {name: data for name, data in contents(folder).items() if not name.startswith(".")}
        assert found in ({}, {name: whole}), f"attempt {attempt}: a file that is not whole has its name"
        if killed == KILLS:
            break
    assert killed == KILLS
    for path in leftovers(folder, {name}):
        os.utime(path, (0, 0))
    (folder / name).unlink(missing_ok=True)
    seconds_of(FIRST_LOAD, str(model), "-", "int4", **environment)
    assert contents(folder) == {name: whole}, "what the killed ones left is gone"


def test_concurrent_first_loads_succeed(model: Path, tmp_path: Path) -> None:
    environment = {"FERRULE_CACHE": str(tmp_path / "cache")}
    children = [begun(FIRST_LOAD, str(model), "-", "int4", **environment) for _ in range(3)]
    for child in children:
        with child:
            assert child.wait(timeout=120) == 0
    assert len(contents(tmp_path / "cache" / "packed")) == 1


def test_ctrl_c_during_quantize_leaves_no_partial_files(model: Path, tmp_path: Path) -> None:
    start = time.process_time()
    quantize(model, tmp_path / "out", format="int4", threads=1)
    seconds = time.process_time() - start
    quantize(model, tmp_path / "out", format="int8", overwrite=True)
    before = contents(tmp_path / "out")
    child = begun(INTERRUPTED, str(model), str(tmp_path / "out"), "int4", str(seconds / 3))
    with child:
        assert child.wait(timeout=120) != 0
    assert contents(tmp_path / "out") == before
    assert not leftovers(tmp_path, {"out"})


FULL_DISK = """
    import resource, warnings
    from ferrule import LLM, quantize
    from ferrule._loading import packing
    packing.SMALLEST = 0
    def fill_disk_up(): resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def test_full_disk_during_quantize_keeps_old_model(model: Path, tmp_path: Path) -> None:
    """A file size limit simulates a full disk: the system refuses to write more."""
    out = quantize(model, tmp_path / "out", format="int8")
    before = contents(out)
    fault = """
        fill_disk_up()
        quantize(arguments[0], arguments[1], overwrite=True)
    """
    for output in (out, tmp_path / "new"):
        outcome = run(fault, str(model), str(output), warm_up=FULL_DISK)
        assert_refused(outcome, "ModelWriteError", [str(output / WEIGHTS), "cannot be written: File too large"])
        assert "OSError" in outcome.bases
    assert contents(out) == before
    assert not leftovers(tmp_path, {"out"})


def test_full_disk_during_first_load_packs_in_memory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = """
        fill_disk_up()
        with warnings.catch_warnings(record=True) as caught:
            with LLM(arguments[0], quantization="int4", threads=1, kv_cache_memory=1 << 24) as llm:
                assert llm.info()["packed_file"] is None
                llm.generate({"prompt_token_ids": [7, 8, 9]})
        [warning] = caught
        assert "packed in memory" in str(warning.message) and "File too large" in str(warning.message), warning
    """
    monkeypatch.setenv("FERRULE_CACHE", str(tmp_path))
    outcome = run(fault, str(model), warm_up=FULL_DISK)
    assert outcome.error is None, outcome.message
    assert not contents(tmp_path), "nothing half written"


def test_output_equal_to_input_is_rejected(packed: Path, model: Path) -> None:
    before = contents(model)
    fault = "quantize(arguments[0], arguments[1], overwrite=True)"
    warm_up = "from ferrule import quantize"
    outcome = run(fault, str(model), str(model), warm_up=warm_up)
    assert_refused(
        outcome,
        "InvalidParameterError",
        [f"output must be a directory other than the model's own and its parents, got '{model}'"],
    )
    outcome = run(fault, str(packed), str(packed), warm_up=warm_up)
    assert_refused(
        outcome,
        "InvalidParameterError",
        [f"model must be an unpacked model (this one is packed as 'int4'), got '{packed}'"],
    )
    assert contents(model) == before
