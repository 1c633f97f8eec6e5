"""Writes the case bailing_moe_v2: glm4_moe's weights and results under the names of Ling 2.0.

transformers has no Ling 2.0, whose own code computes what GLM-4.5 of transformers computes. Needs numpy only:
python bailing.py ../../tests/golden/variants
"""

import json
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MODULES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "self_attn.o_proj": "attention.dense",
    "gate.e_score_correction_bias": "gate.expert_bias",
}
"""Module names in GLM-4.5 and Ling 2.0."""
FIELDS = {
    "attention_bias": "use_qkv_bias",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
}
"""Fields of config.json in GLM-4.5 and Ling 2.0."""


def main() -> None:
    """Writes the case beside glm4_moe."""
    variants = Path(sys.argv[1])
    source, out = variants / "glm4_moe", variants / "bailing_moe_v2"
    out.mkdir(exist_ok=True)
    shutil.copy(source / "golden.npz", out)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config = {FIELDS.get(name, name): value for name, value in config.items()}
    config |= {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2"}
    config |= {"score_function": "sigmoid", "use_bias": False, "norm_head": False, "num_nextn_predict_layers": 0}
    (out / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    write(out / "model.safetensors", renamed(read(source / "model.safetensors")))


def read(file: Path) -> dict[str, npt.NDArray[np.uint16]]:
    """Returns tensors in bf16 as their bits."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[8 + length :][slice(*entry["data_offsets"])], np.uint16).reshape(entry["shape"])
        for name, entry in header.items()
    }


def renamed(tensors: dict[str, npt.NDArray[np.uint16]]) -> dict[str, npt.NDArray[np.uint16]]:
    """Returns the tensors under Ling's names, with queries, keys and values in one."""
    found: dict[str, npt.NDArray[np.uint16]] = {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"(.*)\.self_attn\.q_proj\.(weight|bias)", name):
            parts = [tensors[f"{match[1]}.self_attn.{role}_proj.{match[2]}"] for role in "qkv"]
            found[f"{match[1]}.attention.query_key_value.{match[2]}"] = np.concatenate(parts)
        elif not re.search(r"self_attn\.[kv]_proj\.", name):
            module = next((module for module in MODULES if module in name), "")
            found[name.replace(module, MODULES[module]) if module else name] = values
    return found


def write(file: Path, tensors: dict[str, npt.NDArray[np.uint16]]) -> None:
    """Writes tensors in bf16 from their bits."""
    header: dict[str, Any] = {}
    end = 0
    for name, values in sorted(tensors.items()):
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": [end, end := end + values.nbytes]}
    encoded = json.dumps(header).encode()
    content = b"".join(values.tobytes() for _, values in sorted(tensors.items()))
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content)


if __name__ == "__main__":
    main()
