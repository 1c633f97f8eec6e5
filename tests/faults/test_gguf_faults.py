"""Opening broken GGUF files raises a typed error in time and does not end the process.

The tests of the reader (rust/formats/tests/gguf_faults.rs) cover more variants of each fault.
"""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from faults.isolated import assert_refused, folder_bytes, run
from gguf_files import ARRAY, STRING, File, Tensor, array, boolean, floats, number, string, text

NAME = "model.gguf"
WARM_UP = """
    import ferrule
    from ferrule import _native
    _native.GgufFile(arguments[1])
"""
OPEN = "_native.GgufFile(arguments[0])"

U8 = 0
Q4_0, Q4_K = 2, 12
MODEL = File(
    keys=[
        ("general.architecture", text("llama")),
        ("general.alignment", number("u32", 32)),
        ("tokenizer.ggml.add_bos_token", boolean(1)),
        ("tokenizer.ggml.tokens", array(STRING, [string("a"), string("é")])),
        ("tokenizer.ggml.scores", array(6, [struct.pack("<f", -1.5), struct.pack("<f", 2)])),
    ],
    tensors=[floats("w", 1.0, 2.0), Tensor("q", [32, 2], Q4_0, bytes(36))],
)


def keys(*pairs: tuple[str | bytes, bytes]) -> File:
    return File(keys=list(pairs))


def tensors(*given: Tensor) -> File:
    return File(tensors=list(given))


def nested(depth: int) -> bytes:
    """Encodes nested arrays of one element each; the innermost holds a byte."""
    level = struct.pack("<IQ", ARRAY, 1)
    return struct.pack("<I", ARRAY) + level * (depth - 1) + struct.pack("<IQ", U8, 1) + b"\x07"


def alignment(value: bytes) -> File:
    return keys(("general.alignment", value))


MANY = [Tensor(f"{index:0255}", [1, 1, 1, 1], data=bytes(4)) for index in range((1 << 14) - 1)]
"""The largest valid tensor table: the maximum number of tensors, with names of maximum length."""

FAULTS: list[tuple[str, bytes | File, list[str]]] = [
    ("empty", b"", ["empty", "0 bytes"]),
    ("magic", b"GGML" + bytes(60), ['"GGML"', 'not with "GGUF"']),
    ("version-0", replace(MODEL, version=0), ["version 0", "2 and 3"]),
    ("version-1", replace(MODEL, version=1), ["version 1", "2 and 3"]),
    ("version-99", replace(MODEL, version=99), ["version 99", "2 and 3"]),
    ("big-endian", replace(MODEL, version=3 << 24), ["big-endian", "version 3"]),
    ("tensor-count", replace(MODEL, tensor_count=(1 << 64) - 1), ["tensor_count is 18446744073709551615"]),
    ("key-count", File(key_count=500_000_000), ["metadata_kv_count is 500000000", "0 bytes", "at most 0"]),
    ("key-length", File(key_count=1).bytes() + struct.pack("<QQ", 1 << 63, 0), ["name of key 0", str(1 << 63)]),
    ("string-length", keys(("k", struct.pack("<IQ", STRING, 1 << 63))), ['"k"', "9223372036854775808 bytes"]),
    ("array-length", keys(("k", array(U8, [b"1"], 1 << 63))), ['the length of "k"', "at most 1"]),
    ("not-utf8", keys(("k", text(b"a\xff"))), ['"k"', "not valid UTF-8"]),
    ("nesting", keys(("k", nested(100_000))), ['"k"', "deeper than 4"]),
    ("elements", keys(("k", array(U8, [bytes(5 << 20)], 5 << 20))), ['"k"', "5242880", "4194304"]),
    ("value-type", keys(("k", struct.pack("<II", 13, 0))), ['"k"', "unknown type 13"]),
    ("element-type", keys(("k", array(255, []))), ['"k"', "unknown type 255"]),
    ("bool", keys(("k", boolean(2))), ['"k"', "got 2"]),
    ("duplicate-key", keys(("k", boolean(1)), ("l", boolean(0)), ("k", boolean(1))), ['duplicate key "k"']),
    ("alignment-0", alignment(number("u32", 0)), ["general.alignment", "got 0", "power of two"]),
    ("alignment-13", alignment(number("u32", 13)), ["general.alignment", "got 13", "power of two"]),
    ("alignment-2-to-31", alignment(number("u32", 1 << 31)), ["general.alignment", "got 2147483648", "2097152"]),
    ("alignment-type", alignment(text("32")), ["general.alignment", "STRING", "UINT32"]),
    ("dimensions", tensors(Tensor("w", [1], dimension_count=(1 << 32) - 1)), ['"w"', "4294967295", "limit is 4"]),
    ("zero-dimension", tensors(Tensor("w", [4, 0])), ['"w"', "[4, 0]"]),
    ("overflow", tensors(Tensor("w", [1 << 40, 1 << 40])), ['"w"', "64 bits"]),
    ("tensor-type", tensors(Tensor("w", [4], 99, bytes(64))), ['"w"', "unknown type 99"]),
    ("obsolete-type", tensors(Tensor("w", [32], 4, bytes(64))), ['"w"', "Q4_2"]),
    ("row", tensors(Tensor("w", [48], Q4_0, bytes(64))), ['"w"', "48", "32", "Q4_0"]),
    ("row-of-k", tensors(Tensor("w", [32, 8], Q4_K, bytes(144))), ['"w"', "32", "256", "Q4_K"]),
    ("misaligned", tensors(replace(floats("w", 1.0), offset=4)), ['"w"', "alignment 32", "got 4"]),
    ("overlap", tensors(floats("v", *[0.0] * 9), replace(floats("w", 1.0), offset=32)), ['"w"', '"v"', "36"]),
    (
        "past-the-end",
        tensors(replace(floats("w", 1.0), offset=1 << 40)),
        ['"w"', "1099511627776", "has only 4 bytes"],
    ),
    ("offset-overflow", tensors(replace(floats("w", 1.0), offset=(1 << 64) - 32)), ['"w"', "18446744073709551584"]),
    ("duplicate-among-many", tensors(*MANY, MANY[-1]), ["duplicate tensor"]),
    ("duplicate-tensor", tensors(floats("w", 1.0), floats("w", 2.0)), ['duplicate tensor "w"']),
    ("truncated-data", MODEL.bytes()[:-1], ['"q"', "takes 36 bytes", "truncated"]),
]


