"""Models for llama.cpp's server tests, whose own models are only on the hub: one that writes text, and two encoders.

The encoders have random weights and the vocabulary of bge-small, which llama.cpp's sources contain.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from conftest import TINY
from ferrule._loading.gguf.tokenizer import read_gguf_tokenizer
from gguf_convert import convert, stored_tensors

CONTEXT = 8192
"""Positions of the model that writes text."""
ENCODERS = Path(__file__).parents[1] / "golden" / "encoders"
SIZES = {"vocab_size": 30522, "max_position_embeddings": 512}
ENLARGED = {"word_embeddings": "vocab_size", "position_embeddings": "max_position_embeddings"}
"""Tensors whose rows are the vocabulary and the positions."""


def write_models(folder: Path, vocabulary: Path) -> dict[str, str]:
    """Writes the models below a directory and returns their paths by purpose.

    `vocabulary` is llama.cpp's `ggml-vocab-bert-bge.gguf`.
    """
    text = convert(_longer(folder / "tiny"), folder / "tiny.gguf", "Q8_0")
    return {
        "text": str(text),
        "embedding": str(_encoder(folder / "embedding", "bert", vocabulary)),
        "reranking": str(_encoder(folder / "reranking", "bert_classifier", vocabulary)),
    }


def _longer(folder: Path) -> Path:
    """Writes the embedded model for contexts as long as the tests ask for; rotary embeddings have no largest position.

    Returns the directory.
    """
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _encoder(folder: Path, golden: str, vocabulary: Path) -> Path:
    """Writes a golden encoder with a larger vocabulary and more positions, whose new rows are random."""
    folder.mkdir()
    config = json.loads((ENCODERS / golden / "config.json").read_text()) | SIZES
    (folder / "config.json").write_text(json.dumps(config))
    tensors = dict(stored_tensors(ENCODERS / golden / "model.safetensors"))
    random = np.random.default_rng(0)
    for name, values in tensors.items():
        for part, size in ENLARGED.items():
            if f".{part}." in name or name.startswith(f"{part}."):
                rows = (SIZES[size], values.shape[1])
                tensors[name] = random.normal(0, values.std(), rows).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    backend = read_gguf_tokenizer(vocabulary).backend
    assert backend is not None
    backend.save(str(folder / "tokenizer.json"))
    return folder
