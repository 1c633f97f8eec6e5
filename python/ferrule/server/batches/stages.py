"""Work on the files of a batch, which runs in worker threads: validation of the input, and its outputs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ferrule._batch.answers import Answer, read_answer, refusal
from ferrule._batch.files import BatchInput
from ferrule._batch.requests import LineError, read_request
from ferrule._cancellation import raise_if_cancelled
from ferrule.server.batches.protocol import BatchError, RequestCounts

MAX_REQUESTS = 50_000
"""Maximum number of requests of a batch, as in OpenAI's API."""
MAX_ERRORS = 100
"""Maximum number of errors that a batch reports."""


@dataclass(frozen=True)
class Validated:
    """Result of the validation of an input file."""

    total: int
    errors: list[BatchError]


def validate(path: Path, endpoint: str, max_line_bytes: int) -> Validated:
    """Checks every line of an input file; it must have requests to one endpoint."""
    errors: list[BatchError] = []
    total = 0
    with BatchInput(path) as requests:
        for line in requests:
            raise_if_cancelled()
            total += 1
            if total > MAX_REQUESTS:
                message = f"a batch must have at most {MAX_REQUESTS} requests, got more"
                return Validated(total, [BatchError(code="too_many_requests", message=message)])
            try:
                if len(line.content or b"") > max_line_bytes:
                    message = f"line {line.number} must have at most {max_line_bytes} bytes (max_body_bytes)"
                    raise LineError("line_too_long", message)
                url, _ = read_request(line)
                if url != endpoint:
                    message = f"url must be the endpoint of the batch, {endpoint}, got {url}"
                    raise LineError("mismatched_endpoint", message)
            except LineError as error:
                errors.append(BatchError(code=error.code, message=str(error), line=line.number))
                if len(errors) == MAX_ERRORS:
                    break
    if not total:
        errors.append(BatchError(code="empty_file", message="the input file has no requests"))
    return Validated(total, errors)


def write_outputs(
    source: Path, answers: Path, output: Path, errors: Path, *, unanswered: tuple[str, str]
) -> RequestCounts:
    """Writes successful responses to `output` and all others to `errors`; empty files are removed.

    Requests without an answer get an error with the code and message `unanswered`.

    Raises OSError, InvalidParameterError.
    """
    counts = RequestCounts()
    with BatchInput(source) as requests, answers.open("a+b") as answered, _new(output) as good, _new(errors) as bad:
        answered.seek(0)
        for line in requests:
            raise_if_cancelled()
            content = answered.readline()
            if content.endswith(b"\n"):
                answer: Answer = read_answer(content, answers, counts.total + 1)
            else:  # an interrupted write has no newline
                answer = refusal(line.custom_id, *unanswered)
            counts.total += 1
            if answer.failure is None:
                counts.completed += 1
                good.write(answer.content)
            else:
                counts.failed += 1
                bad.write(answer.content)
        for file in (good, bad):
            file.flush()
            os.fsync(file.fileno())
    for path, lines in ((output, counts.completed), (errors, counts.failed)):
        if not lines:
            path.unlink()
    return counts


def _new(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
