"""Writes the golden files of grouped formats: blocks of random bits, and their weights by the `gguf` package.

    pip install gguf
    python rust/kernels/tests/grouped/make.py

A file contains three rows of 256 inputs in stored blocks, followed by their weights as f32, both row by row.
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants

ROWS, COLS = 3, 256

# Bytes of a block, its number of inputs, and the offsets of its f16 scales.
FORMATS = {
    "q4_0": (18, 32, [0]),
    "q8_0": (34, 32, [0]),
    "q4_k": (144, 256, [0, 2]),
    "q6_k": (210, 256, [208]),
    "iq4_nl": (18, 32, [0]),
    "mxfp4": (17, 32, []),
    "q4_1": (20, 32, [0, 2]),
    "q5_0": (22, 32, [0]),
    "q5_1": (24, 32, [0, 2]),
    "q5_k": (176, 256, [0, 2]),
    "q3_k": (110, 256, [108]),
    "iq4_xs": (136, 256, [0]),
    "q2_k": (84, 256, [80, 82]),
    "iq2_xxs": (66, 256, [0]),
    "iq2_xs": (74, 256, [0]),
    "iq2_s": (82, 256, [0]),
    "iq3_xxs": (98, 256, [0]),
    "iq3_s": (110, 256, [0]),
}

random = np.random.default_rng(6)
for name, (size, inputs, scales) in FORMATS.items():
    blocks = random.integers(0, 256, (ROWS * COLS // inputs, size), dtype=np.uint8)
    for at in scales:
        # Any finite number.
        exponents = random.integers(0, 31, len(blocks), dtype=np.uint8)
        blocks[:, at + 1] = (blocks[:, at + 1] & 0x83) | (exponents << 2)
    if name == "mxfp4":
        blocks[:8, 0] = [0, 1, 2, 3, 127, 128, 254, 255]
    with np.errstate(over="ignore"):
        weights = quants.dequantize(blocks, GGMLQuantizationType[name.upper()])
    Path(__file__).with_name(f"{name}.bin").write_bytes(blocks.tobytes() + weights.astype("<f4").tobytes())
