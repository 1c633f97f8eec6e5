"""Measure ferrule's own quantizations on the embedded model: `python measure.py --windows 128 --out record.json`.

The study predicts in NumPy what they lose; this is what the kernels lose, against the same model in f32. With
`--calibrate`, int4 is quantized by 65,536 tokens of the rest of the standard library too.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from divergence import FIRST, WINDOW, Floats, Model, Reference, calibration_text, held_out_windows
from numpy.typing import NDArray

import ferrule
from ferrule import LLM, quantize

TINY = Path(ferrule.__file__).parent / "models" / "tiny"
QUANTIZATIONS = ("int8", "int4")


def ferrule_model(llm: LLM) -> Model:
    """The forward pass of the package."""

    def logits(ids: NDArray[np.int64]) -> Floats:
        return np.stack([llm.logits(window.tolist())[FIRST:] for window in ids])

    return logits


def calibrated(folder: Path) -> tuple[Path, float]:
    """The embedded model in int4, quantized by text that is not held out, and the seconds that it took."""
    text = folder / "text"
    text.write_text(calibration_text())
    start = time.monotonic()
    return quantize(None, folder / "int4", format="int4", calibrate=text), time.monotonic() - start


def main() -> None:
    """Load each quantization in turn, printing rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=128, help="windows of 256 tokens (all there are: 701)")
    parser.add_argument("--out", type=Path, required=True, help="JSON record")
    parser.add_argument("--calibrate", action="store_true", help="also int4 by what text shows")
    arguments = parser.parse_args()
    ids = held_out_windows(TINY / "tokenizer.json", arguments.windows)
    with LLM(quantization="f32") as llm:
        reference = Reference(ferrule_model(llm), ids)
        isa = llm.info()["isa"]
    rows: list[dict[str, object]] = []
    record: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "isa": isa,
        "windows": len(ids),
        "tokens": len(ids) * WINDOW,
        "reference_perplexity": round(reference.perplexity(), 3),
        "quantizations": rows,
    }

    def measure(name: str, llm: LLM, **further: float) -> None:
        row: dict[str, object] = {"name": name, "weight_bytes": llm.info()["weight_bytes"]}
        row |= reference.distance(ferrule_model(llm)).row() | further
        rows.append(row)
        print(json.dumps(row), flush=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")

    for quantization in QUANTIZATIONS:
        with LLM(quantization=quantization, kv_cache_dtype="f32") as llm:
            measure(quantization, llm)
    if arguments.calibrate:
        with tempfile.TemporaryDirectory() as folder:
            model, seconds = calibrated(Path(folder))
            with LLM(model, kv_cache_dtype="f32") as llm:
                measure("int4, calibrated", llm, seconds=round(seconds, 1))


if __name__ == "__main__":
    main()
