"""Reference results of transformers: logits and greedy continuation in float64."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

ModelClass = type[PreTrainedModel] | type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]

TOKENS = 40
NEW_TOKENS = 12
VOCABULARY = 320
SPECIAL = 5
"""Lower bound of the ids in texts; the ids below are special tokens in some models."""

MARGIN = 2e-3
"""Minimum lead of the best token of a continuation, relative to the largest logit."""
ROUNDING = 2e-5
"""Maximum difference of float32 from float64, relative to the largest logit.

Near ties of a router cause larger differences.
"""


EFFECT = 1e-2
"""Minimum change of the logits when the field of a case is omitted, relative to the largest logit."""


class UnstableError(Exception):
    """The results of these weights depend on rounding; the caller tries other weights."""


def load(
    model_class: ModelClass, checkpoint: Path, dtype: torch.dtype, attention: Literal["eager", "sdpa"] = "eager"
) -> PreTrainedModel:
    """Loads the model with the simplest kernels, because `grouped_mm` for experts does not support float64.

    Raises ValueError if the file's tensors differ from the model's.
    """
    model, loading = model_class.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation=attention, experts_implementation="eager", output_loading_info=True
    )
    wrong = {kind: keys for kind, keys in loading.items() if keys}
    if wrong:
        raise ValueError(f"{checkpoint}: {wrong}")
    return model.eval()


def random_ids(seed: int) -> NDArray[np.int64]:
    """Returns the random token ids of a case, `[TOKENS]`."""
    return np.random.default_rng(seed).integers(SPECIAL, VOCABULARY, TOKENS)


@torch.inference_mode()
def golden(exact: torch.nn.Module, rounded: torch.nn.Module, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """`input_ids [n]`, `logits [n, vocab]` in float32, `greedy [NEW_TOKENS]`, from the model in float64.

    `rounded` is the model in float32. Raises UnstableError if its results differ.
    """
    logits = compute(exact, ids)
    text = ids
    greedy: list[int] = []
    for _ in range(NEW_TOKENS):
        row = compute(exact, text)[-1]
        best, second = row.topk(2).values
        if best - second < MARGIN * row.abs().max():
            raise UnstableError(f"the best token leads by {best - second:.2e}")
        greedy.append(int(row.argmax()))
        text = np.append(text, greedy[-1])
    for name, tokens in (("the text", ids), ("the text with its continuation", text)):
        wide = compute(exact, tokens)
        distance = float((compute(rounded, tokens) - wide).abs().max() / wide.abs().max())
        if not distance < ROUNDING:
            raise UnstableError(f"float32 differs by {distance:.2e} on {name}")
    return {"input_ids": ids, "logits": logits.to(torch.float32).numpy(), "greedy": np.array(greedy)}


def compute(model: torch.nn.Module, ids: NDArray[np.int64]) -> torch.Tensor:
    """The logits of a whole text, without a cache, `[n, vocab]`."""
    return model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]


def check_matters(logits: NDArray[np.float32], without: NDArray[np.float32]) -> None:
    """Raises ValueError if the logits hardly differ from those of a model without the tested feature."""
    distance = float(np.abs(logits - without).max() / np.abs(logits).max())
    if not distance > EFFECT:
        raise ValueError(f"what the case is about changes the logits by {distance:.2e}: a test of it could not fail")
