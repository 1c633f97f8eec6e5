"""Connection of a command to a Ray cluster."""

from __future__ import annotations

import logging
from typing import Any, cast

import ray

from ferrule.errors import InvalidParameterError


def connect(address: str) -> None:
    """Connects this process to the cluster at an address.

    Raises InvalidParameterError.
    """
    if address.startswith("ray://"):
        advice = "HOST:PORT of the head node, auto, or local (`ray job submit` runs the command in a remote cluster)"
        raise InvalidParameterError("ray", address, advice)
    try:
        cast("Any", ray).init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        requirement = f"the address of a Ray cluster ({error})"
        raise InvalidParameterError("ray", address, requirement) from error
