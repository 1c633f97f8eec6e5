"""The models of a server by name: each may have several names, and its adapters are names too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ferrule._api.async_llm import AsyncLLM
from ferrule._validation import shown
from ferrule.errors import EngineError
from ferrule.server.errors import ApiError


@dataclass(frozen=True, eq=False)
class ServedModel:
    """What answers to a name."""

    name: str
    llm: AsyncLLM
    models: Models
    """All of the server's."""
    adapter: str | None = None
    """The low-rank adapter that the name stands for; None for the model itself."""

    def check_loaded(self) -> None:
        """Raises ApiError for an adapter that has been unloaded since it was found."""
        if self.adapter is not None and all(each.name != self.adapter for each in self.llm.lora_adapters()):
            raise self.models.unknown(self.name)

    @cached_property
    def info(self) -> dict[str, Any]:
        """What the AsyncLLM says of itself."""
        return self.llm.info()

    def token_bytes(self, token_id: int) -> list[int] | None:
        """Of a token's text, where a token has bytes of its own."""
        found = self.llm.token_bytes(token_id)
        return None if found is None else list(found)


class Models:
    """The models by name, in order: the first answers where a request names none.

    They may come later than the server: until `ready`, requests are told to come again. Two names may stand for one
    AsyncLLM.
    """

    def __init__(self, models: Mapping[str, AsyncLLM] | None = None) -> None:
        self._models: dict[str, ServedModel] = {}
        self.created = int(time.time())
        """Seconds since 1970, for lists of models."""
        self.draining = False
        """Whether the server is about to end, and takes nothing new."""
        self.places = 0
        """Sequences that the engines run and let wait, all together."""
        if models is not None:
            self.set(models)

    @property
    def ready(self) -> bool:
        """Whether they are loaded."""
        return bool(self._models)

    def set(self, models: Mapping[str, AsyncLLM]) -> None:
        """Now they are loaded."""
        self._models = {name: ServedModel(name, llm, self) for name, llm in models.items()}
        limits = [(served.info["max_num_seqs"], served.info["max_queued_requests"]) for served in self.engines()]
        self.places = sum(running + (waiting or 0) for running, waiting in limits)

    def engines(self) -> list[ServedModel]:
        """Each AsyncLLM once, by the first of its names."""
        return list({id(served.llm): served for served in reversed(self._models.values())}.values())[::-1]

    def all(self) -> Iterable[ServedModel]:
        """All names: the models', then their adapters'."""
        yield from self._models.values()
        for served in self.engines():
            for adapter in served.llm.lora_adapters():
                if adapter.name not in self._models:
                    yield replace(served, name=adapter.name, adapter=adapter.name)

    def find(self, name: str | None) -> ServedModel:
        """What answers to a name; the first model where there is none.

        Raises ApiError.
        """
        if not self._models:
            raise ApiError(503, "the models are still being loaded", code="loading")
        if name is None:
            return next(iter(self._models.values()))
        for served in self.all():
            if served.name == name:
                return served
        raise self.unknown(name)

    def unknown(self, name: str) -> ApiError:
        """What a request is told whose model is not there."""
        known = ", ".join(served.name for served in self.all())
        message = f"model is {shown(name)}; it must be one of {known}"
        return ApiError(404, message, code="model_not_found", param="model")

    async def drain(self, timeout: float) -> None:
        """From now on nobody comes in; those inside have `timeout` seconds to end, and are aborted then."""
        self.draining = True
        await asyncio.gather(*(served.llm.drain(timeout) for served in self.engines()))

    async def check_health(self) -> None:
        """Raises ApiError where they are not there yet, are about to go, or one of them is dead."""
        if self.draining:
            raise ApiError(503, "the server is draining; it takes no new requests", code="draining")
        if not self._models:
            raise ApiError(503, "the models are still being loaded", code="loading")
        for served in self.engines():
            try:
                await served.llm.check_health()
            except EngineError as error:
                raise ApiError(503, f"{served.name}: {error}", code="engine_unavailable") from None
