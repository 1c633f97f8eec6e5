"""Layouts of tensors that stack all experts: how config.json is read, and what is refused."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from archs.specs import folder_of
from ferrule import LLM
from ferrule._loading import read_model_files
from lora_files import read_header


@pytest.mark.native
@pytest.mark.parametrize("folder", [folder_of("gpt_oss"), folder_of("granitemoe")])
def test_stacked_experts_may_be_two_dimensional(folder: Path, tmp_path: Path) -> None:
    """Stacked experts may be `[experts * rows, columns]`, transposed or not, as in DBRX."""
    joined = tmp_path / "joined"
    shutil.copytree(folder, joined)
    file = joined / "model.safetensors"
    file.chmod(0o644)
    header, raw = read_header(file), file.read_bytes()
    spec = read_model_files(folder).spec
    stacked = {name for tensor in spec.tensors.values() if tensor.stack is not None for name in tensor.names}
    for name in stacked:
        experts, rows, *columns = header[name]["shape"]
        header[name]["shape"] = [experts * rows, *columns]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + int.from_bytes(raw[:8], "little") :])
    with LLM(folder, quantization="f32") as apart, LLM(joined, quantization="f32") as together:
        ids = list(range(7, 40))
        assert (apart.logits(ids) == together.logits(ids)).all()
