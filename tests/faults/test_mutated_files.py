"""Files with random damage raise a typed error or load, within 4 GiB of address space and 60 s of processor time.

`FERRULE_MUTATIONS=2500 pytest -s tests/faults/test_mutated_files.py` damages 2,500 files of each kind, and prints how
often each error was raised. `FERRULE_FUZZ_SEED` is the seed of the first damage, by default 0. A failure names the seed
of its damage, and keeps the file.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conftest import TINY
from faults.mutations import damaged_bytes, damaged_json
from ferrule import quantize
from ferrule._loading.cache_home import DIRECTORY
from gguf_convert import convert
from word_tokenizer import write_word_tokenizer

pytestmark = pytest.mark.native

LLAMA = Path(__file__).parents[1] / "golden" / "logits" / "llama"
COUNT = int(os.environ.get("FERRULE_MUTATIONS", "100"))
FIRST_SEED = int(os.environ.get("FERRULE_FUZZ_SEED", "0"))
ADDRESS_SPACE = 4 << 30
PROCESSOR_SECONDS = 60
BLOCKED_SECONDS = 900
"""Seconds after which a process hangs that needs no processor time, also on a busy machine."""
FILES_PER_PROCESS = 250

# Reads paths of models from stdin and answers each with a line: the class of an error, or the tokens. Beyond the limits
# of memory and processor time the system refuses memory, or kills the process.
_CHILD = """
import json, resource, sys, time
from pathlib import Path
import ferrule
from ferrule._text.tokenizer import Tokenizer

resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
params = ferrule.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

def answer(path):
    if path.is_dir() and not (path / "config.json").exists():
        tokenizer = Tokenizer(path)
        ids = [id for text in ("Hello  wörld w7", "\\u2581 a\\n", "x" * 300) for id in tokenizer.encode(text)]
        tokenizer.decode(ids)
        return ids
    options = {"threads": 1, "kv_cache_memory": 1 << 20, "verify_weights": True, "max_model_len": 32}
    with ferrule.LLM(path, **options) as llm:
        return llm.generate({"prompt_token_ids": [7, 8, 9]}, params)[0].outputs[0].token_ids

for line in sys.stdin:
    limit, inherited = int(time.process_time()) + 1 + int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = limit if inherited == resource.RLIM_INFINITY else min(limit, inherited)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, inherited))
    try:
        result = {"tokens": list(answer(Path(line.rstrip("\\n"))))}
    except Exception as error:
        result = {"error": type(error).__name__, "message": str(error)[:500]}
        result["typed"] = isinstance(error, ferrule.FerruleError)
    print("answer", json.dumps(result), flush=True)
"""


@dataclass(frozen=True)
class Kind:
    """A kind of file that is damaged."""

    make: Callable[[Path], tuple[Path, Path]]
    """Makes a valid model in a directory; returns what is loaded, and the file to damage."""
    damage: Callable[[bytes, Random], bytes]
    is_checked: bool = False
    """Whether checksums protect the whole file, so that a model that loads must generate the same tokens."""


def _copied(folder: Path) -> tuple[Path, Path]:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(LLAMA / name, folder)
    return folder, folder / "model.safetensors"


def _config(folder: Path) -> tuple[Path, Path]:
    return folder, _copied(folder)[1].with_name("config.json")


def _packed(folder: Path) -> tuple[Path, Path]:
    weights = quantize(LLAMA, folder / "packed", format="int4", threads=1) / "model.safetensors"
    return weights.parent, weights


def _gguf(folder: Path) -> tuple[Path, Path]:
    file = convert(LLAMA, folder / "model.gguf", "Q8_0")
    return file, file


def _gguf_with_tokenizer(folder: Path) -> tuple[Path, Path]:
    file = convert(TINY, folder / "model.gguf", "Q8_0")
    return file, file


def _byte_level(folder: Path) -> tuple[Path, Path]:
    shutil.copy(TINY / "tokenizer.json", folder)
    return folder, folder / "tokenizer.json"


def _words(folder: Path) -> tuple[Path, Path]:
    write_word_tokenizer(folder)
    return folder, folder / "tokenizer.json"


def _unigram(folder: Path) -> tuple[Path, Path]:
    """Writes a Unigram tokenizer as in T5 and Gemma: normalizers, scored pieces, byte fallback, a chain of decoders."""
    pieces = [["<unk>", 0.0], ["▁", -2.0], *([chr(97 + index), -3.0 - index] for index in range(26))]
    pieces += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    described: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "NFKC"},
                {"type": "Strip", "strip_left": True, "strip_right": False},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": True},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder, folder / "tokenizer.json"


def _json(data: bytes, random: Random) -> bytes:
    return damaged_json(json.loads(data), random)


def _first(header: int) -> Callable[[bytes, Random], bytes]:
    return lambda data, random: damaged_bytes(data, random, header)


KINDS = {
    "config.json": Kind(_config, _json),
    "safetensors": Kind(_copied, _first(3000)),
    "packed": Kind(_packed, _first(4000), is_checked=True),
    "gguf": Kind(_gguf, _first(3000)),
    "gguf-tokenizer": Kind(_gguf_with_tokenizer, _first(150_000)),
    "tokenizer-bpe": Kind(_byte_level, _json),
    "tokenizer-words": Kind(_words, _json),
    "tokenizer-unigram": Kind(_unigram, _json),
}


class Loader:
    """A process that loads models in turn; it is replaced after several models, or when it dies or hangs."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._start()

    def load(self, path: Path) -> dict[str, Any]:
        """Returns the result of loading a model; `died` or `hangs` if the process does not reply."""
        if self._count == FILES_PER_PROCESS:
            self.close()
            self._start()
        self._count += 1
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=BLOCKED_SECONDS)
        except queue.Empty:
            result: dict[str, Any] = {"hangs": BLOCKED_SECONDS}
        else:
            if line is not None:
                return json.loads(line.removeprefix("answer "))
            result = {"died": self._process.wait(BLOCKED_SECONDS)}
        self.close()
        self._start()
        return result

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def _start(self) -> None:
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-O", "-c", _CHILD, str(ADDRESS_SPACE), str(PROCESSOR_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("answer "):
                lines.put(line)
        lines.put(None)


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    loader = Loader(os.environ | {DIRECTORY: str(tmp_path_factory.mktemp("cache"))})
    yield loader
    loader.close()


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_end_in_typed_errors_or_work(name: str, loader: Loader, tmp_path: Path) -> None:
    kind = KINDS[name]
    model, file = kind.make(tmp_path)
    valid = file.read_bytes()
    expected = loader.load(model)
    assert "tokens" in expected, expected
    outcomes: Counter[str] = Counter()
    start = time.monotonic()
    for seed in range(FIRST_SEED, FIRST_SEED + COUNT):
        damaged = kind.damage(valid, Random(f"{name} {seed}"))
        file.unlink()
        file.write_bytes(damaged)
        result = loader.load(model)
        outcomes[result.get("error", "loaded")] += 1
        where = f"seed {seed}, {file}: {result}"
        assert "tokens" in result or result.get("typed"), where
        assert not kind.is_checked or result.get("tokens") in (None, expected["tokens"]), where
    print(f"{name}: {COUNT} damaged files in {time.monotonic() - start:.0f} s: {dict(outcomes)}")
    assert outcomes["loaded"] < COUNT * 9 / 10, "hardly any damage had an effect"
