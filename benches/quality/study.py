"""Measure candidate weight formats on the embedded model: `python study.py --windows 128 --out record.json`."""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from candidates import (
    G32,
    G32_MAGNITUDE,
    G32_SQUARE,
    G64,
    G128,
    INT6,
    INT8,
    INT8_64,
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
from divergence import FIRST, WINDOW, Distance, Model, Reference, held_out_windows
from formats import Format, int8_activations
from tiny_llama import EMBEDDING, Activation, Config, Weights, is_matrix, logits, read_config, read_weights

TINY = Path(__file__).parents[2] / "python/ferrule/models/tiny"

Policy = Callable[[str], Format | None]


def everywhere(weight_format: Format, head: Format) -> Policy:
    """Use one format for the layers and another for the tied embedding and lm_head."""
    return lambda name: head if name == EMBEDDING else weight_format


def sensitive(base: Format, more: Format, parts: tuple[str, ...]) -> Policy:
    """Use `more` for lm_head and matrices whose name contains one of `parts`, `base` for all others."""
    return lambda name: more if name == EMBEDDING or any(part in name for part in parts) else base


def alone(weight_format: Format, part: str) -> Policy:
    """Quantize only matrices whose name contains `part`."""
    return lambda name: weight_format if part in name else None


EDGES = ("layers.0.mlp.down", "layers.5.mlp.down", "v_proj")
"""Sensitive matrices: the first and last eighth of down_proj (one layer each here), and v_proj in all layers."""

INT4 = sensitive(S16, INT6, EDGES)


@dataclass(frozen=True)
class Case:
    """One row of the record."""

    name: str
    policy: Policy
    group: int = 0
    outliers: int = 0


CASES = [
    Case("Q8_0, as llama.cpp runs it", everywhere(Q8_0, Q8_0), 32),
    Case("Q4_0 + Q6_K head, as llama.cpp runs it", everywhere(Q4_0, Q6_K), 32),
    Case("Q4_0 + Q6_K head", everywhere(Q4_0, Q6_K)),
    Case("recommended int4", INT4),
    *(Case(f"recommended int4, activations g{group}", INT4, group) for group in (32, 64, 128, 256)),
    *(Case(f"int8, activations g{group}", everywhere(INT8, INT8), group) for group in (0, 32, 64, 128, 256)),
    *(Case(f"int4, 5 outliers, activations g{group}", INT4, group, 5) for group in (32, 128, 256)),
    *(Case(f"int8, 5 outliers, activations g{group}", everywhere(INT8, INT8), group, 5) for group in (32, 128, 256)),
    *(
        Case(f"{f.name} + Q6_K head", everywhere(f, Q6_K))
        for f in (IQ4, G32, G32_SQUARE, G32_MAGNITUDE, G64, G128, ROW32, S64, S32, S16, S16_SIGNED, S16_FINE)
    ),
    *(Case(f"{f.name} + Q6_K head", everywhere(f, Q6_K)) for f in (S16_BOOK, S16_IQ)),
    Case("s16 + int6 head", everywhere(S16, INT6)),
    Case("s16 + int6 head, first down", sensitive(S16, INT6, EDGES[:1])),
    Case("s16 + int6 head, v", sensitive(S16, INT6, EDGES[2:])),
    Case("s32 + int6 head, edges of down, v", sensitive(S32, INT6, EDGES)),
    Case("s64 + int8 head", everywhere(S64, INT8)),
    Case("s16 everywhere, head too", everywhere(S16, S16)),
    *(Case(f"head alone: {f.name}", alone(f, EMBEDDING)) for f in (Q6_K, INT6, INT8)),
    *(Case(f"{f.name} everywhere", everywhere(f, f)) for f in (INT8_ROW, INT8_128, INT8_64)),
    *(Case(f"s16 in {part} alone", alone(S16, part)) for part in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(Case(f"s16 in {part} alone", alone(S16, part)) for part in ("gate_proj", "up_proj", "down_proj")),
    *(Case(f"s16 in down of layer {layer} alone", alone(S16, f"{layer}.mlp.down")) for layer in range(6)),
]


def quantize(weights: Weights, policy: Policy) -> tuple[Weights, int]:
    """Return the weights as a kernel would read them, and the bytes of all matrices."""
    out: Weights = {}
    total = 0
    for name, tensor in weights.items():
        chosen = policy(name) if is_matrix(name) else None
        out[name] = chosen.apply(tensor) if chosen else tensor
        total += chosen.bytes(tensor.size) if chosen else 0
    return out, total


def numpy_model(config: Config, weights: Weights, activation: Activation) -> Model:
    """The forward pass in NumPy."""
    return lambda ids: logits(config, weights, ids, FIRST, activation).reshape(len(ids), WINDOW - FIRST, -1)


def measure(config: Config, reference: Reference, weights: Weights, case: Case) -> tuple[dict[str, object], Distance]:
    """One row of the record."""
    quantized, total = quantize(weights, case.policy)
    found = reference.distance(numpy_model(config, quantized, int8_activations(case.group, case.outliers)))
    return {"name": case.name, "matrix_bytes": total, **found.row()}, found


def main() -> None:
    """Run every case, printing rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=128, help="windows of 256 tokens (all there are: 701)")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--out", type=Path, required=True, help="JSON record")
    arguments = parser.parse_args()
    config, weights = read_config(TINY), read_weights(TINY)
    ids = held_out_windows(TINY / "tokenizer.json", arguments.windows)
    reference = Reference(numpy_model(config, weights, lambda x: x), ids)
    record: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "windows": len(ids),
        "tokens": len(ids) * WINDOW,
        "reference_perplexity": round(reference.perplexity(), 3),
    }
    rows: list[dict[str, object]] = []
    record["tiny"] = rows
    kept: dict[str, Distance] = {}
    for case in CASES:
        if arguments.only in case.name:
            row, kept[case.name] = measure(config, reference, weights, case)
            difference = kept[case.name].per_token - kept[CASES[3].name].per_token if CASES[3].name in kept else None
            if difference is not None:
                row["above_recommended"] = round(float(difference.mean()), 6)
                row["above_recommended_error"] = round(float(difference.std() / np.sqrt(len(difference))), 6)
            rows.append(row)
            print(json.dumps(row), flush=True)
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
