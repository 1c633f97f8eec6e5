"""`Models`: the models of a server by name. A model may have several names; adapters have names too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ferrule._api.answer_defaults import shown_defaults
from ferrule._api.async_llm import AsyncLLM
from ferrule._params.sampling import SamplingParams
from ferrule._validation import shown
from ferrule.errors import EngineError
from ferrule.server.errors import ApiError


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model or an adapter under one of its names."""

    name: str
    llm: AsyncLLM
    models: Models
    """All models of the server."""
    adapter: str | None = None
    """Name of the LoRA adapter; None for the model itself."""

    def check_loaded(self) -> None:
        """Raises ApiError for an adapter that was unloaded meanwhile."""
        if self.adapter is not None and all(each.name != self.adapter for each in self.llm.lora_adapters()):
            raise self.models.unknown(self.name)

    @cached_property
    def info(self) -> dict[str, Any]:
        """The result of `AsyncLLM.info`."""
        return self.llm.info()

    @cached_property
    def answer_defaults(self) -> dict[str, Any] | None:
        """Sampling parameters of an answer for which a user sets none; None for a model of embeddings."""
        return shown_defaults(SamplingParams.with_model_defaults(), self.llm) if self.llm.generates else None

    def token_bytes(self, token_id: int) -> list[int] | None:
        """Returns the bytes of a token; None for a token without bytes."""
        found = self.llm.token_bytes(token_id)
        return None if found is None else list(found)


class Models:
    """The models by name, in order. The first serves requests that name no model.

    The server may start before its models are loaded: until `ready`, requests are answered with 503. Two names may
    refer to one AsyncLLM.
    """

    def __init__(self, models: Mapping[str, AsyncLLM] | None = None) -> None:
        self._models: dict[str, ServedModel] = {}
        self.created = int(time.time())
        """Time of creation, in seconds since 1970."""
        self.draining = False
        """Whether the server is shutting down and refuses new requests."""
        self.capacity = 0
        """Number of sequences that all engines together run and queue."""
        if models is not None:
            self.set(models)

    @property
    def ready(self) -> bool:
        """Whether the models are loaded."""
        return bool(self._models)

    def set(self, models: Mapping[str, AsyncLLM]) -> None:
        """Sets the loaded models."""
        self._models = {name: ServedModel(name, llm, self) for name, llm in models.items()}
        limits = [(served.info["max_num_seqs"], served.info["max_queued_requests"]) for served in self.engines()]
        self.capacity = sum(running + (waiting or 0) for running, waiting in limits)

    def engines(self) -> list[ServedModel]:
        """Returns each AsyncLLM once, under the first of its names."""
        return list({id(served.llm): served for served in reversed(self._models.values())}.values())[::-1]

    def all(self) -> Iterable[ServedModel]:
        """Yields all names: the models', then their adapters'."""
        yield from self._models.values()
        for served in self.engines():
            for adapter in served.llm.lora_adapters():
                if adapter.name not in self._models:
                    yield replace(served, name=adapter.name, adapter=adapter.name)

    def find(self, name: str | None) -> ServedModel:
        """Returns the model of a name; the first model for None.

        Raises ApiError.
        """
        if not self._models:
            raise ApiError(503, "the models are still loading", code="loading")
        if name is None:
            return next(iter(self._models.values()))
        for served in self.all():
            if served.name == name:
                return served
        raise self.unknown(name)

    def unknown(self, name: str) -> ApiError:
        """Returns the error for a name that no model has."""
        known = ", ".join(served.name for served in self.all())
        message = f"unknown model {shown(name)}; choose one of: {known}"
        return ApiError(404, message, code="model_not_found", param="model")

    async def drain(self, timeout: float) -> None:
        """Refuses new requests; running ones have `timeout` seconds to finish and are then aborted."""
        self.draining = True
        await asyncio.gather(*(served.llm.drain(timeout) for served in self.engines()))

    async def check_health(self) -> None:
        """Raises ApiError while the models load, while the server drains, or where an engine has failed."""
        if self.draining:
            raise ApiError(503, "the server is shutting down and accepts no new requests", code="draining")
        if not self._models:
            raise ApiError(503, "the models are still loading", code="loading")
        for served in self.engines():
            try:
                await served.llm.check_health()
            except EngineError as error:
                raise ApiError(503, f"{served.name}: {error}", code="engine_unavailable") from None
