"""Measure ferrule's own quantizations on the embedded model: `python measure.py --windows 128 --out record.json`.

The study predicts their loss in NumPy; this script measures the loss of the kernels against the same model in f32. Each
window is a separate text, and its second half is scored, as in the study. With `--calibrate`, int4 is also measured
with calibration on 65,536 tokens of the rest of the standard library. GGUF files of the model, quantized by llama.cpp
(`python -m adapters.gguf_file` in `benches/peers`), are measured twice: dequantized, which shows the loss of the format
alone, and on ferrule's kernels.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from divergence import FIRST, WINDOW, calibration_text, held_out_windows

import ferrule
from ferrule import LLM, Comparison, quantize

TINY = Path(ferrule.__file__).parent / "models" / "tiny"
QUANTIZATIONS = ("int8", "int4")


def row(comparison: Comparison) -> dict[str, float]:
    """Return the figures of a measurement that a record stores."""
    return {
        "kld": round(comparison.kld.mean, 6),
        "kld_error": round(comparison.kld.error, 6),
        "perplexity": round(comparison.model.perplexity, 3),
        "same_top": round(comparison.same_top, 4),
    }


def calibrated(model: Path | None, folder: Path) -> tuple[Path, float]:
    """Quantize the model to int4 with calibration text that is not held out; return it and the seconds taken."""
    text = folder / "text"
    text.write_text(calibration_text())
    start = time.monotonic()
    return quantize(model, folder / "int4", format="int4", calibrate=text), time.monotonic() - start


def main() -> None:
    """Load each quantization in turn, printing rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=128, help="windows of 256 tokens (all there are: 701)")
    parser.add_argument("--out", type=Path, required=True, help="JSON record")
    parser.add_argument("--calibrate", action="store_true", help="also int4 by what text shows")
    parser.add_argument("--model", type=Path, help="another model with the embedded one's vocabulary")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="files of the same model")
    arguments = parser.parse_args()
    windows = held_out_windows(TINY / "tokenizer.json", arguments.windows).tolist()
    # The token at FIRST is not scored: the study's first row of logits is the one after it.
    scored: dict[str, Any] = {"window": WINDOW, "stride": WINDOW - FIRST - 1, "min_context": FIRST + 1}
    rows: list[dict[str, object]] = []
    with LLM(arguments.model, quantization="f32") as reference:
        record: dict[str, object] = {
            "date": time.strftime("%Y-%m-%d"),
            "isa": reference.info()["isa"],
            "windows": len(windows),
            "tokens": len(windows) * WINDOW,
            "reference_perplexity": None,
            "quantizations": rows,
        }

        def measure(name: str, llm: LLM, **further: float) -> None:
            comparison = llm.compare(reference, windows, **scored)
            record["reference_perplexity"] = round(comparison.reference.perplexity, 3)
            of_weights: dict[str, object] = {"name": name, "weight_bytes": llm.info()["weight_bytes"]}
            rows.append(of_weights | row(comparison) | further)
            print(json.dumps(rows[-1]), flush=True)
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")

        for quantization in QUANTIZATIONS:
            with LLM(arguments.model, quantization=quantization, kv_cache_dtype="f32") as llm:
                measure(quantization, llm)
        if arguments.calibrate:
            with tempfile.TemporaryDirectory() as folder:
                model, seconds = calibrated(arguments.model, Path(folder))
                with LLM(model, kv_cache_dtype="f32") as llm:
                    measure("int4, calibrated", llm, seconds=round(seconds, 1))
        for file in arguments.gguf:
            for name, quantization in {file.stem: "f32", f"{file.stem}, on our kernels": "auto"}.items():
                with LLM(file, quantization=quantization, kv_cache_dtype="f32") as llm:
                    measure(name, llm, file_bytes=file.stat().st_size)


if __name__ == "__main__":
    main()
