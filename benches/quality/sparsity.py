"""Measure pruned weights against dense ones of the same bytes: `python sparsity.py --windows 128 --out FILE`.

The model is the embedded one, the reference the same model in f32, and the calibration text the rest of the standard
library. Each row is a format, a sparsity and a pruning method; `equal bytes` is the dense model that `allocate_bits`
makes of the bytes of the rows before it, calibrated too.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from allocation import SCORED, Model
from divergence import calibration_text

from ferrule import LLM, allocate_bits, quantize

METHODS = ("sparsegpt", "wanda", "magnitude")
SPARSE = (("bf16", "0.5"), ("bf16", "2:4"), ("int8", "0.5"), ("int8", "2:4"), ("int4", "2:4"))


def main() -> None:
    """Measure one row after the other, printing them as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=128, help="windows of 256 tokens, half of which are scored")
    parser.add_argument("--calibration-tokens", type=int, default=65_536, help="tokens of the calibration text")
    parser.add_argument("--out", type=Path, required=True, help="JSON record")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text"
        text.write_text(calibration_text())
        model = Model(None, None, arguments.windows, folder)

        def measure(row: str, **options: Any) -> int:
            tokens = arguments.calibration_tokens
            packed = quantize(None, folder / "packed", overwrite=True, calibration_tokens=tokens, **options)
            with LLM(packed, kv_cache_dtype="f32") as llm:
                size: int = llm.info()["weight_bytes"]
                found = llm.compare(model.reference, model.windows, **SCORED)
            figures = {"kld": found.kld.mean, "same_top": found.same_top, "perplexity": found.model.perplexity}
            rows.append({"name": row, "bytes": size, **{key: round(value, 5) for key, value in figures.items()}})
            print(json.dumps(rows[-1]), flush=True)
            record = {"date": time.strftime("%Y-%m-%d"), "windows": len(model.windows)}
            record |= {"reference_perplexity": round(found.reference.perplexity, 3)}
            arguments.out.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
            return size

        weights: int = model.reference.info()["parameters"]
        for quantization in ("int8", "int4"):
            measure(quantization, format=quantization, calibrate=text)
        for quantization, sparsity in SPARSE:
            size = 0
            for method in METHODS:
                calibrate = None if method == "magnitude" else text
                options = {"format": quantization, "sparsity": sparsity, "pruning": method, "calibrate": calibrate}
                size = measure(f"{quantization}, {sparsity}, {method}", **options)
            if quantization != "bf16":
                tokens = arguments.calibration_tokens
                allocation = allocate_bits(None, 8 * size / weights, calibrate=text, calibration_tokens=tokens)
                recipe = allocation.recipe()
                measure(f"equal bytes to {quantization}, {sparsity}", recipe=recipe, calibrate=text)


if __name__ == "__main__":
    main()
