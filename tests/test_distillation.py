"""`top_logprobs`, compared with the logits, and its export: atomic files, and exports that are resumed."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ferrule import LLM, InvalidParameterError, PromptError, TopLogprobs, UnsupportedTaskError
from test_encoders import GOLDEN

pytestmark = pytest.mark.native

TEXTS = ["Once upon a time", "The capital of France is Paris.", "A", "Once upon a time, there was a cat.", "B c d"]


@pytest.fixture(scope="module")
def teacher() -> Iterator[LLM]:
    with LLM(max_num_batched_tokens=32, max_num_seqs=4) as llm:
        yield llm


def expected(llm: LLM, token_ids: list[int], k: int) -> tuple[Any, Any]:
    """Computes ids and log-probabilities from the logits in float64; the lower id first among equals."""
    rows = llm.logits(token_ids).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    ids = np.argsort(-llm.logits(token_ids), axis=1, kind="stable")[:, :k]
    return ids, np.take_along_axis(rows, ids, axis=1)


def check(llm: LLM, output: TopLogprobs, token_ids: list[int], k: int) -> None:
    ids, logprobs = expected(llm, token_ids, k)
    assert output.token_ids.tolist() == token_ids
    assert (output.token_ids.dtype, output.top_ids.dtype, output.top_logprobs.dtype) == (np.int32, np.int32, np.float32)
    assert (output.top_ids == ids).all()
    # They are equal in float64 except for the last bits of a logarithm, and are then rounded once.
    np.testing.assert_array_max_ulp(output.top_logprobs, logprobs.astype(np.float32), 1)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.lists(st.integers(7, 4095), min_size=1, max_size=70), max_size=6),
    k=st.sampled_from([1, 2, 20, 100, 4096]),
)
def test_top_logprobs_equal_sorted_logits(teacher: LLM, texts: list[list[int]], k: int) -> None:
    """Results do not depend on batching and chunking; a step computes 32 tokens."""
    outputs = list(teacher.top_logprobs([{"prompt_token_ids": ids} for ids in texts], k))
    assert len(outputs) == len(texts)
    for output, token_ids in zip(outputs, texts, strict=True):
        check(teacher, output, token_ids, k)


def test_texts_are_consumed_lazily(teacher: LLM) -> None:
    endless = itertools.cycle(TEXTS)
    for text, output in zip(TEXTS * 3, teacher.top_logprobs(endless, 5), strict=False):
        check(teacher, output, teacher.tokenize(text), 5)
    assert next(endless) in TEXTS


@pytest.mark.parametrize(
    ("texts", "k", "error", "message"),
    [
        (["a"], 0, InvalidParameterError, "k must be an integer from 1 to 4096"),
        (["a"], 4097, InvalidParameterError, "k must be an integer from 1 to 4096, got 4097"),
        ("abc", 1, PromptError, "texts must be a list or another iterable of texts, got 'abc'"),
        (5, 1, PromptError, "texts must be a list or another iterable of texts, got 5"),
        (["a", ""], 1, PromptError, r"texts\[1\]: the text has no tokens"),
        (
            ["a", 5],
            1,
            PromptError,
            r"texts\[1\]: a prompt must be a string or \{.prompt_token_ids.: \[\.\.\.\]\}, got 5",
        ),
        ([{"prompt_token_ids": [7] * 2049}], 1, PromptError, r"texts\[0\]: the text has 2049 tokens"),
    ],
)
def test_invalid_arguments(texts: Any, k: int, error: type[Exception], message: str, teacher: LLM) -> None:
    with pytest.raises(error, match=message):
        list(teacher.top_logprobs(texts, k))


def test_encoders_are_rejected(fake_engine: object) -> None:
    with (
        LLM(GOLDEN / "bert") as encoder,
        pytest.raises(UnsupportedTaskError, match="cannot produce log-probabilities; it embeds texts"),
    ):
        encoder.top_logprobs(["a"], 1)


def read_export(folder: Path) -> list[TopLogprobs]:
    index = json.loads((folder / "index.json").read_text())
    assert index["complete"]
    texts: list[TopLogprobs] = []
    for shard in index["shards"]:
        tensors = load_file(folder / shard["file"])
        offsets = tensors["offsets"].tolist()
        assert (len(offsets) - 1, offsets[-1]) == (shard["texts"], shard["tokens"])
        for first, end in itertools.pairwise(offsets):
            fields = (tensors[name][first:end] for name in ("token_ids", "top_ids", "top_logprobs"))
            texts.append(TopLogprobs(*fields))
    return texts


def same(found: list[TopLogprobs], wanted: list[TopLogprobs]) -> bool:
    return len(found) == len(wanted) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(found, wanted, strict=True)
        for name in ("token_ids", "top_ids", "top_logprobs")
    )


@pytest.mark.parametrize(("shard_size", "shards"), [(1, 5), (8, 3), (1 << 20, 1)])
def test_export_equals_stream(shard_size: int, shards: int, tmp_path: Path, teacher: LLM) -> None:
    folder = tmp_path / "new" / "folder"
    steps: list[tuple[int, int]] = []
    count = teacher.export_top_logprobs(
        TEXTS, 7, folder, shard_size=shard_size, progress=lambda *step: steps.append(step)
    )
    wanted = list(teacher.top_logprobs(TEXTS, 7))
    assert count == len(TEXTS)
    assert steps[-1] == (len(TEXTS), sum(len(output.token_ids) for output in wanted))
    assert same(read_export(folder), wanted)
    names = [f"shard-{number:05}.safetensors" for number in range(shards)]
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", *names]
    assert len(steps) == shards
    for name in names:
        header = int.from_bytes((folder / name).read_bytes()[:8], "little")
        assert (8 + header) % 64 == 0
    index = json.loads((folder / "index.json").read_text())
    assert (index["k"], index["model"], index["quantization"], index["vocab_size"]) == (7, "tiny", "int8", 4096)


def test_empty_export(tmp_path: Path, teacher: LLM) -> None:
    assert teacher.export_top_logprobs([], 3, tmp_path) == 0
    assert read_export(tmp_path) == []


class Interrupted(Exception):
    pass


def failing(texts: list[str]) -> Iterator[str]:
    yield from texts
    raise Interrupted


def test_interrupted_export_resumes(tmp_path: Path, teacher: LLM) -> None:
    with pytest.raises(Interrupted):
        teacher.export_top_logprobs(failing(TEXTS * 3), 3, tmp_path, shard_size=8)
    before = {path: path.read_bytes() for path in tmp_path.glob("shard-*")}
    assert before
    assert not json.loads((tmp_path / "index.json").read_text())["complete"]
    (tmp_path / "shard-00099.safetensors.partial").write_text("what a crash left")
    assert teacher.export_top_logprobs(TEXTS * 4, 3, tmp_path, shard_size=8) == 20
    assert {path: path.read_bytes() for path in before} == before
    assert same(read_export(tmp_path), list(teacher.top_logprobs(TEXTS * 4, 3)))


def test_resume_with_other_arguments_is_rejected(tmp_path: Path, teacher: LLM) -> None:
    with pytest.raises(Interrupted):
        teacher.export_top_logprobs(failing(TEXTS * 3), 3, tmp_path, shard_size=8)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidParameterError, match="texts must be the texts of the interrupted export"):
        teacher.export_top_logprobs(["another", *TEXTS], 3, tmp_path, shard_size=8)
    with pytest.raises(InvalidParameterError, match="texts must be the texts of the interrupted export"):
        teacher.export_top_logprobs(TEXTS[:1], 3, tmp_path, shard_size=8)
    with pytest.raises(InvalidParameterError, match=r"out_dir must be another directory: k of its export is 3, not 4"):
        teacher.export_top_logprobs(TEXTS, 4, tmp_path, shard_size=8)
    with pytest.raises(InvalidParameterError, match="shard_size of its export is 8, not 9"):
        teacher.export_top_logprobs(TEXTS, 3, tmp_path, shard_size=9)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept
    teacher.export_top_logprobs(TEXTS * 3, 3, tmp_path, shard_size=8)
    with pytest.raises(InvalidParameterError, match="out_dir must be another directory: its export is complete"):
        teacher.export_top_logprobs(TEXTS * 3, 3, tmp_path, shard_size=8)
    with pytest.raises(InvalidParameterError, match="shard_size must be an integer from 1 to 2147483647, got 0"):
        teacher.export_top_logprobs(TEXTS, 3, tmp_path / "other", shard_size=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("notes.txt", "mine", r"out_dir must be an empty directory \(it holds notes\.txt\)"),
        ("index.json", "{", r"out_dir must be a directory whose index\.json is valid JSON \("),
        ("index.json", "[" * 100_000, r"out_dir must be a directory whose index\.json is valid JSON \("),
        ("index.json", "[]", "out_dir must be another directory: format of its export is None, not"),
        (
            "index.json",
            '{"format": "other"}',
            "out_dir must be another directory: format of its export is 'other', not",
        ),
    ],
)
def test_unrelated_directory_is_rejected(name: str, content: str, message: str, tmp_path: Path, teacher: LLM) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidParameterError, match=message):
        teacher.export_top_logprobs(TEXTS, 3, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == content


@pytest.mark.parametrize("shards", [None, {}, [5], [{"file": "x", "texts": "1"}]])
def test_malformed_index_is_rejected(shards: object, tmp_path: Path, teacher: LLM) -> None:
    with pytest.raises(Interrupted):
        teacher.export_top_logprobs(failing(TEXTS * 3), 3, tmp_path, shard_size=8)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "shards": shards}))
    with pytest.raises(
        InvalidParameterError, match=r"out_dir must be a directory whose index\.json lists shards with file, texts,"
    ):
        teacher.export_top_logprobs(TEXTS, 3, tmp_path, shard_size=8)


def test_documentation_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "evaluate.md").read_text()
    *_, example = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/evaluate.md", "exec"), {})
    assert [output.top_ids.shape[1] for output in read_export(tmp_path / "teacher")] == [20, 20]
    for name, dtype in (
        ("offsets", "int64"),
        ("token_ids", "int32"),
        ("top_ids", "int32"),
        ("top_logprobs", "float32"),
    ):
        assert load_file(tmp_path / "teacher" / "shard-00000.safetensors")[name].dtype == dtype
        assert re.search(rf"^\| `{name}` \| {dtype} ", page, re.MULTILINE)


PROGRAM = """
import itertools, sys
from ferrule import LLM
llm = LLM()
print("ready", flush=True)
llm.export_top_logprobs(itertools.cycle(["Once upon a time", "The capital"]), 5, sys.argv[1], shard_size=16)
"""


def test_killed_export_leaves_complete_shards(tmp_path: Path, teacher: LLM) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    while not (tmp_path / "shard-00003.safetensors").exists():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    index = json.loads((tmp_path / "index.json").read_text())
    assert len(index["shards"]) >= 3
    for shard in index["shards"]:
        assert load_file(tmp_path / shard["file"])["offsets"][-1] == shard["tokens"]


def test_full_disk_keeps_previous_shards(tmp_path: Path, teacher: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, calls = os.fsync, itertools.count()

    def full(file: int) -> None:
        if next(calls) == 6:
            raise OSError(28, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        teacher.export_top_logprobs(TEXTS * 3, 3, tmp_path, shard_size=8)
    assert not list(tmp_path.glob("*.partial"))
    monkeypatch.undo()
    teacher.export_top_logprobs(TEXTS * 3, 3, tmp_path, shard_size=8)
    assert same(read_export(tmp_path), list(teacher.top_logprobs(TEXTS * 3, 3)))
