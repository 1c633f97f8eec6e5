"""Programs written for vLLM run with only the import and the model changed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from word_tokenizer import write_word_tokenizer

PROGRAMS = Path(__file__).parent / "vllm_programs"
GOLDEN = Path(__file__).parent / "golden"
ENCODERS = {
    "org/embedding-model": "bert",
    "org/classifier": "bert_classifier",
    "org/reranker": "xlm_roberta_classifier",
}
"""Golden checkpoints in the place of the models that the programs name."""
PRINTED = {
    "chat": ["The capital of Japan is Tokyo.", "A KV cache keeps the keys and values of past tokens."],
    "logprobs": ["' Par' 1 True True", "None True"],
    "lora": ["None sql 4"],
    "prefix_caching": ["True True"],
    "structured_output": ["True\nbool\nTrue"],
    "beam_search": ["3 True True True"],
    "embeddings": ["64 1.0 True\n64 1.0 True"],
    "classification": ["True"],
    "scoring": ["True\nTrue"],
    "streaming": [" Paris.\n", " Rome.\n"],
}
"""Fragments of what each program prints."""


def for_ferrule(source: str, folder: Path) -> str:
    """Changes imports of vLLM and the names of models, which are copied to `folder`."""
    source = re.sub(r"^from vllm[\w.]* import", "from ferrule import", source, flags=re.MULTILINE)
    for name, case in ENCODERS.items():
        if name in source:
            shutil.copytree(GOLDEN / "encoders" / case, folder / case, copy_function=shutil.copyfile)
            write_word_tokenizer(folder / case)
            source = source.replace(f'"{name}"', repr(str(folder / case)))
    if "org/adapter" in source:
        source = source.replace('"org/adapter"', repr(str(GOLDEN / "adapters" / "llama_all")))
        source = source.replace('"org/model"', repr(str(GOLDEN / "logits" / "llama")))
    return re.sub(r'"org/(?:chat-)?model"', "None", source)


@pytest.mark.native
@pytest.mark.parametrize("name", PRINTED)
def test_vllm_program_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", for_ferrule((PROGRAMS / f"{name}.py").read_text(), tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for fragment in PRINTED[name]:
        assert fragment in done.stdout
