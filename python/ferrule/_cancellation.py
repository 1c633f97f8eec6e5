"""Cancellation of work in other threads: long work asks between its parts whether its result is still wanted."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from contextvars import ContextVar

cancelled: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)
"""Event that is set when nobody waits for the current work any more; None where work cannot be cancelled."""


def raise_if_cancelled() -> None:
    """Raises CancelledError if nobody waits for the result of the current work."""
    event = cancelled.get()
    if event is not None and event.is_set():
        raise CancelledError
