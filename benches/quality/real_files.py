"""Measure formats of a GGUF file beside llama.cpp's: `python real_files.py FILE --folder DIR --bits 4.25 --out RECORD`.

All formats are made of the same f32 weights, the reference (`exact_gguf.py`; `--rotate` changes their basis). Half of
the held-out text is English (every second of Python's documentation topics), half is code (`HELD_OUT` in
`divergence.py`); calibration text is from the other topics and the rest of the standard library. Windows have 512
tokens, of which the last 384 are scored. `--gguf` adds files that llama.cpp made of DIR/exact.gguf. Files that
`--folder` has already and rows that the record has are kept, so that a run can be continued.
"""

import argparse
import json
import pydoc_data.topics
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from divergence import HELD_OUT, calibration_text
from exact_gguf import write_exact

from ferrule import LLM, Comparison, allocate_bits, generate_calibration, quantize

WINDOW, CONTEXT = 512, 128
SCORED: dict[str, Any] = {"window": WINDOW, "stride": WINDOW - CONTEXT, "min_context": CONTEXT}
AT_ONCE = 3
"""Models in memory beside the reference."""


@dataclass(frozen=True)
class Variant:
    """A format to measure."""

    name: str
    bits: float | None = None
    calibration: str = "none"
    """none, generated, or text."""


def english() -> tuple[str, str]:
    """Return held-out text and text for calibration: documentation topics in turn."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    return "\n\n".join(topics[::2]), "\n\n".join(topics[1::2])


def code() -> str:
    """Return held-out code."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = [(root / name).read_text(encoding="utf-8") for name in HELD_OUT if (root / name).exists()]
    return "".join(texts)


def windows(llm: LLM, text: str, count: int, length: int = WINDOW) -> list[list[int]]:
    """Return `count` windows spread evenly over a text, each with the special tokens of a prompt."""
    first = llm.tokenize("")
    ids = llm.tokenize(text, add_special_tokens=False)
    length -= len(first)
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return [first + ids[start : start + length] for start in starts]


class Workshop:
    """Folder of the files of one model."""

    def __init__(self, source: Path, folder: Path, *, rotates: bool) -> None:
        """Write the reference unless it exists."""
        self.folder = folder
        self.exact = folder / "exact.gguf"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.exact.exists():
            write_exact(source, self.exact, rotates=rotates)

    @cached_property
    def generated(self) -> list[list[int]]:
        """Text for calibration that the model generates."""
        return generate_calibration(self.exact)

    def calibration(self, llm: LLM, tokens: int) -> list[list[int]]:
        """Return windows for calibration, of English and code in turn."""
        count = tokens // WINDOW // 2
        text = calibration_text()
        step, length = len(text) // count, 8 * WINDOW
        pieces = [windows(llm, text[index * step :][:length], 1)[0] for index in range(count)]
        return [window for pair in zip(windows(llm, english()[1], count), pieces, strict=True) for window in pair]

    def packed(self, variant: Variant, calibration: list[list[int]]) -> Path:
        """Return the directory of a variant, which is written unless it exists."""
        target = self.folder / variant.name.replace(" ", "-").replace(",", "")
        if not target.exists():
            text = self.generated if variant.calibration == "generated" else calibration
            text = None if variant.calibration == "none" else text
            recipe = None if variant.bits is None else allocate_bits(self.exact, variant.bits, calibrate=text).recipe()
            if recipe is not None:
                recipe.save(target.with_suffix(target.suffix + ".toml"))
            quantize(self.exact, target, recipe=recipe, calibrate=text)
        return target


def row(name: str, size: int, weights: int, compared: Comparison, english_tokens: int) -> dict[str, Any]:
    """Return the figures of a format."""
    kld = compared.token_kld
    figures = {
        "name": name,
        "bytes": size,
        "bits": 8 * size / weights,
        "kld": compared.kld.mean,
        "kld_error": compared.kld.error,
        "kld_english": float(kld[:english_tokens].mean()),
        "kld_code": float(kld[english_tokens:].mean()),
        "same_top": compared.same_top,
        "perplexity": compared.model.perplexity,
        "reference": compared.reference.perplexity,
    }
    return {key: round(each, 5) if isinstance(each, float) else each for key, each in figures.items()}


def variants(bits: list[float], *, calibrates: bool) -> Iterator[Variant]:
    """Yield int4 without calibration, each number of bits with generated text, and all of them with a text."""
    yield Variant("int4")
    yield from (Variant(f"--bits {each:g}, generated", each, "generated") for each in bits)
    if calibrates:
        yield Variant("int4, calibrated", None, "text")
        yield from (Variant(f"--bits {each:g}, calibrated", each, "text") for each in bits)


def main() -> None:
    """Measure the formats that the record does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the files of the formats")
    parser.add_argument("--rotate", action="store_true", help="change the basis of the weights")
    parser.add_argument("--bits", type=float, nargs="*", default=[])
    parser.add_argument("--calibration-tokens", type=int, default=0, help="also with calibration (default: without)")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="files of the same weights in other formats")
    parser.add_argument("--windows", type=int, default=54, help="windows, of which half are English")
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON object a line")
    arguments = parser.parse_args()
    work = Workshop(arguments.source, arguments.folder, rotates=arguments.rotate)
    lines: list[str] = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    found = {json.loads(line)["name"] for line in lines}
    half = arguments.windows // 2
    with ExitStack() as stack:
        reference = stack.enter_context(LLM(work.exact, quantization="f32", kv_cache_dtype="f32", max_model_len=WINDOW))
        texts = windows(reference, english()[0], half) + windows(reference, code(), half)
        tokens = arguments.calibration_tokens
        calibration = work.calibration(reference, tokens) if tokens else []
        weights = reference.info()["parameters"]
        todo: list[tuple[str, Variant | Path]] = [
            (each.name, each) for each in variants(arguments.bits, calibrates=tokens > 0)
        ]
        todo += [(file.stem, file) for file in arguments.gguf]
        todo = [(name, variant) for name, variant in todo if name not in found]
        for start in range(0, len(todo), AT_ONCE):
            begun = time.monotonic()
            names = [name for name, _ in todo[start : start + AT_ONCE]]
            files = [
                work.packed(each, calibration) if isinstance(each, Variant) else each
                for _, each in todo[start : start + AT_ONCE]
            ]
            made = time.monotonic()
            with ExitStack() as loaded:
                models = [loaded.enter_context(LLM(f, kv_cache_dtype="f32", max_model_len=WINDOW)) for f in files]
                compared = reference.compare_each(models, texts, **SCORED)
                for name, model, each in zip(names, models, compared, strict=True):
                    size = model.info()["weight_bytes"]
                    line = json.dumps(row(name, size, weights, each, len(each.token_kld) // 2))
                    print(line, flush=True)
                    with arguments.out.open("a") as out:
                        out.write(line + "\n")
            print(f"    made in {made - begun:.0f} s, measured in {time.monotonic() - made:.0f} s", flush=True)


if __name__ == "__main__":
    main()
