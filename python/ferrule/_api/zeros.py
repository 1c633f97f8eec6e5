"""Zeros in the weights of dense checkpoints, and what a sparse format would save."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrule._loading.model_files import safetensors_files
from ferrule.errors import ModelFileError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DENSE_BITS = {"int8": 8.0625, "int4": 4.3125}
"""Bits per weight of dense formats."""
SPARSE = {"2:4": ("int8_2of4", "int4_2of4"), "0.5": ("int8_sparse",)}
"""Sparse formats for each `sparsity` of `quantize`; the first four letters are the dense format of the same codes."""
SECONDS = 0.5
"""Time after which no further matrix is sampled."""
NOTABLE = 0.05
"""Least share of zeros that is worth a line."""
FEW = 0.01
"""Most weights, as a share, that a sparse format may lose and still be named."""

_MAX_HEADER = 100 << 20
"""Maximum bytes of a safetensors header, the limit of the format's own library."""
_DTYPES = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}
"""Unsigned integers as wide as the floating-point numbers; zeros are those without bits below the sign."""
_IN_LAYER = re.compile(r"\.\d+\..*\.weight$")
"""Names of the weights of layers. Embeddings and lm_head are outside of them."""
_PANEL, _BLOCK, _FOUR, _LINE = 16, 128, 4, 64
"""Rows of a panel, which share the space of int8_sparse; inputs of its blocks and of 2:4; bytes of a line."""


