"""What a protocol asks of a model, and what comes back, in no protocol's words.

Each API turns its request into a `Generation` and gets `StreamStep`s: what is new of each completion, and in the last
one all of it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from ferrule._params.sampling import SamplingParams
from ferrule._text.parsers import MessageDelta, MessageFormat, ParsedMessage, ToolCallDelta
from ferrule._text.prompt import Prompt
from ferrule.errors import InvalidParameterError
from ferrule.outputs import CompletionOutput, RequestOutput, StreamStep
from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.models import ServedModel
from ferrule.server.request_record import PromptRecord, RequestRecord, current_record

ABORT = "abort"
"""The finish_reason of what was ended from outside."""


def new_request_id(prefix: str) -> str:
    """Returns a unique id: the prefix, a hyphen and 32 hexadecimal digits."""
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass(frozen=True)
class Generation:
    """A prompt to continue."""

    served: ServedModel
    prompt: Prompt
    params: SamplingParams
    request_id: str
    message_format: MessageFormat | None = None
    priority: int = 0
    parallel_tool_calls: bool = True
    """Whether more than the first call of a completion is passed on."""
    only_calls: bool = False
    """Whether a completion is calls and nothing else: what was cut off before it became one is dropped."""


async def complete(request: Generation) -> RequestOutput:
    """All of it, once it is there.

    Raises as `AsyncLLM.generate`.
    """
    output: RequestOutput | None = None
    async with aclosing(stream_steps(request)) as all_steps:
        async for step in all_steps:
            output = step.output
    return finished(request, output)


def finished(request: Generation, output: RequestOutput | None) -> RequestOutput:
    """What the last step had."""
    if output is None or not output.finished:
        raise RuntimeError(f"the request {request.request_id} ended without an end")
    return output


async def stream_steps(request: Generation) -> AsyncGenerator[StreamStep, None]:
    """What is new, as it comes; closing it ends the request.

    Raises as `AsyncLLM.generate`; ApiError where the adapter has gone meanwhile, or the request was ended from outside,
    after what came until then.
    """
    record = current_record.get() or RequestRecord(request.request_id)
    record.model = request.served.name
    written, ended = 0, False
    try:
        async with aclosing(_engine_steps(request)) as all_steps, _deadline(request, record) as overdue:
            async for step in all_steps:
                written += sum(len(choice.token_ids) for choice in step.deltas)
                if step.output.finished:
                    ended = True
                    record.prompts.append(PromptRecord.of(step.output))
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
            record.prompts.append(PromptRecord(None, written, (ABORT,) * request.params.n))
        raise


async def _engine_steps(request: Generation) -> AsyncGenerator[StreamStep, None]:
    found = request.served.llm.stream_steps(
        request.prompt,
        request.params,
        request.request_id,
        priority=request.priority,
        message_format=request.message_format,
        lora_request=request.served.adapter,
    )
    async with aclosing(found):
        try:
            async for step in found:
                if request.message_format is not None:
                    kept = [replace(delta, message=_filtered(request, delta.message)) for delta in step.deltas]
                    step = replace(step, deltas=kept)  # noqa: PLW2901
                yield step
        except InvalidParameterError:
            request.served.check_loaded()
            raise


@asynccontextmanager
async def _deadline(request: Generation, record: RequestRecord) -> AsyncGenerator[Callable[[], bool], None]:
    """Ends the request when its time is over; what it yields says whether that happened."""
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
        return ApiError(UNAVAILABLE, "the request was ended: its time is over", code="deadline_exceeded")
    if request.served.models.draining:
        return ApiError(UNAVAILABLE, "the request was ended: the server shuts down", code="draining")
    return ApiError(UNAVAILABLE, "the request was ended: it was aborted", code="aborted")


def parsed_message(request: Generation, completion: CompletionOutput) -> ParsedMessage:
    """A whole completion as a message: told apart where a message format was chosen, else all of it content."""
    if completion.message is None:
        return ParsedMessage(completion.text, None, [])
    return (_filtered(request, _as_delta(completion.message)) or MessageDelta()).message()


def _as_delta(message: ParsedMessage) -> MessageDelta:
    """A message as the sum of its deltas."""
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
    """The ids of a prompt that was given as ids."""
    if isinstance(prompt, str) or "prompt_token_ids" not in prompt:
        return []
    return list(prompt["prompt_token_ids"])
