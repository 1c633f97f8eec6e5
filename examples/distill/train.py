"""Distillation, step 2: trains a student with fewer layers on the data of `collect.py`, with PyTorch.

    python examples/distill/train.py [TEACHER] --data target/distill/data --out target/distill

It needs `pip install torch transformers` and a teacher in Hugging Face's files. It writes the directories OUT/untrained
and OUT/trained.
"""

# The tests run without PyTorch.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, PreTrainedModel

from ferrule import FerruleError, model_info


def read(folder: Path) -> tuple[TensorDataset, int]:
    """Reads an export of `LLM.export_top_logprobs` whose texts have equal lengths.

    Returns the token ids `[texts, tokens]`, the most probable tokens and their log-probabilities, `[texts, tokens, k]`,
    and the size of the vocabulary.
    """
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    if not index["complete"]:
        raise SystemExit(f"train.py: the export in {folder} is incomplete: start collect.py again")
    shards = [load_file(folder / shard["file"]) for shard in index["shards"]]
    texts = sum(shard["texts"] for shard in index["shards"])
    lengths = torch.cat([shard["offsets"].diff() for shard in shards]).unique()
    if len(lengths) != 1:
        raise SystemExit(f"train.py: --data must have texts of equal lengths, got {lengths.min()} to {lengths.max()}")
    token_ids, top_ids, top_logprobs = (
        torch.cat([shard[name] for shard in shards]) for name in ("token_ids", "top_ids", "top_logprobs")
    )
    shape = (texts, -1, index["k"])
    data = TensorDataset(token_ids.view(texts, -1).long(), top_ids.view(shape).long(), top_logprobs.view(shape))
    return data, index["vocab_size"]


def drop_layers(model: PreTrainedModel, count: int) -> None:
    """Keeps `count` layers at equal distances, the first and the last among them.

    Neighbouring layers of a residual network change its state little, so what remains is a far better beginning than
    random weights: training takes minutes.
    """
    if not hasattr(getattr(model, "model", None), "layers"):
        raise SystemExit(f"train.py: TEACHER must keep its layers in model.layers, {type(model).__name__} does not")
    layers = model.model.layers
    last = len(layers) - 1
    kept = [round(number * last / max(count - 1, 1)) for number in range(count)]
    model.model.layers = torch.nn.ModuleList(layers[number] for number in kept)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = count
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[number] for number in kept]


def divergence(logits: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns the mean Kullback-Leibler divergence from the teacher to the student, in nats per token.

    `logits` are the student's, `[texts, tokens, vocabulary]`. The distributions have k + 1 classes: the teacher's k
    most probable tokens, and one class of all others. It is a lower bound of the divergence over the vocabulary.
    """
    student = log_softmax(logits, dim=-1)
    # The limit is for k equal to the vocabulary, where no other token is left.
    others = student.scatter(-1, top_ids, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=-100)
    student = torch.cat([student.gather(-1, top_ids), others], dim=-1)
    p = top_logprobs.exp()
    p = torch.cat([p, (1 - p.sum(-1, keepdim=True)).clamp(min=0)], dim=-1)
    return (torch.xlogy(p, p) - p * student).sum(-1).mean()


def train(model: PreTrainedModel, data: TensorDataset, epochs: int, batch: int, rate: float) -> None:
    """Trains with AdamW and a learning rate that rises for a tenth of the steps, then falls."""
    batches = DataLoader(data, batch, shuffle=True)
    steps = epochs * len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    started = time.monotonic()
    step = 0
    for _ in range(epochs):
        for token_ids, top_ids, top_logprobs in batches:
            loss = divergence(model(token_ids, use_cache=False).logits, top_ids, top_logprobs)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % max(steps // 10, 1) == 0 or step == steps - 1:
                seconds = time.monotonic() - started
                print(f"step {step + 1} of {steps}: divergence {loss.item():.4f}, {seconds:.0f} s", flush=True)
            step += 1


def save(model: PreTrainedModel, teacher: Path, folder: Path) -> None:
    """Writes weights and configuration in the teacher's dtype, and copies its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in teacher.iterdir():
        if file.name.startswith("tokenizer") or file.name in ("special_tokens_map.json", "chat_template.jinja"):
            shutil.copy(file, folder)
    model.save_pretrained(folder)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Train a student with fewer layers on a teacher's probabilities.")
    parser.add_argument("teacher", nargs="?", help="path or name of the teacher (default: the embedded model)")
    parser.add_argument("--data", type=Path, required=True, help="directory that collect.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="directory for the students")
    parser.add_argument("--layers", type=int, help="layers of the student (default: half of the teacher's)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="texts in a step (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Makes the student from the teacher's layers, and trains it."""
    args = arguments()
    info = model_info(args.teacher)
    if info["file"] is not None:
        raise SystemExit(f"train.py: TEACHER must be a directory in Hugging Face's format, got {info['file']}")
    for name in ("epochs", "batch"):
        if getattr(args, name) < 1:
            raise SystemExit(f"train.py: --{name} must be >= 1, got {getattr(args, name)}")
    layers = max(info["layers"] // 2, 1) if args.layers is None else args.layers
    if not 1 <= layers <= info["layers"]:
        raise SystemExit(f"train.py: --layers must be from 1 to {info['layers']} (the teacher's), got {layers}")
    data, vocabulary = read(args.data)
    if vocabulary != info["vocab_size"]:
        raise SystemExit(f"train.py: --data has a vocabulary of {vocabulary} tokens, TEACHER of {info['vocab_size']}")
    torch.manual_seed(0)
    teacher = Path(info["directory"])
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype="auto")
    dtype = model.dtype
    drop_layers(model, layers)
    save(model, teacher, args.out / "untrained")
    model.float()
    train(model, data, args.epochs, args.batch, args.rate)
    save(model.to(dtype), teacher, args.out / "trained")


if __name__ == "__main__":
    try:
        main()
    except (FerruleError, OSError) as error:
        sys.exit(f"train.py: {error}")
