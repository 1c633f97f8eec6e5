"""`allocate_bits`: chooses a format for each matrix within a budget of bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from ferrule._api.calibration import TOKENS, Calibration, calibration_sequences
from ferrule._api.quantization import unpacked_files
from ferrule._api.recipe import Recipe
from ferrule._params.options import EngineOptions
from ferrule._validation import check_number
from ferrule.errors import InvalidParameterError


@dataclass(frozen=True)
class AllocatedMatrix:
    """Format of one matrix, or of some of its rows, of a `BitAllocation`."""

    tensor: str
    """Name of the tensor, without `.weight`; with the rows, as in a `Recipe`, if they are only some of the tensor's."""
    format: str
    """Format: int2, int3, int4, int5, int6, int8, or trellis2 to trellis5."""
    weights: int
    """Number of weights."""
    bytes: int
    """Bytes in this format."""
    error: float
    """Squared error of the quantized weights, relative to the squared weights, measured on a sample of the rows; with
    calibration, as the inputs of the matrix weigh it. Of an embedding or lm_head, the mean for both uses of a
    row: as an input and for a logit."""
    loss: float
    """Estimated KL divergence that its errors cause; for a model without an lm_head, the relative squared error of the
    hidden states."""


@dataclass(frozen=True)
class BitAllocation:
    """Formats of all quantized matrices of a model, with the least estimated loss for their bytes."""

    matrices: tuple[AllocatedMatrix, ...]
    """Quantized matrices in the order of the model."""
    bytes: int
    """Bytes of all matrices, with those that are not quantized."""
    weights: int
    """Number of weights in all matrices."""

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.bytes / self.weights

    def recipe(self) -> Recipe:
        """Returns the recipe with these formats, for `quantize`."""
        return Recipe({matrix.tensor: matrix.format for matrix in self.matrices})


def check_bits(
    model: str | os.PathLike[str] | None,
    bits: float,
    *,
    formats: Sequence[str] | None = None,
    revision: str | None = None,
) -> None:
    """Raises the errors of `allocate_bits` that show without reading weights, such as for bits that no formats have."""
    from ferrule import _native

    bits = check_number("bits", bits, 0, 32, above_low=True)
    files = unpacked_files(model, revision)
    _native.check_bits(files.spec_json, os.fspath(files.path), EngineOptions().to_json(), bits, _names(formats))


def _names(formats: object) -> list[str] | None:
    """Returns the names of formats.

    Raises InvalidParameterError if they are not a string or a sequence of strings.
    """
    if formats is None:
        return None
    if isinstance(formats, str):
        return [formats]
    if isinstance(formats, Sequence):
        names = cast("Sequence[object]", formats)
        strings = [name for name in names if isinstance(name, str)]
        if len(strings) == len(names):
            return strings
    raise InvalidParameterError("formats", cast("object", formats), "a sequence of names")


def allocate_bits(
    model: str | os.PathLike[str] | None,
    bits: float,
    *,
    formats: Sequence[str] | None = None,
    revision: str | None = None,
    threads: int | None = None,
    calibrate: Calibration | None = None,
    calibration_tokens: int = TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> BitAllocation:
    """Chooses a format for each matrix of a model, from trellis2 to int8, with at most `bits` per weight in total.

    `formats` names the formats to choose from; by default all: int2, int3, int4, int5, int6, int8, and trellis2 to
    trellis5. Without the trellis formats, models decode faster and quantization takes less time, with a larger loss.

    The formats minimize an estimate of the loss: the sum of the KL divergences that the errors of each matrix cause.
    The relative squared error is measured on a sample of its rows, and the divergence for an error with noise of four
    and of two bits in one class of matrices at a time, on tokens that the model predicts (linearity theorem of HIGGS,
    https://arxiv.org/abs/2411.17525, for small errors). No calibration data is needed. The rows of an embedding or
    lm_head have formats in up to 64 bands of tokens, by the probabilities that the model predicts for them.
    `progress` is called with the work done so far and in total, in bytes of weights.

    `calibrate` is that of `quantize`: with it, the tokens are from the calibration data, and the errors are those of
    calibrated matrices, as their inputs weigh them. This takes the time of a calibration in addition. Without any text,
    `generate_calibration` returns such data.

    Raises InvalidParameterError for unknown formats, for bits that they do not have, and for a packed model; and the
    errors of loading one and of reading `calibrate`.
    """
    from ferrule import _native

    bits = check_number("bits", bits, 0, 32, above_low=True)
    files = unpacked_files(model, revision)
    options = EngineOptions(threads=threads).to_json()
    sequences = None if calibrate is None else calibration_sequences(calibrate, files, calibration_tokens)
    text = _native.allocate_bits(
        files.spec_json,
        os.fspath(files.path),
        options,
        bits,
        formats=_names(formats),
        calibration=sequences,
        progress=progress,
    )
    found = json.loads(text)
    matrices = tuple(AllocatedMatrix(**matrix) for matrix in found["matrices"])
    return BitAllocation(matrices, found["bytes"], found["weights"])
