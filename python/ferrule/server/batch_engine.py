"""`BatchEngine`: an engine behind the server's application, for files of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from ferrule._api.async_llm import AsyncLLM
from ferrule._batch import concurrency, sender
from ferrule._batch.files import MAX_LINE_BYTES
from ferrule._params.sampling import MAX_COUNT
from ferrule.server.app import create_app
from ferrule.server.models import Models
from ferrule.server.settings import ServerSettings


class BatchEngine:
    """An engine for `run_batch`, without a limit of its queue.

    `names` are the names of the model in requests. `options` are arguments of AsyncLLM.

    Raises the errors of AsyncLLM.
    """

    def __init__(self, model: str | None, names: Sequence[str], **options: Any) -> None:
        self._llm = AsyncLLM(model, max_queued_requests=MAX_COUNT, **options)
        self.at_once = concurrency(self._llm.info()["max_num_seqs"])
        """Number of requests to run at once."""
        try:
            settings = ServerSettings(
                max_body_bytes=2 * MAX_LINE_BYTES, max_concurrent_requests=self.at_once, page=False
            )
            application = create_app(Models(dict.fromkeys(names, self._llm)), settings)
        except BaseException:
            self._llm.close()
            raise
        self.send = sender(application, self._llm.check_health)
        """Sends a request to the application. Raises EngineError if the engine has failed."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._llm.aclose()
