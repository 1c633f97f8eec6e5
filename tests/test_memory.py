"""Memory of loading: weights are packed tensor by tensor, and pages of the source are released."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LLAMA_160M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "intermediate_size": 3072,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": True,
}
PARAMETERS = 137_822_208
"""Bytes of the matrices of llama-160m."""
CHILD = """
import json, pathlib, sys
from ferrule import LLM

def memory(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

import ferrule._native, numpy, tokenizers
before = memory("VmRSS")
llm = LLM(sys.argv[1], quantization=sys.argv[2], max_model_len=256, packed_cache_limit=0)
print(json.dumps([memory("VmHWM") - before, llm.info()["weight_bytes"]]))
"""

LARGEST_TENSOR = 32_000 * 768 * 2
QUANTIZING = """
import json, pathlib, sys, threading, time
import ferrule, ferrule._native, numpy, tokenizers

def anonymous():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

before = peak = anonymous()

def quantize():
    global written
    written = ferrule.quantize(sys.argv[1], sys.argv[1] + "-packed", format=sys.argv[2])

thread = threading.Thread(target=quantize)
thread.start()
while thread.is_alive():
    peak = max(peak, anonymous())
    time.sleep(0.002)
print(json.dumps([peak - before, (written / "model.safetensors").stat().st_size]))
"""

SMALL = LLAMA_160M | {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 4096,
}
CALIBRATING = """
import json, pathlib, re, resource, sys, threading, time
import ferrule, ferrule._native, numpy, tokenizers

def memory(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def quantize():
    sequences = [[3 + (i * i + j) % 4000 for i in range(256)] for j in range(4)]
    output = sys.argv[1] + "-packed"
    ferrule.quantize(sys.argv[1], output, format=sys.argv[2], calibrate=sequences, threads=1)

# With little memory beside the mapped checkpoint it says how much it needs.
mapped = pathlib.Path(sys.argv[1], "model.safetensors").stat().st_size
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + mapped + (24 << 20), limits[1]))
try:
    quantize()
except ferrule.InsufficientMemoryError as error:
    needs = int(re.search(r"needs (\\d+) bytes", str(error))[1])
resource.setrlimit(resource.RLIMIT_AS, limits)

before = peak = memory("RssAnon")
thread = threading.Thread(target=quantize)
thread.start()
while thread.is_alive():
    peak = max(peak, memory("RssAnon"))
    time.sleep(0.002)
print(json.dumps([peak - before, needs]))
"""
WORKERS = """
import pathlib, re, resource, sys
import ferrule, ferrule._native

size = int(re.search("VmSize:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
# There is room for more than one half of the weights, and not for both.
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    ferrule.LLM(sys.argv[1], quantization="f32", pipeline_parallel_size=2, threads=1, load_format="dummy")
except ferrule.InsufficientMemoryError as error:
    print(error)
"""
OTHER_HESSIANS = 3 * (512 + 256) * 512 * 4
"""Bytes of the Hessians of a layer's other linear maps, which are recorded together where memory has room."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of llama-160m with random weights."""
    return model_in(tmp_path_factory.mktemp("llama"), LLAMA_160M)


@pytest.mark.parametrize(("quantization", "bits"), [("bf16", 16), ("int8", 8), ("int4", 4)])
def test_peak_memory_of_loading(quantization: str, bits: int, llama: Path) -> None:
    """The promise is packed weights, one tensor and 300 MB. Both copies of this model at once would be 270 MB more."""
    peak, packed = figures_of(CHILD, llama, quantization)
    assert bits <= 8 * packed / PARAMETERS < 1.25 * bits
    assert peak < packed + LARGEST_TENSOR + (64 << 20)


def test_workers_of_one_machine_must_fit_its_memory_together(llama: Path) -> None:
    command = [sys.executable, "-c", WORKERS, str(llama), str(3 * PARAMETERS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(
        r"the model needs \d+ bytes for its packed weights, but only \d+ bytes are available.*\n", done.stdout
    ), done.stdout


def test_peak_memory_of_quantizing(llama: Path) -> None:
    """Limit of anonymous memory: mapped files can be evicted. All weights together are 280 MB."""
    peak, packed = figures_of(QUANTIZING, llama, "bf16")
    assert packed >= 2 * PARAMETERS
    assert peak < LARGEST_TENSOR + (64 << 20)


def test_peak_memory_of_calibrating(tmp_path: Path) -> None:
    """All layers at once would be 67 MB in bf16, and the Hessians of their inputs 190 MB."""
    peak, needs = figures_of(CALIBRATING, model_in(tmp_path, SMALL), "int4")
    assert needs / 2 < peak < needs + OTHER_HESSIANS + (16 << 20)


def model_in(folder: Path, config: Mapping[str, object]) -> Path:
    shape = folder / "shape.json"
    shape.write_text(json.dumps(config))
    generator = ROOT / "benches" / "random_checkpoint.py"
    subprocess.run([sys.executable, str(generator), str(shape), str(folder / "model")], check=True)
    return folder / "model"


def figures_of(program: str, model: Path, quantization: str) -> tuple[int, int]:
    """Returns the output of a program: peak memory and bytes of packed weights."""
    child = [sys.executable, "-c", program, str(model), quantization]
    done = subprocess.run(child, capture_output=True, text=True, check=True)
    peak, packed = json.loads(done.stdout)
    return peak, packed