@dataclass(frozen=True)
class Zeros:
    """Zeros in sampled rows of the matrices in the layers of a checkpoint."""

    matrices: int
    """Number of matrices, sampled or not, whose inputs are whole blocks of sparse formats."""
    weights: int
    """Number of weights of these matrices."""
    sampled: int
    """Number of weights that were read."""
    share: float
    """Share of zeros of the sampled weights."""
    two_of_four: float
    """Share of each four consecutive inputs of which two or more are zero."""
    missing: float
    """Share of the sampled weights that pruning to half would set to zero too: those that 128 consecutive inputs of a
    row have above 64 nonzero ones."""
    saves: dict[str, int]
    """Bytes that each sparse format saves, compared with the dense format of the same codes."""

    @property
    def sparsity(self) -> str | None:
        """`sparsity` of `quantize` that keeps all nonzero weights except `FEW`; None if there are too few zeros."""
        if self.two_of_four >= 1 - FEW:
            return "2:4"
        return "0.5" if self.missing <= FEW else None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, `sparsity`, and as `saves` only the formats for it."""
        sparsity = self.sparsity
        formats = () if sparsity is None else SPARSE[sparsity]
        return {**asdict(self), "sparsity": sparsity, "saves": {name: self.saves[name] for name in formats}}


class _Tensor(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, int]
    start: int
    """First byte in the file."""


def find_zeros(folder: Path) -> Zeros | None:
    """Samples the weights of the safetensors files of a model for at most about half a second.

    Of as many matrices in layers as the time allows, sixteen consecutive rows are read. None if no matrix would fit a
    sparse format.

    Raises ModelFileError if a header is invalid or a file cannot be read.
    """
    import numpy as np

    tensors = [tensor for file in safetensors_files(folder) for tensor in _matrices(file)]
    if not tensors:
        return None
    end = time.monotonic() + SECONDS
    sampled = zeros = fours = two_of_four = missing = 0
    # Strides visit all parts of the model, even if the time ends before the last matrix.
    stride = max(1, len(tensors) // 16)
    order = [index for first in range(stride) for index in range(first, len(tensors), stride)]
    for count, index in enumerate(order):
        if count >= 16 and time.monotonic() > end:
            break
        is_zero = _is_zero(tensors[index], seed=index)
        in_fours = is_zero.reshape(-1, _FOUR).sum(1)
        in_blocks = is_zero[:, : is_zero.shape[1] // _BLOCK * _BLOCK].reshape(-1, _BLOCK).sum(1)
        sampled += is_zero.size
        zeros += int(is_zero.sum())
        fours += in_fours.size
        two_of_four += int((in_fours >= _FOUR // 2).sum())
        missing += int(np.maximum(_BLOCK // 2 - in_blocks, 0).sum())
    return Zeros(
        matrices=len(tensors),
        weights=sum(rows * columns for _, _, (rows, columns), _ in tensors),
        sampled=sampled,
        share=zeros / sampled,
        two_of_four=two_of_four / fours,
        missing=missing / sampled,
        saves={name: _saved_bytes(name, tensors) for formats in SPARSE.values() for name in formats},
    )


def _saved_bytes(name: str, tensors: list[_Tensor]) -> int:
    """Returns the bytes that a sparse format saves, from the layout of its panels of sixteen rows."""
    saved = 0.0
    for _, _, (rows, columns), _ in tensors:
        if name == "int8_sparse":
            blocks = columns // _BLOCK
            # Positions, scales and bitmaps with the codes, and a line to read beyond them.
            lines = -(-blocks * 4 // _LINE) + -(-blocks * (32 + 256 + 1024) // _LINE) + 1
        else:
            units, bits = columns // (_BLOCK // 2), int(name[3])
            lines = -(-units // 2) + units * (2 + bits)
        panels = -(-rows // _PANEL)
        saved += panels * (DENSE_BITS[name[:4]] / 8 * _PANEL * columns - lines * _LINE)
    return round(saved)


def _is_zero(tensor: _Tensor, *, seed: int) -> npt.NDArray[np.bool_]:
    """Returns which weights of some sixteen consecutive rows are zero, `[rows, inputs]`."""
    import numpy as np

    rows, columns = tensor.shape
    dtype = np.dtype(_DTYPES[tensor.dtype])
    panels = -(-rows // _PANEL)
    # Multiples of a large prime are spread over the panels, and the same in each run.
    first = seed * 104_729 % panels * _PANEL
    count = min(_PANEL, rows - first) * columns
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.start + first * columns * dtype.itemsize)
            numbers = np.fromfile(file, dtype, count)
    except OSError as error:
        raise ModelFileError(f"cannot read {tensor.file}: {error}") from None
    sign = 1 << (8 * dtype.itemsize - 1)
    return (numbers & (sign - 1) == 0).reshape(-1, columns)


def _matrices(file: Path) -> Iterator[_Tensor]:
    """Yields the matrices in layers whose inputs are whole blocks (https://github.com/huggingface/safetensors#format)."""
    try:
        with file.open("rb") as opened:
            [length] = struct.unpack("<Q", opened.read(8))
            header: Any = json.loads(opened.read(min(length, _MAX_HEADER)))
            size = opened.seek(0, os.SEEK_END)
        entries = [(name, entry) for name, entry in header.items() if _IN_LAYER.search(name)]
        for name, entry in entries:
            shape, dtype, offset = entry["shape"], entry["dtype"], entry["data_offsets"][0]
            if not all(type(number) is int and number >= 0 for number in (*shape, offset)):
                raise ValueError(f"shape and offset of {name!r} must be integers >= 0, got {shape} and {offset}")
            if dtype in _DTYPES and len(shape) == 2 and shape[0] >= _PANEL and shape[1] > 0 and shape[1] % _BLOCK == 0:
                tensor = _Tensor(file, dtype, (shape[0], shape[1]), 8 + length + offset)
                if tensor.start + shape[0] * shape[1] * int(_DTYPES[dtype][-1]) > size:
                    raise ModelFileError(f"{file}: {name!r} ends after the file of {size} bytes, which is truncated")
                yield tensor
    except OSError as error:
        raise ModelFileError(f"cannot read {file}: {error}") from None
    except (ValueError, struct.error, AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ModelFileError(f"{file}: invalid safetensors header: {error!r}") from None
