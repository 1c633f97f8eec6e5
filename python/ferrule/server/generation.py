"""`Generation`: a request for text, independent of the protocol, and its execution.

Each protocol converts its request to a `Generation` and receives `StreamStep`s: the new part of each completion, and in
the last step the whole output.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from ferrule._engine.beams import BeamSearchParams
from ferrule._engine.request import USUAL_REPORTS, Reports
from ferrule._params.sampling import RequestOutputKind, SamplingParams
from ferrule._text.parsers import MessageDelta, MessageFormat, ParsedMessage, ToolCallDelta
from ferrule._text.prompt import Prompt
from ferrule.errors import InvalidParameterError
from ferrule.outputs import CompletionOutput, RequestOutput, StreamDelta, StreamStep
from ferrule.server.early_end import ABORT, EarlyEnd, EndCondition
from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.models import ServedModel
from ferrule.server.request_record import PromptRecord, RequestRecord, current_record

T = TypeVar("T")


def new_request_id(prefix: str) -> str:
    """Returns a unique id: the prefix, a hyphen and 32 hexadecimal digits."""
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass(frozen=True)
class Generation:
    """A prompt with its sampling parameters."""

    served: ServedModel
    prompt: Prompt
    params: SamplingParams
    request_id: str
    message_format: MessageFormat | None = None
    priority: int = 0
    parallel_tool_calls: bool = True
    """Whether to return more than the first tool call of a completion."""
    reports: Reports = USUAL_REPORTS
    """Optional reports of the engine."""
    beam_search: BeamSearchParams | None = None
    """Parameters of a beam search; None to sample with `params`."""
    only_calls: bool = False
    """Whether completions consist of tool calls only: text before an incomplete call is dropped."""
    end_conditions: Sequence[Callable[[], EndCondition]] = ()
    """Conditions that end the single completion early."""


async def complete(request: Generation) -> RequestOutput:
    """Runs a generation and returns its output; the engine knows that no client waits for each token.

    Raises as `AsyncLLM.generate`.
    """
    output: RequestOutput | None = None
    request = replace(request, params=request.params.clone(output_kind=RequestOutputKind.FINAL_ONLY))
    async with aclosing(stream_steps(request)) as all_steps:
        async for step in all_steps:
            output = step.output
    return finished(request, output)


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all coroutines at once and returns their results in order; a failure of one ends all.

    Raises the first exception.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def finished(request: Generation, output: RequestOutput | None) -> RequestOutput:
    """Returns the output of the last step."""
    if output is None or not output.finished:
        raise RuntimeError(f"request {request.request_id} ended without a finished output")
    return output


async def stream_steps(request: Generation) -> AsyncGenerator[StreamStep, None]:
    """Runs a generation and yields its steps; closing the generator aborts the request.

    Raises as `AsyncLLM.generate`; ApiError where the adapter was unloaded or the request was aborted, after the steps
    before.
    """
    record = current_record.get() or RequestRecord(request.request_id)
    record.model = request.served.name
    written, ended = 0, False
    steps = _steps_to_end if request.end_conditions else _engine_steps
    try:
        async with aclosing(steps(request)) as all_steps, _deadline(request, record) as overdue:
            async for step in all_steps:
                record.begun = True
                written += sum(len(choice.token_ids) for choice in step.deltas)
                if step.output.finished:
                    ended = True
                    record.prompts.append(PromptRecord.of(step.output, request.params))
                if not any(choice.finish_reason == ABORT for choice in step.deltas):
                    yield step
                    continue
                said = [choice for choice in step.deltas if choice.token_ids or choice.text]
                rest = [replace(choice, finish_reason=None) for choice in said]
                if rest:
                    yield replace(step, deltas=rest)
                raise _ended(request, overdue())
    except (asyncio.CancelledError, GeneratorExit):
        if not ended:
            record.prompts.append(PromptRecord(None, written, (ABORT,) * request.params.n, params=request.params))
        raise


async def _steps_to_end(request: Generation) -> AsyncGenerator[StreamStep, None]:
    """Yields the steps of the engine until a condition of the request ends its completion."""
    early = EarlyEnd([condition() for condition in request.end_conditions])
    async with aclosing(_engine_steps(request)) as all_steps:
        async for step in all_steps:
            ended = early.ending is not None
            yield early.apply(step)
            if early.ending is not None and not ended and not step.output.finished:
                await request.served.llm.abort(request.request_id)


async def _engine_steps(request: Generation) -> AsyncGenerator[StreamStep, None]:
    steps = _sampled_steps if request.beam_search is None else _beam_step
    async with aclosing(steps(request)) as found:
        try:
            async for step in found:
                yield step
        except InvalidParameterError:
            request.served.check_loaded()
            raise


async def _beam_step(request: Generation) -> AsyncGenerator[StreamStep, None]:
    """Runs a beam search, whose sequences all arrive in one step."""
    output = await request.served.llm.beam_search(
        request.prompt,
        cast("BeamSearchParams", request.beam_search),
        request.request_id,
        priority=request.priority,
        message_format=request.message_format,
        lora_request=request.served.adapter,
    )
    deltas = [
        StreamDelta(
            each.text,
            each.token_ids,
            None,
            message=None if each.message is None else _filtered(request, _as_delta(each.message)),
            index=each.index,
            finish_reason=each.finish_reason,
            stop_reason=each.stop_reason,
        )
        for each in output.outputs
    ]
    aborted = StreamDelta("", [], None, finish_reason=ABORT)
    yield StreamStep(deltas or [aborted], output)


async def _sampled_steps(request: Generation) -> AsyncGenerator[StreamStep, None]:
    found = request.served.llm.stream_steps(
        request.prompt,
        request.params,
        request.request_id,
        priority=request.priority,
        message_format=request.message_format,
        lora_request=request.served.adapter,
        reports=request.reports,
    )
    async with aclosing(found):
        async for step in found:
            if request.message_format is not None:
                kept = [replace(delta, message=_filtered(request, delta.message)) for delta in step.deltas]
                step = replace(step, deltas=kept)  # noqa: PLW2901
            yield step


@asynccontextmanager
async def _deadline(request: Generation, record: RequestRecord) -> AsyncGenerator[Callable[[], bool], None]:
    """Aborts the request at its deadline; the yielded function tests whether that happened."""
    left = record.remaining
    if left is None:
        yield lambda: False
        return
    aborts: list[asyncio.Task[None]] = []

    def abort() -> None:
        aborts.append(asyncio.ensure_future(request.served.llm.abort(request.request_id)))

    timer = asyncio.get_running_loop().call_later(left, abort)
    try:
        yield lambda: bool(aborts)
    finally:
        timer.cancel()


def _ended(request: Generation, overdue: bool) -> ApiError:
    if overdue:
        return ApiError(UNAVAILABLE, "the request exceeded its timeout", code="deadline_exceeded")
    if request.served.models.draining:
        return ApiError(UNAVAILABLE, "the request was aborted: the server is shutting down", code="draining")
    return ApiError(UNAVAILABLE, "the request was aborted", code="aborted")


def parsed_message(request: Generation, completion: CompletionOutput) -> ParsedMessage:
    """Returns a finished completion as a message; without a message format all text is content."""
    if completion.message is None:
        return ParsedMessage(completion.text, None, [])
    return (_filtered(request, _as_delta(completion.message)) or MessageDelta()).message()


def _as_delta(message: ParsedMessage) -> MessageDelta:
    """Returns a whole message as one delta."""
    calls = [ToolCallDelta(i, call.id, call.name, call.arguments) for i, call in enumerate(message.tool_calls)]
    return MessageDelta(message.content, message.reasoning, calls)


def _filtered(request: Generation, message: MessageDelta | None) -> MessageDelta | None:
    if message is None:
        return None
    calls = message.tool_calls
    if not request.parallel_tool_calls:
        calls = [call for call in calls if call.index == 0]
    return MessageDelta(None if request.only_calls else message.content, message.reasoning, calls)


def prompt_ids(prompt: Prompt) -> list[int]:
    """Returns the token ids of a prompt that was given as token ids; else an empty list."""
    if isinstance(prompt, str) or "prompt_token_ids" not in prompt:
        return []
    return list(prompt["prompt_token_ids"])
