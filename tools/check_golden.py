#!/usr/bin/env python
"""Compare ferrule with reference logits, and suggest causes if they differ.

    python tools/check_golden.py tests/golden/variants/helium ...
    python tools/check_golden.py --plugin my_package.otter cases/otter

A directory has config.json, model.safetensors, and golden.npz with `input_ids [n]`, `logits [n, vocab]` and `greedy`,
the continuation; tools/make_golden writes them. Logits of some tokens only are `logits [m, vocab]` with the indices
`rows [m]`. `--plugin` imports a module first, which registers an architecture.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ferrule import LLM, FerruleError, SamplingParams

TOLERANCE = 1e-4
"""Tolerance, relative to the largest logit; a correct architecture is a hundred times closer."""
FEW_COLUMNS = 4


def main() -> None:
    """Checks each directory; exits with 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIRECTORY")
    parser.add_argument("--plugin", metavar="MODULE", help="import this module first")
    arguments = parser.parse_args()
    for directory in arguments.directories:
        if not (directory / "golden.npz").exists():
            parser.error(f"{directory} has no golden.npz")
    if arguments.plugin is not None:
        sys.path.insert(0, "")
        importlib.import_module(arguments.plugin)
    right = [check(directory) for directory in arguments.directories]
    raise SystemExit(0 if all(right) else 1)


def check(directory: Path) -> bool:
    """Compares one directory, and prints the result."""
    with np.load(directory / "golden.npz") as golden:
        ids, expected, greedy = golden["input_ids"].tolist(), golden["logits"], golden["greedy"].tolist()
        tokens = golden["rows"] if "rows" in golden else np.arange(len(ids))
    try:
        with LLM(directory, quantization="f32", kv_cache_dtype="f32") as llm:
            logits = llm.logits(ids)[tokens]
            params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
            continuation = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids
    except FerruleError as error:
        print(f"{directory.name}: {type(error).__name__}: {error}")
        return False
    wrong = np.abs(logits.astype(np.float64) - expected) / np.abs(expected).max()
    print(f"{directory.name}: off by {wrong.max():.1e} of the largest logit")
    if wrong.max() > TOLERANCE:
        print(f"  {diagnosis(wrong, tokens)}")
        return False
    if list(continuation) != greedy:
        print(f"  the logits are right, but the continuation is {continuation} instead of {greedy}")
        return False
    return True


def diagnosis(wrong: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]) -> str:
    """Describes probable causes from the positions of wrong logits, `[m, vocabulary]`, of these tokens."""
    rows, columns = (np.flatnonzero(wrong.max(axis) > TOLERANCE) for axis in (1, 0))
    if len(columns) <= FEW_COLUMNS:
        return f"only of token {', '.join(map(str, columns))}: check lm_head and the handling of special tokens"
    first = int(tokens[rows[0]])
    if first == 0:
        return (
            "from the first token on, which attends only to itself: check the embedding, the norms, the projections of "
            "values and output, the feed-forward network, lm_head"
        )
    return (
        f"from token {first} on, and earlier ones are right: check the rotary embedding, the scale of the scores, "
        f"norms of queries and keys{', a window, a mixture of experts' if first > 1 else ''}"
    )


if __name__ == "__main__":
    main()
