"""Measure candidate weight formats on the embedded model: `python study.py --windows 128 --out record.json`."""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from divergence import WINDOW, Distance, Reference, held_out_windows
from formats import (
    IQ4_NL,
    SEARCH,
    Format,
    Grid,
    GroupScale,
    SubScales,
    by_magnitude,
    by_square,
    either_sign,
    int8_activations,
    integers,
    linear,
    q6_k,
    symmetric,
    up_to,
)
from heavy_tails import activation_error, weight_errors
from tiny_llama import EMBEDDING, Weights, is_matrix, read_config, read_weights

TINY = Path(__file__).parents[2] / "python/ferrule/models/tiny"

Q6_K = Format("Q6_K", 6.5625, q6_k)
Q8_0 = Format("Q8_0", 8.5, GroupScale(32, symmetric(8), signed=False))
Q4_0 = Format("Q4_0", 4.5, GroupScale(32, linear(4)))
IQ4 = Format("IQ4_NL", 4.5, GroupScale(32, Grid(IQ4_NL), SEARCH, by_square))
G32 = Format("g32 f16, search", 4.5, GroupScale(32, linear(4), SEARCH))
G32_SQUARE = Format("g32 f16, search by w^2", 4.5, GroupScale(32, linear(4), SEARCH, by_square))
G32_MAGNITUDE = Format("g32 f16, search by magnitude", 4.5, GroupScale(32, linear(4), SEARCH, by_magnitude))
G64 = Format("g64 f16, search", 4.25, GroupScale(64, linear(4), SEARCH))
G128 = Format("g128 f16, search", 4.125, GroupScale(128, linear(4), SEARCH))
S16 = Format("s16: sub-scales 0..15", 4.3125, SubScales(16, linear(4), up_to(15)))
S32 = Format("s32: sub-scales 0..15", 4.1875, SubScales(32, linear(4), up_to(15)))
S64 = Format("s64: sub-scales 0..15", 4.125, SubScales(64, linear(4), up_to(15)))
S16_SIGNED = Format("s16, -7..7", 4.3125, SubScales(16, linear(4), either_sign(*range(1, 8))))
S16_FINE = Format("s16, -15..15", 4.375, SubScales(16, linear(4), either_sign(*range(1, 16))))
SMALL_LEVELS = integers(-12, -10, -8, -6, -5, -4, -2, -1, 0, 1, 2, 3, 5, 6, 8, 10)
S16_BOOK = Format("s16, 16 small levels, +-3..10", 4.3125, SubScales(16, SMALL_LEVELS, either_sign(*range(3, 11))))
S16_IQ = Format("s16, IQ4_NL levels, +-1..7", 4.3125, SubScales(16, Grid(IQ4_NL), either_sign(*range(1, 8))))
ROW32 = Format("g32 u8 scale, f32 a row", 4.25, SubScales(32, linear(4), up_to(255), super_block=1 << 30))
INT6 = Format("int6: s16, 1..4", 6.1875, SubScales(16, linear(6), integers(1, 2, 3, 4)))
INT8 = Format("int8: f16 step of 256", 8.0625, GroupScale(256, symmetric(8), signed=False))
INT8_128 = Format("int8 g128", 8.125, GroupScale(128, symmetric(8), signed=False))
INT8_64 = Format("int8 g64", 8.25, GroupScale(64, symmetric(8), signed=False))
INT8_ROW = Format(
    "int8 per row", 8 + 32 * 19_456 / 5_767_168, GroupScale(1 << 30, symmetric(8), signed=False, scale_in_f32=True)
)

Policy = Callable[[str], Format | None]


def everywhere(weight_format: Format, head: Format) -> Policy:
    """One format for the layers, another for the tied embedding and head."""
    return lambda name: head if name == EMBEDDING else weight_format


def sensitive(base: Format, more: Format, parts: tuple[str, ...]) -> Policy:
    """`more` for the head and every matrix whose name has one of `parts`, `base` for the rest."""
    return lambda name: more if name == EMBEDDING or any(part in name for part in parts) else base


def alone(weight_format: Format, part: str) -> Policy:
    """Only matrices whose name has `part`."""
    return lambda name: weight_format if part in name else None


EDGES = ("layers.0.mlp.down", "layers.5.mlp.down", "v_proj")
"""The first and the last eighth of down_proj (one layer each here), v_proj everywhere."""

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

HEAVY = (
    *(Q4_0, IQ4, G32, G64, G128, ROW32, S16, S32, S64, S16_SIGNED, S16_FINE, S16_BOOK, S16_IQ),
    *(INT6, Q6_K, INT8, INT8_128, INT8_ROW, Q8_0),
)


def quantize(weights: Weights, policy: Policy) -> tuple[Weights, int]:
    """Weights as a kernel would see them, and the bytes of all matrices."""
    out: Weights = {}
    total = 0
    for name, tensor in weights.items():
        chosen = policy(name) if is_matrix(name) else None
        out[name] = chosen.apply(tensor) if chosen else tensor
        total += chosen.bytes(tensor.size) if chosen else 0
    return out, total


def measure(reference: Reference, weights: Weights, case: Case) -> tuple[dict[str, object], Distance]:
    """One row of the record."""
    quantized, total = quantize(weights, case.policy)
    found = reference.distance(quantized, int8_activations(case.group, case.outliers))
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
    reference = Reference(config, weights, ids)
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
            row, kept[case.name] = measure(reference, weights, case)
            difference = kept[case.name].per_token - kept[CASES[3].name].per_token if CASES[3].name in kept else None
            if difference is not None:
                row["above_recommended"] = round(float(difference.mean()), 6)
                row["above_recommended_error"] = round(float(difference.std() / np.sqrt(len(difference))), 6)
            rows.append(row)
            print(json.dumps(row), flush=True)
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    if not arguments.only:
        record["llama_1b_heavy_tails"] = {f.name: weight_errors(f) for f in HEAVY}
        record["llama_1b_activations"] = {
            f"g{group}, {outliers} outliers": activation_error(group, outliers)
            for outliers in (0, 5)
            for group in (32, 64, 128, 256, 2048)
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
