"""Pruning: the arguments of `quantize` that set weights to zero."""

from __future__ import annotations

from ferrule.errors import InvalidParameterError

METHODS = ("sparsegpt", "wanda", "magnitude")
"""Methods that choose the weights to set to zero, the most accurate first."""
CALIBRATED = ("sparsegpt", "wanda")
"""Methods that need calibration data."""
TWO_OF_FOUR = "2:4"
"""Two zeros in each four consecutive inputs."""
LEAST, HALF, MOST = 0.05, 0.5, 0.95
"""Least share of zeros, least in int8, whose sparse format stores half of the weights, and most."""


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

    Raises InvalidParameterError.
    """
    if sparsity is None:
        if pruning is not None:
            raise InvalidParameterError("pruning", pruning, "None without sparsity")
        return None
    share = _share(sparsity)
    if share is not None and format == "int4":
        raise InvalidParameterError("sparsity", sparsity, f"{TWO_OF_FOUR} with int4, which has no other sparse format")
    if share is not None and share < HALF and format == "int8":
        requirement = f"{TWO_OF_FOUR} or >= 0.5 with int8, whose sparse format stores half of the weights"
        raise InvalidParameterError("sparsity", sparsity, requirement)
    method = pruning or default_method(calibrates=calibrates)
    if method not in METHODS:
        raise InvalidParameterError("pruning", method, f"one of {', '.join(METHODS)}")
    if method in CALIBRATED and not calibrates:
        raise InvalidParameterError("pruning", method, "magnitude without calibrate")
    return TWO_OF_FOUR if share is None else str(share), method


def _share(sparsity: float | str) -> float | None:
    """Returns the share of zeros, None for 2:4. Raises InvalidParameterError."""
    if sparsity == TWO_OF_FOUR:
        return None
    try:
        share = float(sparsity)
    except (TypeError, ValueError, OverflowError):
        share = 0.0
    if not LEAST <= share <= MOST:
        raise InvalidParameterError("sparsity", sparsity, f"{TWO_OF_FOUR} or a share of zeros from {LEAST} to {MOST}")
    return share
