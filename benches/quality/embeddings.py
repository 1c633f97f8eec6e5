"""Measure how much a format changes embeddings: `python embeddings.py MODEL`.

Each paragraph of Python's documentation topics is embedded with the model in f32 and in each format. The rows are the
size of the weights, the smallest and mean cosine between both embeddings, and the median time of a batch.
"""

import argparse
import pydoc_data.topics
import time
from contextlib import ExitStack

import numpy as np

from ferrule import LLM

FORMATS = ("f32", "bf16", "int8", "int4")
PARAGRAPHS, BATCH, ROUNDS = 128, 32, 5
CHARACTERS = (40, 900)


def paragraphs() -> list[str]:
    """Return paragraphs of prose and code, each on one line."""
    pieces = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    shortest, longest = CHARACTERS
    return [piece.replace("\n", " ") for piece in pieces if shortest < len(piece) < longest][:PARAGRAPHS]


def main() -> None:
    """Measure each format of the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="encoder: directory or name")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        measure({name: stack.enter_context(LLM(arguments.model, quantization=name)) for name in FORMATS})


def measure(models: dict[str, LLM]) -> None:
    """Print a row for each model; the models take turns in the timed batches."""
    texts = paragraphs()
    found = {
        name: np.stack(
            [each.outputs.embedding for each in llm.embed(texts, truncate_prompt_tokens=-1)], dtype=np.float64
        )
        for name, llm in models.items()
    }
    units = {name: each / np.linalg.norm(each, axis=1, keepdims=True) for name, each in found.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, llm in models.items():
            start = time.perf_counter()
            llm.embed(texts[:BATCH], truncate_prompt_tokens=-1)
            times[name].append(time.perf_counter() - start)
    print(f"{len(texts)} texts, {models['f32'].info()['isa']}; seconds of a batch of {BATCH}")
    for name, llm in models.items():
        cosines = (units[name] * units["f32"]).sum(axis=1)
        seconds = float(np.median(times[name]))
        size = llm.info()["weight_bytes"]
        print(f"{name:5} {size:>11,} bytes  cosine {cosines.min():.6f} mean {cosines.mean():.6f}  {seconds:.3f} s")


if __name__ == "__main__":
    main()
