"""Most likely tokens of a teacher model for distillation: reading them from the engine, and exporting them to files.

An export is a directory of safetensors shards and an `index.json` that lists them; it is rewritten after each shard.
Files are written under a temporary name, synced and renamed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ferrule._engine.encoding.texts import Text
from ferrule._params.sampling import MAX_COUNT
from ferrule._validation import check_integer, shown
from ferrule.errors import InvalidParameterError
from ferrule.outputs import TopLogprobs

if TYPE_CHECKING:
    import numpy.typing as npt

INDEX = "index.json"
FORMAT = "ferrule.top_logprobs"
VERSION = 1
TEMPORARY = ".partial"
"""Suffix of a file that is being written."""
DTYPES = {"int32": "I32", "int64": "I64", "float32": "F32"}
"""Names of dtypes in safetensors, by their names in NumPy."""
SHARD = {"file": str, "texts": int, "tokens": int, "sha256_of_token_ids": str}
"""Fields of a shard in the index, with their types."""
ALIGNMENT = 64
"""Alignment of the tensors of a shard in bytes, so that they can be mapped."""


def check_count(k: object, vocab_size: int) -> int:
    """Returns `k` if it is an integer from 1 to the size of the vocabulary.

    Raises InvalidParameterError.
    """
    return check_integer("k", k, 1, vocab_size)


def top_logprobs_task(k: int) -> str:
    """Returns the task of `Engine.encode` as JSON."""
    return json.dumps({"type": "top_logprobs", "count": k})


def unpack(answer: bytes | bytearray, texts: Sequence[Text], k: int) -> Iterator[TopLogprobs]:
    """Splits the engine's answer, `[tokens, 2, k]` for all texts, into the result of each text."""
    import numpy as np

    numbers = np.frombuffer(answer, dtype=np.float32).reshape(-1, 2, k)
    first = 0
    for text in texts:
        rows = numbers[first : first + len(text.token_ids)]
        first += len(text.token_ids)
        # Copies, so that a result does not keep all others alive. Ids are stored as the bits of floats.
        ids = rows[:, 0].copy().view(np.int32)
        yield TopLogprobs(np.array(text.token_ids, dtype=np.int32), ids, rows[:, 1].copy())


def export(
    texts: Iterable[Text],
    compute: Callable[[Iterable[Text]], Generator[TopLogprobs, None, None]],
    out_dir: str | os.PathLike[str],
    *,
    source: Mapping[str, Any],
    shard_size: int,
    progress: Callable[[int, int], None] | None,
) -> int:
    """Implements `LLM.export_top_logprobs`; to resume an export, the fields of `source` must be unchanged."""
    shard_size = check_integer("shard_size", shard_size, 1, MAX_COUNT)
    folder = Path(out_dir)
    index = _open_index(folder, {"format": FORMAT, "version": VERSION, **source, "shard_size": shard_size})
    shards: list[dict[str, Any]] = index["shards"]
    rest = iter(texts)
    for shard in shards:
        _skip(rest, shard, folder)

    def count(field: str) -> int:
        return sum(shard[field] for shard in shards)

    for number, shard in enumerate(_shards(compute(rest), shard_size), start=len(shards)):
        name = f"shard-{number:05}.safetensors"
        _write(folder / name, _safetensors(_tensors(shard)))
        digest = _digest([text.token_ids.tolist() for text in shard])
        tokens = sum(len(text.token_ids) for text in shard)
        shards.append({"file": name, "texts": len(shard), "tokens": tokens, "sha256_of_token_ids": digest})
        _write_index(folder, index)
        if progress is not None:
            progress(count("texts"), count("tokens"))
    index["complete"] = True
    _write_index(folder, index)
    return count("texts")


def _open_index(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the index of an interrupted export, or a new one for an empty directory.

    Raises InvalidParameterError if the directory holds anything else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in folder.iterdir() if not path.name.endswith(TEMPORARY))
    if INDEX not in names:
        # An interrupted export may have left a shard without an index.
        other = [name for name in names if not name.startswith("shard-")]
        if other:
            raise InvalidParameterError("out_dir", str(folder), f"an empty directory (it holds {other[0]})")
        return {**wanted, "complete": False, "shards": []}
    try:
        index: object = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(
            "out_dir", str(folder), f"a directory whose {INDEX} is valid JSON ({error})"
        ) from None
    found = cast("dict[str, Any]", index) if isinstance(index, dict) else {}
    for field, value in wanted.items():
        if found.get(field) != value:
            requirement = f"another directory: {field} of its export is {shown(found.get(field))}, not {shown(value)}"
            raise InvalidParameterError("out_dir", str(folder), requirement)
    if found.get("complete") is not False:
        raise InvalidParameterError("out_dir", str(folder), "another directory: its export is complete")
    shards: object = found.get("shards")
    if not isinstance(shards, list) or not all(map(_is_shard, cast("list[object]", shards))):
        requirement = f"a directory whose {INDEX} lists shards with {', '.join(SHARD)}"
        raise InvalidParameterError("out_dir", str(folder), requirement)
    return found


def _is_shard(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    fields = cast("dict[str, object]", entry)
    return all(type(fields.get(name)) is kind for name, kind in SHARD.items())


def _skip(texts: Iterator[Text], shard: Mapping[str, Any], folder: Path) -> None:
    """Skips the texts of an existing shard.

    Raises InvalidParameterError if the texts differ from those of the shard.
    """
    skipped = [text.token_ids for text in itertools.islice(texts, shard["texts"])]
    if len(skipped) != shard["texts"] or _digest(skipped) != shard["sha256_of_token_ids"]:
        requirement = f"the texts of the interrupted export ({folder / shard['file']} has others)"
        raise InvalidParameterError("texts", "other texts", requirement)


def _digest(texts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(ids) for ids in texts]).encode()).hexdigest()


def _shards(texts: Iterable[TopLogprobs], size: int) -> Iterator[list[TopLogprobs]]:
    """Groups texts into shards of at least `size` tokens; the last one may have fewer."""
    shard: list[TopLogprobs] = []
    tokens = 0
    for text in texts:
        shard.append(text)
        tokens += len(text.token_ids)
        if tokens >= size:
            yield shard
            shard, tokens = [], 0
    if shard:
        yield shard


def _tensors(shard: Sequence[TopLogprobs]) -> dict[str, npt.NDArray[Any]]:
    import numpy as np

    lengths = [len(text.token_ids) for text in shard]
    return {
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "token_ids": np.concatenate([text.token_ids for text in shard]),
        "top_ids": np.concatenate([text.top_ids for text in shard]),
        "top_logprobs": np.concatenate([text.top_logprobs for text in shard]),
    }


def _safetensors(tensors: Mapping[str, npt.NDArray[Any]]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file (https://github.com/huggingface/safetensors#format)."""
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT}}
    offset = 0
    for name, tensor in tensors.items():
        span = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.astype(tensor.dtype.newbyteorder("<"), order="C", copy=False).data.cast("B")


def _write_index(folder: Path, index: Mapping[str, Any]) -> None:
    _write(folder / INDEX, [json.dumps(index, indent=1).encode() + b"\n"])


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes a file atomically, also if the process is killed."""
    partial = path.with_name(path.name + TEMPORARY)
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
