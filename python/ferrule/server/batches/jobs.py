"""`Batches`: the batches of a server and the tasks that run them, one batch at a time."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ferrule._batch import BatchInput, BatchOutput, Progress, concurrency, run_batch, sender
from ferrule._engine.workers import WORKERS
from ferrule.errors import FerruleError, InvalidParameterError
from ferrule.server.batches.files import FileStore
from ferrule.server.batches.protocol import (
    BATCH,
    BATCH_OUTPUT,
    ENDED,
    Batch,
    BatchError,
    BatchErrors,
    BatchRequest,
    RequestCounts,
)
from ferrule.server.batches.records import Records, storage_errors
from ferrule.server.batches.stages import validate, write_outputs
from ferrule.server.context import Context, ServerLoad
from ferrule.server.error_responses import api_error
from ferrule.server.errors import BAD_REQUEST, ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

LOGGER = logging.getLogger("ferrule.server")
Ending = Literal["completed", "failed", "cancelled", "expired"]
"""Status with which a batch ends."""
PRIORITY = 1 << 20
"""Scheduling priority of the requests of a batch: the engine preempts them for any other request."""
WINDOW_SECONDS = 24 * 3600
"""Time from the creation of a batch to its expiry."""
MAX_ACTIVE = 64
"""Maximum number of batches that have not ended."""
MAX_BATCHES = 1000
"""Maximum number of batches; the oldest ones that have ended are removed, but not their files."""
LOADING_CHECK = 0.1
"""Seconds between two checks whether the models are loaded."""
UNANSWERED: dict[Ending, tuple[str, str]] = {
    "expired": ("batch_expired", "the request was not run before the completion window ended"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before the request was run"),
    "failed": ("batch_failed", "the batch failed before the request was run"),
    "completed": ("batch_failed", "the request has no answer"),
}
"""Code and message of the requests without an answer, by the status with which the batch ends."""


class _FailedError(Exception):
    """A batch ends with status `failed`."""

    def __init__(self, errors: list[BatchError]) -> None:
        super().__init__(errors)
        self.errors = errors


class Batches:
    """Files and batches of a server.

    `application` makes the application that answers the requests of batches, which has no access control. The
    constructor reads the directory and locks it.

    Raises InvalidParameterError for a directory that cannot be used.
    """

    def __init__(self, server: Context, application: Callable[[Context], ASGIApp]) -> None:
        directory = Path(server.settings.files_dir or "")
        self._models = server.models
        self._max_line_bytes = server.settings.max_body_bytes
        with contextlib.ExitStack() as on_error:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = on_error.enter_context((directory / ".lock").open("wb"))
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.files = FileStore(directory / "files", server.settings)
                self.records = Records(directory / "batches", Batch, "batch_")
            except BlockingIOError:
                requirement = "a directory that no other server uses"
                raise InvalidParameterError("files_dir", str(directory), requirement) from None
            except OSError as error:
                requirement = f"a writable directory ({error.strerror})"
                raise InvalidParameterError("files_dir", str(directory), requirement) from error
            on_error.pop_all()
        settings = replace(server.settings, api_keys=(), request_timeout=None, page=False, files_dir=None)
        # The load is its own, so that batches take no place of other requests at admission.
        self._application = application(replace(server, settings=settings, load=ServerLoad(), fallback=None))
        self._turn = asyncio.Lock()
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        """Tasks that a cancelled batch ends early."""
        self._closed = False

    def start(self) -> None:
        """Continues the batches that have not ended; further calls have no effect. Needs a running event loop."""
        if self._closed or self._models.draining:
            return
        for batch in self.records.all():
            if batch.status not in ENDED and batch.id not in self._jobs:
                job = asyncio.create_task(self._run(batch), name=batch.id)
                self._jobs[batch.id] = job
                job.add_done_callback(lambda _, done=batch.id: self._jobs.pop(done, None))

    async def create(self, request: BatchRequest) -> Batch:
        """Creates a batch and starts it.

        Raises ApiError.
        """
        source = self.files.records.find(request.input_file_id)
        if source.purpose != BATCH:
            message = f"input_file_id must be a file with the purpose batch, got one with {source.purpose}"
            raise ApiError(BAD_REQUEST, message, code="invalid_value", param="input_file_id")
        active = sum(batch.status not in ENDED for batch in self.records.all())
        if active >= MAX_ACTIVE:
            message = f"at most {MAX_ACTIVE} batches may be in progress; wait for one to end, or cancel one"
            raise ApiError(BAD_REQUEST, message, code="too_many_batches")
        self.files.check_room()
        now = int(time.time())
        batch = Batch(
            id=self.records.new_id(),
            endpoint=request.endpoint,
            input_file_id=source.id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=request.metadata,
        )
        await self.records.put(batch.id, batch)
        for old in [each for each in self.records.all() if each.status in ENDED][: len(self.records) - MAX_BATCHES]:
            await self.records.remove(old.id)
        self.start()
        return batch

    async def cancel(self, batch_id: str) -> Batch:
        """Cancels a batch, which keeps the responses that it has.

        Raises ApiError for a batch that has ended.
        """
        batch = self.records.find(batch_id)
        if batch.status in ENDED or batch.status == "finalizing":
            message = f"a batch with status {batch.status} cannot be cancelled"
            raise ApiError(BAD_REQUEST, message, code="batch_ended", param="batch_id")
        if batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            await self.records.put(batch.id, batch)
            if (work := self._work.get(batch.id)) is not None:
                work.cancel()
        return batch

    def check_unused(self, file_id: str) -> None:
        """Raises ApiError for a file that a batch reads."""
        for batch in self.records.all():
            if batch.input_file_id == file_id and batch.status not in ENDED:
                message = f"the file is the input of {batch.id}, which has not ended; cancel it first"
                raise ApiError(409, message, code="file_in_use", param="file_id")

    async def aclose(self) -> None:
        """Interrupts all batches, which continue at the next start, and unlocks the directory."""
        self._closed = True
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        self._lock.close()

    async def _run(self, batch: Batch) -> None:
        """Runs a batch to its end. Cancelling leaves its state as it is."""
        ending: Ending = "completed"
        errors: list[BatchError] = []
        try:
            if batch.status != "finalizing":  # else it was interrupted after the last answer
                ending = await self._answer_in_time(batch)
        except _FailedError as failure:
            ending, errors = "failed", failure.errors
        except (ApiError, FerruleError) as error:
            if self._models.draining:  # continues at the next start
                return
            ending, errors = "failed", [_batch_error(error)]
        except Exception as error:  # a bug: the log has its place
            ending, errors = "failed", [_internal_error(error)]
        try:
            await self._finish(batch, ending, errors)
        except (ApiError, FerruleError) as error:
            await self._end(batch, "failed", [*errors, _batch_error(error)])
        except Exception as error:  # a bug
            await self._end(batch, "failed", [*errors, _internal_error(error)])

    async def _answer_in_time(self, batch: Batch) -> Ending:
        """Answers the requests of a batch until it is cancelled or expires; returns how it ends."""
        if batch.status == "cancelling":
            return "cancelled"
        work = self._work[batch.id] = asyncio.create_task(self._answer(batch))
        try:
            await asyncio.wait([work], timeout=max(batch.expires_at - time.time(), 0))
            if not work.done():
                return "expired"
            if work.cancelled():
                return "cancelled"
            work.result()
        finally:
            del self._work[batch.id]
            work.cancel()
            await asyncio.wait([work])
        return "completed"

    async def _answer(self, batch: Batch) -> None:
        source = self.files.path(self.files.records.find(batch.input_file_id))
        if batch.status == "validating":
            found = await WORKERS.run(validate, source, batch.endpoint, self._max_line_bytes)
            if found.errors:
                raise _FailedError(found.errors)
            batch.request_counts.total = found.total
        async with self._turn:
            while not self._models.ready:
                await asyncio.sleep(LOADING_CHECK)
            if batch.status == "validating":
                batch.status, batch.in_progress_at = "in_progress", int(time.time())
                await self.records.put(batch.id, batch)
            await self._send_requests(batch, source)

    async def _send_requests(self, batch: Batch, source: Path) -> None:
        """Runs the requests that have no answers yet."""
        answers = self._answers(batch)

        def notify(progress: Progress) -> None:
            done = progress.answered
            counts = RequestCounts(
                total=batch.request_counts.total, completed=done.lines - done.failed, failed=done.failed
            )
            batch.request_counts = counts
            self.files.check_bytes(answers.stat().st_size)

        with BatchInput(source) as requests, BatchOutput(answers) as output:
            await run_batch(
                sender(self._application, self._models.check_health),
                requests,
                output,
                at_once=concurrency(self._models.max_num_seqs),
                answered=await WORKERS.run(output.resume, requests),
                priority=PRIORITY,
                notify=notify,
            )

    async def _finish(self, batch: Batch, ending: Ending, errors: list[BatchError]) -> None:
        """Writes the outputs of a batch and sets its last status."""
        if ending == "completed":
            batch.status, batch.finalizing_at = "finalizing", int(time.time())
            await self.records.put(batch.id, batch)
        if ending != "failed" or batch.in_progress_at is not None:
            source = self.files.path(self.files.records.find(batch.input_file_id))
            output, rest = self.files.new_path(), self.files.new_path()
            try:
                with storage_errors():
                    batch.request_counts = await WORKERS.run(
                        write_outputs, source, self._answers(batch), output, rest, unanswered=UNANSWERED[ending]
                    )
                if output.exists():
                    batch.output_file_id = (await self.files.add(output, f"{batch.id}_output.jsonl", BATCH_OUTPUT)).id
                if rest.exists():
                    batch.error_file_id = (await self.files.add(rest, f"{batch.id}_error.jsonl", BATCH_OUTPUT)).id
            finally:
                for path in (output, rest):
                    path.unlink(missing_ok=True)
        await self._end(batch, ending, errors)

    async def _end(self, batch: Batch, ending: Ending, errors: list[BatchError]) -> None:
        batch.status = ending
        batch.errors = BatchErrors(data=errors) if errors else None
        now = int(time.time())
        match ending:
            case "completed":
                batch.completed_at = now
            case "failed":
                batch.failed_at = now
            case "cancelled":
                batch.cancelled_at = now
            case "expired":
                batch.expired_at = now
        await self.records.put(batch.id, batch)
        self._answers(batch).unlink(missing_ok=True)

    def _answers(self, batch: Batch) -> Path:
        """Returns the path of all answers of a batch in progress, in the order of its requests."""
        return self.records.folder / f"{batch.id}.answers.jsonl"


def _batch_error(error: ApiError | FerruleError) -> BatchError:
    found = error if isinstance(error, ApiError) else api_error(error)
    return BatchError(code=found.code, message=found.detail, param=found.param)


def _internal_error(error: Exception) -> BatchError:
    LOGGER.error("internal error", exc_info=error)
    return BatchError(code="internal_error", message="internal error; see the log of the server")
