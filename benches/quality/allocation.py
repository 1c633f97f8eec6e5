"""Measure bit allocation on a model: `python allocation.py MODEL --text FILE --windows 64 --bits 4.85 --out FILE`.

The reference is the same model in f32. Measured are int4, the formats that `allocate_bits` chooses for the same bytes,
and those for each `--bits`, without calibration, calibrated with generated text, and with `--calibrate TEXT`. With
`--kinds`, the matrices of one kind (the last part of a tensor's name) are in int4, all others in int8, and the
difference of the divergence from that of int8 stands beside the loss that `allocate_bits` estimates.
`--thirds` measures each third of the layers separately. `MODEL` can be `embedded`, which is measured on its held-out
text.
"""

import argparse
import json
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from divergence import FIRST, WINDOW, held_out_windows

import ferrule
from ferrule import (
    LLM,
    BitAllocation,
    Comparison,
    Recipe,
    allocate_bits,
    generate_calibration,
    model_info,
    quantize,
)

Calibration = Path | list[list[int]] | None
"""A text, sequences of token ids, or none."""

TINY = Path(ferrule.__file__).parent / "models" / "tiny"
SCORED: dict[str, Any] = {"window": WINDOW, "stride": WINDOW - FIRST - 1, "min_context": FIRST + 1}
INT4_ERROR = 0.006
"""Relative squared error of a matrix in int4."""


class Model:
    """A model with its reference and the windows on which both are compared."""

    def __init__(self, path: Path | None, text: Path | None, windows: int, folder: Path) -> None:
        """Load the reference and tokenize the text."""
        self.path, self.folder = path, folder
        self.reference = LLM(path, quantization="f32")
        if text is None:
            self.windows: list[list[int]] = held_out_windows(TINY / "tokenizer.json", windows).tolist()
        else:
            ids = self.reference.tokenize(text.read_text(), add_special_tokens=False)
            bos = self.reference.tokenize("")
            length = WINDOW - len(bos)
            starts = range(0, len(ids) - length + 1, max((len(ids) - length) // max(windows - 1, 1), 1))
            self.windows = [bos + ids[start : start + length] for start in starts][:windows]

    def compare(self, recipe: Recipe | None, text: Calibration = None) -> tuple[int, Comparison]:
        """Quantize to int4, or by a recipe, and compare with the reference; return the bytes of the weights too."""
        out = self.folder / "packed"
        quantize(self.path, out, recipe=recipe, overwrite=True, calibrate=text)
        with LLM(out, kv_cache_dtype="f32") as llm:
            return llm.info()["weight_bytes"], llm.compare(self.reference, self.windows, **SCORED)


def layer(tensor: str) -> int | None:
    """Return the index of the layer that a tensor belongs to."""
    found = re.search(r"\.(\d+)\.", tensor)
    return int(found[1]) if found else None


def kinds(allocation: BitAllocation, parts: int) -> dict[str, list[str]]:
    """Return the tensors of each kind, in `parts` parts of the layers."""
    layers = 1 + max(layer(matrix.tensor) or 0 for matrix in allocation.matrices)
    found: dict[str, list[str]] = defaultdict(list)
    for matrix in allocation.matrices:
        index, kind = layer(matrix.tensor), matrix.tensor.split("[")[0].rsplit(".", 1)[-1]
        part = "" if index is None or parts == 1 else f" {index * parts // layers + 1}/{parts}"
        found[kind + part].append(matrix.tensor)
    return found


def main() -> None:
    """Measure one format after the other, printing rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, help="UTF-8 text to measure on")
    parser.add_argument("--windows", type=int, default=64, help="windows of 256 tokens, half of which are scored")
    parser.add_argument("--bits", type=float, nargs="*", default=[])
    parser.add_argument("--calibrate", type=Path, help="text for calibration; measures each row with it too")
    parser.add_argument("--kinds", action="store_true", help="measure the loss of each kind instead")
    parser.add_argument("--thirds", action="store_true", help="with --kinds, by third of the layers")
    parser.add_argument("--out", type=Path, required=True, help="JSON record")
    arguments = parser.parse_args()
    if arguments.kinds and arguments.calibrate:
        parser.error("--kinds does not support --calibrate")
    path = None if arguments.model == "embedded" else Path(arguments.model)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Model(path, arguments.text, arguments.windows, Path(folder))

        def measure(name: str, recipe: Recipe | None, text: Calibration = None, **further: float) -> float:
            size, comparison = model.compare(recipe, text)
            row = {
                "name": name,
                "calibration": "none" if text is None else "text" if isinstance(text, Path) else "generated",
                "bytes": size,
                "bits": round(8 * size / weights, 3),
            }
            row |= {"kld": comparison.kld.mean, "kld_error": comparison.kld.error}
            row |= {"same_top": comparison.same_top, "perplexity": comparison.model.perplexity, **further}
            rows.append({key: round(x, 6) if isinstance(x, float) else x for key, x in row.items()})
            print(json.dumps(rows[-1]), flush=True)
            record = {"date": time.strftime("%Y-%m-%d"), "model": path.name if path else "embedded"}
            record |= {"windows": len(model.windows), "reference_perplexity": comparison.reference.perplexity}
            arguments.out.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
            return rows[-1]["kld"]

        info = model_info(path, quantization="int4")
        weights: int = info["parameters"]
        if arguments.kinds:
            allocation = allocate_bits(path, 8 * info["weight_bytes"] / weights)
            # The estimates are linear in the errors, and those of int4 are alike.
            losses = {matrix.tensor: INT4_ERROR * matrix.loss / matrix.error for matrix in allocation.matrices}
            base = measure("int8", Recipe({}, base="int8"))
            for kind, tensors in kinds(allocation, 3 if arguments.thirds else 1).items():
                estimate = sum(losses[tensor] for tensor in tensors)
                found = measure(kind, Recipe(dict.fromkeys(tensors, "int4"), base="int8"), estimate=estimate)
                print(f"    {kind}: measured {found - base:.5f}, estimated {estimate:.5f}")
            return
        calibrations: list[Calibration] = [None, generate_calibration(path)]
        for text in [*calibrations, arguments.calibrate] if arguments.calibrate else calibrations:
            measure("int4", None, text)
            for bits in [8 * info["weight_bytes"] / weights, *arguments.bits]:
                measure(f"--bits {bits:.4g}", allocate_bits(path, bits, calibrate=text).recipe(), text)


if __name__ == "__main__":
    main()
