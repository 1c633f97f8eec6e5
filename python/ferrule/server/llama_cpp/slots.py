"""GET /slots: how many sequences run, in llama.cpp's form.

A slot of llama.cpp is a sequence with its own KV cache, which requests choose and clients save. Here any sequence
may use any page, and the prefix cache finds prompts by their tokens: the slots in use are always the first ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from ferrule.server.context import Context
from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.llama_cpp.errors import NOT_IMPLEMENTED
from ferrule.server.llama_cpp.protocol import Slot


def router(server: Context) -> APIRouter:
    """Creates the routes."""
    routes = APIRouter()

    @routes.get("/slots")
    async def slots(model: str | None = None, fail_on_no_slot: bool = False) -> list[Slot]:
        """Describes the sequences of a model; with `fail_on_no_slot`, 503 where all are in use.

        A model that is not loaded has none.
        """
        if not server.settings.slots:
            raise ApiError(NOT_IMPLEMENTED, "the server was started with --no-slots", code="not_supported")
        entry = server.models.find(model).entry
        if entry.llm is None or entry.info is None:
            return []
        return slots_of(entry.info, entry.llm.metrics().running, free=fail_on_no_slot)

    @routes.post("/slots/{slot}", include_in_schema=False)  # always an error
    async def change_slot(slot: int, action: str) -> None:
        """Refuses llama.cpp's actions `save`, `restore` and `erase`."""
        message = f"{action} is not supported for slot {slot}: the prefix cache finds prompts by their tokens, see "
        raise ApiError(NOT_IMPLEMENTED, f"{message}--prefix-cache-dir", code="not_supported", param="action")

    return routes


def slots_of(info: Mapping[str, Any], running: int, *, free: bool) -> list[Slot]:
    """Returns the sequences of an engine with this `info`, of which the first ones are `running`.

    Raises ApiError if one must be `free` and all are in use.
    """
    count: int = info["max_num_seqs"]
    if free and running >= count:
        raise ApiError(UNAVAILABLE, f"all {count} sequences are in use", code="no_slot")
    speculative = info["speculative_config"] is not None
    return [
        Slot(id=index, n_ctx=info["max_model_len"], speculative=speculative, is_processing=index < running)
        for index in range(count)
    ]
