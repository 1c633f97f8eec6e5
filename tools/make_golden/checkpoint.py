"""Random checkpoints in the layout of published ones: values are exact in bf16, every tensor affects the logits."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

MATRIX_STD = 0.15
"""Keeps the scale of activations at widths of 64, so that every part has a visible effect on the logits."""
VECTOR_STD = 0.2
"""Standard deviation of vectors around their initial values: 1 for norms (0 if the model adds 1), 0 for biases."""

JsonObject = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Edit = Callable[[JsonObject], None]
EditTensors = Callable[[Tensors], Tensors]


def save(model: PreTrainedModel, seed: int, out: Path) -> None:
    """Writes `config.json` and `model.safetensors` with the names that the published checkpoints have."""
    fill(stored(model), seed)
    shutil.rmtree(out, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)


def stored(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Returns the parameters, and the floating-point buffers that are stored with them."""
    names = model.state_dict().keys()
    yield from model.parameters()
    yield from (value for name, value in model.named_buffers() if name in names and value.is_floating_point())


def fill(tensors: Iterable[torch.Tensor], seed: int) -> None:
    """Gives every tensor random values that are exact in bf16."""
    random = torch.Generator().manual_seed(seed)
    for value in tensors:
        noise = torch.randn(value.shape, generator=random)
        if value.dim() == 1:
            begin = value.detach() if bool((value == value[0]).all()) else torch.zeros_like(value)
            noise = begin + VECTOR_STD * noise
        else:
            noise = MATRIX_STD * noise
        value.data.copy_(noise.to(torch.bfloat16))


def edit_json(file: Path, edit: Edit) -> None:
    """Edits a written config.json; later results are computed from the edited file."""
    value = json.loads(file.read_text())
    edit(value)
    write_json(file, value)


def edit_tensors(out: Path, edit: EditTensors) -> None:
    """Adds, removes or renames tensors of a written checkpoint."""
    file = out / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def old_spelling(*dropped: str, **added: object) -> Edit:
    """Converts the fields to those before transformers 5: `rope_theta`, `rope_scaling`, `torch_dtype`, no `dropped`."""

    def edit(config: JsonObject) -> None:
        rope: JsonObject = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {**rope, "type": kind}
        config["torch_dtype"] = config.pop("dtype")
        config["transformers_version"] = "4.37.0"
        for field in dropped:
            del config[field]
        config.update(added)

    return edit


def write_json(file: Path, value: object) -> None:
    """Writes JSON as `save_pretrained` does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
