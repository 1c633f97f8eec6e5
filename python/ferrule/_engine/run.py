"""Runs requests on a driver until they end, and releases their pages in any case."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrule._engine.driver import Driver, Inbox
from ferrule._engine.request import Completion, Request
from ferrule.outputs import StreamDelta

if TYPE_CHECKING:
    from ferrule._native import StepOutput


@dataclass(frozen=True)
class Progress:
    """Output of one completion in a step."""

    request: Request
    completion: Completion
    delta: StreamDelta
    step: StepOutput


def run(
    driver: Driver,
    requests: Sequence[Request],
    trace: int | None = None,
    *,
    streams: bool = True,
    prefilled: Callable[[int, int], None] | None = None,
) -> Generator[Progress, None, None]:
    """Adds requests and yields their output until all have ended; closing the generator aborts them.

    `trace` is the number of candidates to report for each token. `streams` says whether a reader waits for each token.
    `prefilled` is called with the number of computed prompt tokens and their total number, after each prefill chunk but
    the last, if the request reports `prompt_progress`.

    Raises PromptError, InvalidParameterError, EngineError, KeyboardInterrupt.
    """
    pairs = [(request, completion) for request in requests for completion in request.completions]
    work = [each for request in requests for each in request.work(trace, streams=streams)]
    inbox = Inbox()
    try:
        driver.submit(inbox, work)
        running = dict(zip(inbox.request_ids, pairs, strict=True))
        while running:
            for step in driver.receive(inbox):
                if step.request_id not in running:  # ended by a stop string in an earlier step
                    continue
                request, completion = running[step.request_id]
                completion.receive(step)
                delta = completion.add(step)
                if completion.finish_reason is not None:
                    del running[step.request_id]
                    if step.finish_reason is None:
                        driver.abort(step.request_id)
                if prefilled is not None and not completion.token_ids and not request.finished:
                    prefilled(request.progress().metrics.processed_tokens, len(request.prompt.token_ids))
                yield Progress(request, completion, delta, step)
    finally:
        driver.release(inbox)
