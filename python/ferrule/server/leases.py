"""Leases of models, which keep them loaded. The leases of a request end after the last byte of its response."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
_current: ContextVar[AsyncExitStack] = ContextVar("ferrule_leases")
"""Leases of the request that is being served."""


@asynccontextmanager
async def request_leases() -> AsyncGenerator[None, None]:
    """Ends the leases that are taken in the context with it."""
    async with AsyncExitStack() as leases:
        token = _current.set(leases)
        try:
            yield
        finally:
            _current.reset(token)


async def keep(lease: AbstractAsyncContextManager[T]) -> T:
    """Takes a lease that ends with the current request.

    Raises the errors of the lease.
    """
    return await _current.get().enter_async_context(lease)
