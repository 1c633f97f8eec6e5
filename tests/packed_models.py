"""Models to pack, and what a packed one computes."""

from __future__ import annotations

import json
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

from ferrule import (
    LLM,
)
from ferrule._loading import read_model_files

GOLDEN = Path(__file__).parent / "golden"
PROMPT = list(range(7, 40))


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


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    [length] = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