@pytest.fixture
def valid(tmp_path: Path) -> str:
    (tmp_path / "valid").mkdir()
    return str(MODEL.write(tmp_path / "valid" / NAME))


@pytest.mark.parametrize(
    ("file", "fragments"),
    [pytest.param(file, fragments, id=name) for name, file, fragments in FAULTS],
)
def test_broken_gguf_file_is_a_typed_error(
    tmp_path: Path, valid: str, file: bytes | File, fragments: list[str]
) -> None:
    path = tmp_path / NAME
    path.write_bytes(file if isinstance(file, bytes) else file.bytes())
    outcome = run(OPEN, str(path), valid, warm_up=WARM_UP)
    assert_refused(outcome, "ModelFileError", [NAME, *fragments], file_bytes=path.stat().st_size)
    assert "OSError" in outcome.bases


def test_every_truncation_is_a_typed_error(tmp_path: Path, valid: str) -> None:
    whole = MODEL.bytes()
    every = """
        from pathlib import Path
        from ferrule.errors import ModelFileError

        path = Path(arguments[0])
        whole = path.read_bytes()
        for end in range(len(whole)):
            path.write_bytes(whole[:end])
            try:
                _native.GgufFile(arguments[0])
            except ModelFileError as error:
                if str(path) not in str(error):
                    raise RuntimeError(f"names no file: {error}") from None
            else:
                raise RuntimeError(f"accepted with {end} of {len(whole)} bytes")
        raise ModelFileError(f"{len(whole)} were refused")
    """
    path = tmp_path / NAME
    path.write_bytes(whole)
    outcome = run(every, str(path), valid, warm_up=WARM_UP)
    assert_refused(outcome, "ModelFileError", [f"{len(whole)} were refused"], file_bytes=len(whole))


def part(index: int, count: int = 3, total: int = 3) -> File:
    split = [("split.no", number("u16", index)), ("split.count", number("u16", count))]
    return File(keys=[*split, ("split.tensors.count", number("i32", total))], tensors=[floats(f"w{index}", 1.0)])


def part_name(index: int, count: int = 3) -> str:
    return f"model-{index + 1:05}-of-{count:05}.gguf"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Directory with a valid model in three parts that tests then break."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for index in range(3):
        part(index).write(folder / part_name(index))
    return folder


def part_missing(folder: Path) -> None:
    (folder / part_name(1)).unlink()


def part_of_another_count(folder: Path) -> None:
    part(1, count=4).write(folder / part_name(1))


def part_of_another_number(folder: Path) -> None:
    part(2).write(folder / part_name(1))


def part_that_is_none(folder: Path) -> None:
    MODEL.write(folder / part_name(1))


def part_that_is_broken(folder: Path) -> None:
    (folder / part_name(1)).write_bytes(b"GGUF")


def part_without_tensors(folder: Path) -> None:
    replace(part(1), tensors=[]).write(folder / part_name(1))


def split_file_with_duplicate_tensor(folder: Path) -> None:
    replace(part(1), tensors=[floats("w0", 1.0)]).write(folder / part_name(1))


def part_that_leaves(folder: Path) -> None:
    (folder / part_name(1)).rename(folder.parent / "outside.gguf")
    (folder / part_name(1)).symlink_to(folder.parent / "outside.gguf")


def first_part_of_a_million(folder: Path) -> None:
    keys = [("split.no", number("u32", 0)), ("split.count", number("u32", 1_000_000))]
    File(keys=list(keys)).write(folder / part_name(0))


PART_FAULTS: list[tuple[Callable[[Path], None], list[str]]] = [
    (part_missing, [part_name(0), part_name(1), "is missing"]),
    (part_of_another_count, [part_name(1), "split.count = 4", "3"]),
    (part_of_another_number, [part_name(1), "split.no = 2", "1"]),
    (part_that_is_none, [part_name(1), "split.count = nothing"]),
    (part_that_is_broken, [part_name(1), "is truncated in the version"]),
    (part_without_tensors, [part_name(0), "split.tensors.count is 3", "2 tensors"]),
    (split_file_with_duplicate_tensor, [part_name(1), '"w0"', part_name(0)]),
    (part_that_leaves, [part_name(1), "outside", "refused"]),
    (first_part_of_a_million, [part_name(0), "split.count", "got 1000000", "99999"]),
]


@pytest.mark.parametrize(
    ("break_parts", "fragments"), [pytest.param(*fault, id=fault[0].__name__) for fault in PART_FAULTS]
)
def test_mismatched_split_files_are_a_typed_error(
    parts: Path, valid: str, break_parts: Callable[[Path], None], fragments: list[str]
) -> None:
    break_parts(parts)
    outcome = run(OPEN, str(parts / part_name(0)), valid, warm_up=WARM_UP)
    assert_refused(outcome, "ModelFileError", fragments, file_bytes=folder_bytes(parts))


def test_valid_split_files_load(parts: Path, valid: str) -> None:
    for index in range(3):
        outcome = run(OPEN, str(parts / part_name(index)), valid, warm_up=WARM_UP)
        assert outcome.error is None, outcome.message
