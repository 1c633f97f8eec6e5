"""Per-layer embeddings stay in their file: memory holds only the rows that a step reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ferrule import LLM, quantize
from lora_files import base_tensors

pytestmark = pytest.mark.native

CASE = Path(__file__).parent / "golden" / "variants" / "gemma4_ple"
ROWS, WIDTH, LAYERS = 4096, 2048, 4
TABLE_BYTES = ROWS * WIDTH * LAYERS * 2
"""64 MiB of bf16; a token's row has 16 KiB."""
CHILD = """
import random, re, sys
from pathlib import Path

from ferrule import LLM

def resident():
    kilobytes = re.findall(r"(?:RssAnon|RssFile):\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    return sum(map(int, kilobytes)) * 1024

def resident_of_files():
    text = Path("/proc/self/smaps").read_text()
    return 1024 * sum(map(int, re.findall(r"model\\.safetensors\\n(?:.*\\n)*?Rss:\\s+(\\d+) kB", text)))

LLM(sys.argv[2]).close()  # the code of the native module is resident
empty = resident()
quantization = None if sys.argv[3] == "packed" else sys.argv[3]
# Otherwise a thread reads packed weights meanwhile, to verify their checksums.
with LLM(sys.argv[1], quantization=quantization, verify_weights=True) as llm:
    loaded = resident()
    llm.logits(list(range(125)))  # reads all other weights
    before = resident_of_files()
    tokens = random.Random(1).sample(range(4096), 1000)
    for first in range(0, 1000, 25):
        llm.logits(tokens[first : first + 25])
    print(loaded - empty, resident_of_files() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose table is far larger than all of its other weights."""
    directory = tmp_path_factory.mktemp("large")
    numbers = np.random.default_rng(1)
    tensors = {}
    for name, tensor in base_tensors(CASE).items():
        shape = list(tensor.shape)
        if name.endswith("embed_tokens_per_layer.weight"):
            shape = [ROWS, WIDTH * LAYERS]
        elif name.endswith("embed_tokens.weight"):
            shape[0] = ROWS
        elif "per_layer" in name:
            shape = [WIDTH * LAYERS if size == 48 else WIDTH if size == 12 else size for size in shape]
        tensors[name] = numbers.standard_normal(shape, np.float32).astype(np.float16)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((CASE / "config.json").read_text())
    config |= {
        "vocab_size": ROWS,
        "vocab_size_per_layer_input": ROWS,
        "hidden_size_per_layer_input": WIDTH,
        "dtype": "float16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("quantization", ["f32", "int8", "packed"])
def test_table_is_not_resident(quantization: str, large: Path, tmp_path: Path) -> None:
    model = large
    if quantization == "packed":
        model = tmp_path / "packed"
        quantize(large, model, format="int8")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(model), str(CASE), quantization], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded, grown = map(int, done.stdout.split())
    assert loaded < TABLE_BYTES / 2
    assert grown < TABLE_BYTES / 20


def test_packed_table_gives_the_same_logits(tmp_path: Path) -> None:
    quantize(CASE, tmp_path / "packed", format="int8")
    with LLM(CASE, quantization="int8") as llm, LLM(tmp_path / "packed") as packed:
        ids = list(range(7, 100))
        assert (llm.logits(ids) == packed.logits(ids)).all()


def test_ids_beyond_the_table_have_the_first_row(tmp_path: Path) -> None:
    """Ids of pictures and sounds are beyond it."""
    tensors = base_tensors(CASE)
    [name] = [name for name in tensors if name.endswith("embed_tokens_per_layer.weight")]
    for rows, table in (
        (200, tensors[name][:200]),
        (320, np.vstack([tensors[name][:200], tensors[name][:1].repeat(120, 0)])),
    ):
        directory = tmp_path / str(rows)
        directory.mkdir()
        config = json.loads((CASE / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"vocab_size_per_layer_input": rows}))
        save_file(tensors | {name: np.ascontiguousarray(table)}, directory / "model.safetensors")
    ids = [5, 199, 200, 7, 319]
    with LLM(tmp_path / "200", quantization="f32") as short, LLM(tmp_path / "320", quantization="f32") as full:
        assert (short.logits(ids) == full.logits(ids)).all()
