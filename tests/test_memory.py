"""What loading costs: weights are packed tensor by tensor, and the source's pages are given back."""

import json
import subprocess
import sys
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
"""Of the matrices of llama-160m."""
CHILD = """
import json, pathlib, sys
from ferrule import LLM

def memory(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

import ferrule._native, numpy, tokenizers
before = memory("VmRSS")
llm = LLM(sys.argv[1], quantization=sys.argv[2], max_model_len=256)
print(json.dumps([memory("VmHWM") - before, llm.info()["weight_bytes"]]))
"""


@pytest.mark.parametrize(("quantization", "bits"), [("bf16", 16), ("int8", 8), ("int4", 4)])
def test_a_load_takes_the_packed_weights_and_little_more(quantization: str, bits: int, tmp_path: Path) -> None:
    """The promise is packed weights, one tensor and 300 MB. Both copies of this model at once would be 270 MB more."""
    shape = tmp_path / "llama-160m.json"
    shape.write_text(json.dumps(LLAMA_160M))
    generator = ROOT / "benches" / "random_checkpoint.py"
    subprocess.run([sys.executable, str(generator), str(shape), str(tmp_path / "model")], check=True)
    child = [sys.executable, "-c", CHILD, str(tmp_path / "model"), quantization]
    done = subprocess.run(child, capture_output=True, text=True, check=True)
    peak, packed = json.loads(done.stdout)
    largest_tensor = 32_000 * 768 * 2
    assert bits <= 8 * packed / PARAMETERS < 1.25 * bits
    assert peak < packed + largest_tensor + (64 << 20)
