"""Loading broken checkpoints with `LLM` raises a typed error in time and does not end the process.

The tests of the reader (rust/formats/tests) cover more variants of each fault.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.isolated import assert_refused, folder_bytes, run

GOLDEN = Path(__file__).parents[1] / "golden" / "logits" / "llama"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"

WARM_UP = """
    from ferrule import LLM
    LLM(arguments[1], threads=1)
"""
LOAD = "LLM(arguments[0], threads=1)"

Tensors = dict[str, dict[str, object]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Directory of a valid model that tests then break."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", WEIGHTS):
        shutil.copy(GOLDEN / name, folder / name)
        (folder / name).chmod(0o644)
    return folder


def read(folder: Path) -> tuple[Tensors, bytes]:
    """Reads the header and the data of the directory's weights."""
    raw = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, raw[8 + length :]


def write(folder: Path, header: Tensors | bytes, data: bytes, name: str = WEIGHTS) -> None:
    """Writes a safetensors file with the given header and data, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Changes the header's entry of the embedding."""
    header, data = read(folder)
    change(header[EMBEDDING])
    write(folder, header, data)


def shard(folder: Path) -> Tensors:
    """Turns the directory's weights into one shard with an index; returns the header."""
    header, _ = read(folder)
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(header, "model-1.safetensors")}))
    return header


