"""Pruning: the arguments of `quantize` that set weights to zero."""

from __future__ import annotations

from ferrule.errors import InvalidParameterError

METHODS = ("sparsegpt", "wanda", "magnitude")
"""Methods that choose the weights to set to zero, the most accurate first."""
CALIBRATED = ("sparsegpt", "wanda")
"""Methods that need calibration data."""
FORMATS = ("bf16", "f16")
"""Formats that pruned weights can be packed in."""


def default_method(*, calibrates: bool) -> str:
    """Returns the method that is used unless another is given."""
    return "sparsegpt" if calibrates else "magnitude"


def checked_pruning(
    sparsity: float | str | None,
    pruning: str | None,
    *,
    format: str,  # noqa: A002  # that of `quantize`
    calibrates: bool,
) -> tuple[str, str] | None:
    """Returns the sparsity as text and the name of the method, None without sparsity.

    The native module checks the sparsity.

    Raises InvalidParameterError.
    """
    if sparsity is None:
        if pruning is not None:
            raise InvalidParameterError("pruning", pruning, "None without sparsity")
        return None
    if format not in FORMATS:
        raise InvalidParameterError("format", format, f"{' or '.join(FORMATS)} with sparsity")
    method = pruning or default_method(calibrates=calibrates)
    if method not in METHODS:
        raise InvalidParameterError("pruning", method, f"one of {', '.join(METHODS)}")
    if method in CALIBRATED and not calibrates:
        raise InvalidParameterError("pruning", method, "magnitude without calibrate")
    return str(sparsity), method
