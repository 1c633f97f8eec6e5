"""Further published configurations of the architectures in `logits`, and the fields that they change."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from checkpoint import Edit, EditTensors, JsonObject, Tensors, edit_json, edit_tensors, save
from reference import VOCABULARY, ModelClass, check_matters, compute, golden, load, random_ids
from transformers import AutoModelForCausalLM, PreTrainedConfig

SLIDING_WINDOW = 16
"""Attention window of the cases, well below the text's 40 tokens."""


@dataclass(frozen=True)
class Variant:
    """A case; `without` are changes to config.json with which the same tensors give other logits."""

    config: PreTrainedConfig
    without: JsonObject | None = None
    edit: Edit | None = None
    edit_tensors: EditTensors | None = None
    unread: Tensors = field(default_factory=dict[str, torch.Tensor])
    """Tensors of published files that transformers ignores."""
    model_class: ModelClass = AutoModelForCausalLM
    attention: Literal["eager", "sdpa"] = "eager"


def sizes(**changes: object) -> JsonObject:
    """The dimensions of a small decoder, as most configurations name them."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **changes,
    }


def rope(kind: str, theta: float = 10000.0, **parameters: object) -> JsonObject:
    """Positions in the new spelling."""
    return {"rope_type": kind, "rope_theta": theta, **parameters}


def make_variant(case: Variant, seed: int, out: Path) -> None:
    """Writes one case."""
    save(case.model_class.from_config(case.config), seed, out)
    if case.edit is not None:
        edit_json(out / "config.json", case.edit)
    if case.edit_tensors is not None:
        edit_tensors(out, case.edit_tensors)
    exact, rounded = (load(case.model_class, out, dtype, case.attention) for dtype in (torch.float64, torch.float32))
    figures = golden(exact, rounded, random_ids(seed))
    if case.without is not None:
        check_matters(figures["logits"], logits_with(case.without, case, out, figures["input_ids"]))
    if case.unread:
        edit_tensors(out, lambda tensors: tensors | case.unread)
    np.savez(out / "golden.npz", **figures)


@torch.inference_mode()
def logits_with(
    changes: JsonObject, case: Variant, checkpoint: Path, ids: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """The logits of a checkpoint whose configuration is changed, `[n, vocab]`."""
    with TemporaryDirectory() as folder:
        changed = Path(folder) / "changed"
        shutil.copytree(checkpoint, changed)
        edit_json(changed / "config.json", lambda config: config.update(changes))
        return compute(load(case.model_class, changed, torch.float64, case.attention), ids).to(torch.float32).numpy()