def point(folder: Path, tensor: str, name: str) -> None:
    """Makes the index map `tensor` to the file `name`."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][tensor] = name
    (folder / INDEX).write_text(json.dumps(index))


def header_of_200_mb(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 200_000_000) + b"{}")


def header_of_2_to_63(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 63) + b"{}")


def header_past_the_end(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 1000) + b"{}")


def not_utf8(folder: Path) -> None:
    write(folder, b'{"\xff":{}}', b"")


def not_an_object(folder: Path) -> None:
    write(folder, b"[]", b"")


def duplicate_key(folder: Path) -> None:
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write(folder, b"{" + entry + b"," + entry + b"}", b"\0")


def deep_json(folder: Path) -> None:
    write(folder, b'{"a":' + b"[" * 100_000, b"")


def hole(folder: Path) -> None:
    header, data = read(folder)
    header["late"] = {"dtype": "U8", "shape": [1], "data_offsets": [len(data) + 4, len(data) + 5]}
    write(folder, header, data + bytes(5))


def overlap(folder: Path) -> None:
    header, data = read(folder)
    header["again"] = {"dtype": "U8", "shape": [4], "data_offsets": [len(data) - 4, len(data)]}
    write(folder, header, data)


def trailing_bytes(folder: Path) -> None:
    header, data = read(folder)
    write(folder, header, data + bytes(7))


def shape_differs_from_span(folder: Path) -> None:
    edit(folder, lambda entry: entry.update(shape=[321, 64]))


def product_overflows(folder: Path) -> None:
    edit(folder, lambda entry: entry.update(shape=[1 << 40, 1 << 40]))


def unknown_dtype(folder: Path) -> None:
    edit(folder, lambda entry: entry.update(dtype="F17"))


def weights_of_integers(folder: Path) -> None:
    edit(folder, lambda entry: entry.update(dtype="I16"))


def weight_map_climbs(folder: Path) -> None:
    shard(folder)
    shutil.copy(folder / "model-1.safetensors", folder.parent / "outside.safetensors")
    point(folder, EMBEDDING, "../outside.safetensors")


def weight_map_absolute(folder: Path) -> None:
    shard(folder)
    point(folder, EMBEDDING, str(folder / "model-1.safetensors"))


def link_leaves(folder: Path) -> None:
    shard(folder)
    outside = folder.parent / "outside.safetensors"
    (folder / "model-1.safetensors").rename(outside)
    (folder / "model-1.safetensors").symlink_to(outside)


def shard_missing(folder: Path) -> None:
    shard(folder)
    point(folder, EMBEDDING, "model-2.safetensors")


def shard_lacks_a_key(folder: Path) -> None:
    shard(folder)
    point(folder, "not.there", "model-1.safetensors")


def shard_one_byte_short(folder: Path) -> None:
    shard(folder)
    path = folder / "model-1.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def only_pickles(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}.")


def lfs_pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 343968\n")


def empty_file(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


FAULTS: list[tuple[Callable[[Path], None], list[str]]] = [
    (header_of_200_mb, [WEIGHTS, "200000000", "100000000"]),
    (header_of_2_to_63, [WEIGHTS, str(1 << 63)]),
    (header_past_the_end, [WEIGHTS, "1000", "2 bytes follow"]),
    (not_utf8, [WEIGHTS, "UTF-8"]),
    (not_an_object, [WEIGHTS, "'['"]),
    (duplicate_key, [WEIGHTS, 'duplicate key "a"']),
    (deep_json, [WEIGHTS, "invalid"]),
    (hole, [WEIGHTS, '"late"', "not part of any tensor"]),
    (overlap, [WEIGHTS, '"again"', "inside another"]),
    (trailing_bytes, [WEIGHTS, "7 bytes after"]),
    (shape_differs_from_span, [WEIGHTS, EMBEDDING, "[321, 64]"]),
    (product_overflows, [WEIGHTS, EMBEDDING, "64 bits"]),
    (unknown_dtype, [WEIGHTS, EMBEDDING, "F17", "BF16"]),
    (weights_of_integers, [WEIGHTS, EMBEDDING, "I16", "BF16"]),
    (weight_map_climbs, [INDEX, EMBEDDING, "../outside.safetensors", "refused"]),
    (weight_map_absolute, [INDEX, EMBEDDING, "model-1.safetensors", "refused"]),
    (link_leaves, ["model-1.safetensors", "outside", "refused"]),
    (shard_missing, [INDEX, EMBEDDING, "model-2.safetensors"]),
    (shard_lacks_a_key, [INDEX, "not.there", "model-1.safetensors"]),
    (shard_one_byte_short, ["model-1.safetensors", "1 bytes are missing"]),
    (only_pickles, ["pytorch_model.bin", "pickle"]),
    (lfs_pointer, [WEIGHTS, "Download the weights", "git lfs pull"]),
    (empty_file, [WEIGHTS, "empty"]),
]


@pytest.mark.parametrize(
    ("break_model", "fragments"),
    [pytest.param(change, fragments, id=change.__name__) for change, fragments in FAULTS],
)
def test_broken_checkpoint_is_a_typed_error(
    model: Path, break_model: Callable[[Path], None], fragments: list[str]
) -> None:
    break_model(model)
    outcome = run(LOAD, str(model), str(GOLDEN), warm_up=WARM_UP)
    assert_refused(outcome, "ModelFileError", fragments, file_bytes=folder_bytes(model))
    assert "OSError" in outcome.bases


def test_valid_checkpoint_loads(model: Path) -> None:
    outcome = run(LOAD, str(model), str(GOLDEN), warm_up=WARM_UP)
    assert outcome.error is None, outcome.message


def test_sharded_checkpoint_loads(model: Path) -> None:
    shard(model)
    outcome = run(LOAD, str(model), str(GOLDEN), warm_up=WARM_UP)
    assert outcome.error is None, outcome.message


def test_model_larger_than_memory_names_required_and_available_bytes(model: Path) -> None:
    """The file is sparse: it claims four times the machine's memory and takes a few pages of disk."""
    config = json.loads((model / "config.json").read_text())
    hidden = 8192
    rows = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 * hidden)
    config.update(vocab_size=rows, hidden_size=hidden, num_hidden_layers=1, tie_word_embeddings=True)
    config.update(num_attention_heads=128, num_key_value_heads=128, head_dim=64, intermediate_size=64)
    (model / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes = {EMBEDDING: [rows, hidden], "model.norm.weight": [hidden]}
    shapes |= {f"{layer}{norm}.weight": [hidden] for norm in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"{layer}self_attn.{name}_proj.weight": [hidden, hidden] for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": [64, hidden] for name in ("gate", "up")}
    shapes |= {f"{layer}mlp.down_proj.weight": [hidden, 64]}
    header: Tensors = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    write(model, header, b"")
    path = model / WEIGHTS
    os.truncate(path, path.stat().st_size + end)

    outcome = run(LOAD, str(model), str(GOLDEN), warm_up=WARM_UP, address_space=None)
    assert_refused(outcome, "InsufficientMemoryError", ["needs", "available"])
    assert "MemoryError" in outcome.bases
