"""Malformed tokenizers, and texts that are expensive to match, each in a separate process."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from faults.isolated import PROMISED_SECONDS, SLACK, Outcome, assert_refused, run

WARM_UP = f"""
    from pathlib import Path
    from ferrule._text.tokenizer import Tokenizer
    Tokenizer(Path({str(TINY)!r})).encode("warm")
"""
READ = """
    directory, piece, count = arguments
    Tokenizer(Path(directory)).encode(piece * count)
"""

Json = dict[str, Any]


def read(
    directory: Path, change: Callable[[Json], None], piece: str = "Hello there, world. ", count: int = 1
) -> Outcome:
    """Encodes a text with a modified copy of the embedded tokenizer."""
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    change(tokenizer)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return run(READ, str(directory), piece, count, warm_up=WARM_UP)


def model(**changes: object) -> Callable[[Json], None]:
    return lambda tokenizer: tokenizer["model"].update(changes)


def more_merges(*merges: object) -> Callable[[Json], None]:
    return lambda tokenizer: tokenizer["model"]["merges"].extend(merges)


def more_tokens(tokens: Json) -> Callable[[Json], None]:
    return lambda tokenizer: tokenizer["model"]["vocab"].update(tokens)


MALFORMED = {
    "vocab-list": model(vocab=["a", "b"]),
    "vocab-number": model(vocab=3),
    "vocab-empty": model(vocab={}),
    "id-negative": more_tokens({"never": -1}),
    "id-large": more_tokens({"never": 1 << 32}),
    "id-text": more_tokens({"never": "7"}),
    "id-fraction": more_tokens({"never": 1.5}),
    "merges-number": model(merges=7),
    "merge-of-one": more_merges(["a"]),
    "merge-of-three": more_merges(["a", "b", "c"]),
    "merge-unknown": more_merges(["never", "seen"]),
    "merge-to-unknown": more_merges(["the", "zzzzzz"]),
    "merge-text": more_merges("a"),
    "kind-unknown": model(type="Magic"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_vocabulary(name: str, tmp_path: Path) -> None:
    outcome = read(tmp_path, MALFORMED[name])
    assert_refused(outcome, "TokenizerError", [str(tmp_path / "tokenizer.json")])


def pattern(regex: str) -> Callable[[Json], None]:
    def change(tokenizer: Json) -> None:
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}

    return change


@pytest.mark.parametrize("regex", ["(a+)+$", "(a|a)+$", "(a*)*$b", "^(?:a?){40}a{40}$"])
@pytest.mark.parametrize("count", [28, 3000])
def test_catastrophic_backtracking_is_bounded(regex: str, count: int, tmp_path: Path) -> None:
    """Expensive patterns are refused or tokenized, both within the time limit."""
    outcome = read(tmp_path, pattern(regex), "a" * count + "!")
    assert outcome.error in (None, "TokenizerError"), outcome.message
    assert outcome.seconds < PROMISED_SECONDS * SLACK


def test_invalid_pattern(tmp_path: Path) -> None:
    outcome = read(tmp_path, pattern("((("))
    assert_refused(outcome, "TokenizerError", [str(tmp_path / "tokenizer.json"), "parenthesis"])


@pytest.mark.parametrize("piece", ["^", "a", " ", "\n", "0", "\u00e9", "<", "|"])
def test_million_repeated_characters_encode_in_time(piece: str, tmp_path: Path) -> None:
    outcome = read(tmp_path, lambda _: None, piece, 1_000_000)
    assert outcome.error is None, outcome.message
    assert outcome.seconds < PROMISED_SECONDS * SLACK


def steps(component: str, key: str, *steps: Json) -> Callable[[Json], None]:
    return lambda tokenizer: tokenizer.update({component: {"type": "Sequence", key: list(steps)}})


DOUBLE: Json = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
INSERT: Json = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "x"}
CHARSMAP = base64.b64encode(struct.pack("<I", 2**32 - 4)).decode()
BOMBS = {
    "doubling-normalizers": (steps("normalizer", "normalizers", *[DOUBLE] * 40), "at most 64 times as long"),
    "inserting-normalizers": (steps("normalizer", "normalizers", *[INSERT] * 40), "at most 64 times as long"),
    "doubling-decoders": (steps("decoder", "decoders", *[DOUBLE] * 40), "at most 64 times as long"),
    "many-steps": (steps("normalizer", "normalizers", *[{"type": "NFC"}] * 65), "must have at most 64 steps"),
    "long-prefix": (
        steps("normalizer", "normalizers", {"type": "Prepend", "prepend": "x" * (7 << 20)}),
        "strings of normalizer must have at most 16384 bytes",
    ),
    "long-token": (more_tokens({"x" * (2 << 20): 100_000}), "a string must have at most 16384 bytes"),
    "trie-of-gigabytes": (
        steps("normalizer", "normalizers", {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}),
        "precompiled_charsmap must begin with the bytes of its trie",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_tokenizer_bombs_are_refused(name: str, tmp_path: Path) -> None:
    change, message = BOMBS[name]
    outcome = read(tmp_path, change)
    file = tmp_path / "tokenizer.json"
    assert_refused(outcome, "TokenizerError", [str(file), message], file_bytes=file.stat().st_size)
