"""Relative output error of formats on matrices of a llama-1b shape with heavy-tailed random weights.

If the channels of the activations are independent, the expected relative error of an output equals that of the
weights. The figure is therefore the square root of the ratio of squared norms. Rows are independent, so 128 of them
represent a matrix.

`python heavy_tails.py --out record.json`
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from candidates import (
    G32,
    G64,
    G128,
    INT6,
    INT8,
    INT8_128,
    INT8_ROW,
    IQ4,
    Q4_0,
    Q6_K,
    Q8_0,
    ROW32,
    S16,
    S16_BOOK,
    S16_FINE,
    S16_IQ,
    S16_SIGNED,
    S32,
    S64,
)
from formats import Format, int8_activations
from tiny_llama import Floats

INPUTS = {"q/k/v/o/gate/up": 2048, "down": 8192}
ROWS = 128
TOKENS = 64


def student(inputs: int, freedom: float) -> Floats:
    """Weights [ROWS, inputs] of Student's t with `freedom` degrees of freedom, 0 for normal ones."""
    rng = np.random.default_rng(int(freedom * 10) + inputs)
    drawn = rng.standard_t(freedom, (ROWS, inputs)) if freedom else rng.standard_normal((ROWS, inputs))
    return drawn.astype(np.float32)


def weight_errors(weight_format: Format) -> dict[str, float]:
    """Relative output error by degrees of freedom and number of inputs."""
    errors: dict[str, float] = {}
    for freedom in (0, 5, 3):
        for inputs in INPUTS.values():
            matrix = student(inputs, freedom)
            miss = weight_format.apply(matrix) - matrix
            law = f"t{freedom}" if freedom else "normal"
            errors[f"{law} x {inputs}"] = round(float(np.linalg.norm(miss) / np.linalg.norm(matrix)), 5)
    return errors


def activation_error(group: int, outliers: int, inputs: int = 2048) -> float:
    """Relative error of ordinary channels' contribution when `outliers` channels are 300 times larger."""
    x: Floats = np.random.default_rng(1).standard_normal((TOKENS, inputs)).astype(np.float32)
    miss = int8_activations(group, outliers)(x) - x
    return round(float(np.linalg.norm(miss) / np.linalg.norm(x)), 5)


COMPARED = (
    *(Q4_0, IQ4, G32, G64, G128, ROW32, S16, S32, S64, S16_SIGNED, S16_FINE, S16_BOOK, S16_IQ),
    *(INT6, Q6_K, INT8, INT8_128, INT8_ROW, Q8_0),
)


def main() -> None:
    """Measure every format and every activation group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON record")
    out: Path = parser.parse_args().out
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "rows": ROWS,
        "weights": {f.name: {"bits": f.bits, **weight_errors(f)} for f in COMPARED},
        "activations": {
            f"g{group}, {outliers} outliers": activation_error(group, outliers)
            for outliers in (0, 5)
            for group in (32, 64, 128, 256, 2048)
        },
    }
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
