"""Low-rank adapters (Hu et al. 2021) as PEFT saves them, over the cases in `logits`, which lies beside `adapters`."""

import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint import JsonObject, edit_json, fill
from peft import LoraConfig, PeftModel, get_peft_model
from reference import check_matters, golden, load
from transformers import AutoModelForCausalLM

LLAMA_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Adapter:
    """A case: the name of the base model, and the options for PEFT."""

    base: str
    config: LoraConfig
    dtype: torch.dtype = torch.float32
    """Dtype of the stored tensors; their values are exact in bf16."""


def lora(rank: int, alpha: int, targets: list[str], **changes: Any) -> LoraConfig:
    """Configuration of an adapter for inference."""
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", **changes)


CASES: dict[str, Adapter] = {
    "llama_qv": Adapter("llama", lora(4, 8, ["q_proj", "v_proj"])),
    "llama_all": Adapter(
        "llama",
        lora(
            8,
            16,
            LLAMA_LINEAR,
            use_rslora=True,
            # The first names every down projection; the second, one module of one layer.
            rank_pattern={"down_proj": 4, "layers.1.self_attn.o_proj": 3},
            alpha_pattern={"up_proj": 24},
        ),
        torch.bfloat16,
    ),
    "phi3": Adapter("phi3", lora(4, 8, ["qkv_proj", "gate_up_proj"])),
    "gpt2": Adapter("gpt2", lora(4, 8, ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
}


def make(name: str, seed: int, out: Path) -> None:
    """Writes one case: the base model's text, with results computed while the adapter is active."""
    case = CASES[name]
    base = out.parents[1] / "logits" / case.base
    save(case, seed, base, out)
    exact, rounded = (
        PeftModel.from_pretrained(load(AutoModelForCausalLM, base, dtype), out).to(dtype).eval()
        for dtype in (torch.float64, torch.float32)
    )
    with np.load(base / "golden.npz") as of_base:
        ids, without = of_base["input_ids"], of_base["logits"]
    figures = golden(exact, rounded, ids)
    check_matters(figures["logits"], without)
    np.savez(out / "golden.npz", **figures)


def save(case: Adapter, seed: int, base: Path, out: Path) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`."""
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), deepcopy(case.config))
    fill((value for value in adapter.parameters() if value.requires_grad), seed)
    shutil.rmtree(out, ignore_errors=True)
    adapter.to(case.dtype).save_pretrained(out)
    (out / "README.md").unlink()

    def edit(config: JsonObject) -> None:
        config["base_model_name_or_path"] = case.base
        # PEFT keeps the names in a set, whose order differs from one process to the next.
        config["target_modules"].sort()

    edit_json(out / "adapter_config.json", edit)
