"""Writes the small files of a model directory from the metadata of a GGUF file: everything except the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferrule._loading.gguf import GgufFile, GgufForm, gguf_config, read_gguf_tokenizer
from ferrule._loading.model_files import GENERATION_NAMES, ModelFiles
from ferrule.errors import ModelFileError

POOLING = "1_Pooling"
"""Folder of the pooling in directories of sentence-transformers."""
_POOLING_MODES = {"cls": "cls", "mean": "mean", "last": "lasttoken"}


def write_small_files(files: ModelFiles, folder: Path) -> tuple[Mapping[str, Any], GgufForm]:
    """Writes the tokenizer, chat templates and defaults of a GGUF file into `folder`.

    Returns the fields of config.json, which is not written, and the form of the file's weights.

    Raises the errors of reading the file, ModelFileError for the name of a chat template that is not a file name, and
    OSError.
    """
    config, form = gguf_config(GgufFile(files.path))
    _write_tokenizer(files.path, folder)
    given = {theirs: getattr(files.defaults, name) for name, theirs in GENERATION_NAMES.items()}
    sampling = {name: value for name, value in given.items() if value is not None}
    _write_json(folder / "generation_config.json", {"eos_token_id": list(files.eos_token_ids), **sampling})
    if files.sentence.embeds:
        _write_sentence_files(files, folder)
    return config.values, form


def _write_tokenizer(file: Path, folder: Path) -> None:
    tokenizer = read_gguf_tokenizer(file)
    if tokenizer.backend is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer.backend.to_str().encode())
    _write_json(folder / "tokenizer_config.json", tokenizer.special_tokens)
    for name, template in tokenizer.chat_templates.items():
        path = folder / "chat_template.jinja"
        if name != "default":
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            if Path(name).name != name or "\0" in name:
                raise ModelFileError(f"{file}: name of a chat template must be a file name, got {name!r}")
            path.parent.mkdir(exist_ok=True)
        path.write_bytes(template.encode())


def _write_sentence_files(files: ModelFiles, folder: Path) -> None:
    """Writes the pooling of an embedding model, whose embeddings are normalized."""
    kinds = {"Transformer": "", "Pooling": POOLING, "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    _write_json(folder / "modules.json", modules)
    (folder / POOLING).mkdir()
    _write_json(folder / POOLING / "config.json", {"pooling_mode": _POOLING_MODES[files.sentence.pooling]})


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
