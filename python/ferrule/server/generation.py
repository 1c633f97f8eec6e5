"""What a protocol asks of a model, and what comes back, in no protocol's words.

Each API turns its request into a `Generation` and gets `StreamStep`s: what is new of each completion, and in the last
one all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from ferrule._params.sampling import SamplingParams
from ferrule._text.parsers import MessageDelta, MessageFormat, ParsedMessage, ToolCallDelta
from ferrule._text.prompt import Prompt
from ferrule.errors import InvalidParameterError
from ferrule.outputs import CompletionOutput, RequestOutput, StreamStep
from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.models import Served
from ferrule.server.record import Counted, Record, current

ABORT = "abort"
"""The finish_reason of what was ended from outside."""


@dataclass(frozen=True)
class Generation:
    """A prompt to continue."""

    served: Served
    prompt: Prompt
    params: SamplingParams
    request_id: str
    message_format: MessageFormat | None = None
    priority: int = 0
    parallel_tool_calls: bool = True
    """Whether more than the first call of a completion is passed on."""
    only_calls: bool = False
    """Whether a completion is calls and nothing else: what was cut off before it became one is dropped."""


async def complete(asked: Generation) -> RequestOutput:
    """All of it, once it is there.

    Raises as `AsyncLLM.generate`.
    """
    output: RequestOutput | None = None
    async with aclosing(steps(asked)) as all_steps:
        async for step in all_steps:
            output = step.output
    return finished(asked, output)


def finished(asked: Generation, output: RequestOutput | None) -> RequestOutput:
    """What the last step had."""
    if output is None or not output.finished:
        raise RuntimeError(f"the request {asked.request_id} ended without an end")
    return output


async def steps(asked: Generation) -> AsyncGenerator[StreamStep, None]:
    """What is new, as it comes; closing it ends the request.

    Raises as `AsyncLLM.generate`; ApiError where the adapter has gone meanwhile, or the request was ended from outside,
    after what came until then.
    """
    record = current.get() or Record(asked.request_id)
    record.model = asked.served.name
    written, ended = 0, False
    try:
        async with aclosing(_there(asked)) as all_steps, _deadline(asked, record) as overdue:
            async for step in all_steps:
                written += sum(len(choice.token_ids) for choice in step.deltas)
                if step.output.finished:
                    ended = True
                    record.counted.append(Counted.of(step.output))
                if not any(choice.finish_reason == ABORT for choice in step.deltas):
                    yield step
                    continue
                said = [choice for choice in step.deltas if choice.token_ids or choice.text]
                rest = [replace(choice, finish_reason=None) for choice in said]
                if rest:
                    yield replace(step, deltas=rest)
                raise _ended(asked, overdue())
    except (asyncio.CancelledError, GeneratorExit):
        if not ended:
            record.counted.append(Counted(None, written, (ABORT,) * asked.params.n))
        raise


async def _there(asked: Generation) -> AsyncGenerator[StreamStep, None]:
    found = asked.served.llm.stream_steps(
        asked.prompt,
        asked.params,
        asked.request_id,
        priority=asked.priority,
        message_format=asked.message_format,
        lora_request=asked.served.adapter,
    )
    async with aclosing(found):
        try:
            async for step in found:
                if asked.message_format is not None:
                    kept = [replace(delta, message=_kept(asked, delta.message)) for delta in step.deltas]
                    step = replace(step, deltas=kept)  # noqa: PLW2901
                yield step
        except InvalidParameterError:
            asked.served.check_there()
            raise


@asynccontextmanager
async def _deadline(asked: Generation, record: Record) -> AsyncGenerator[Callable[[], bool], None]:
    """Ends the request when its time is over; what it yields says whether that happened."""
    left = record.left
    if left is None:
        yield lambda: False
        return
    aborts: list[asyncio.Task[None]] = []

    def abort() -> None:
        aborts.append(asyncio.ensure_future(asked.served.llm.abort(asked.request_id)))

    timer = asyncio.get_running_loop().call_later(left, abort)
    try:
        yield lambda: bool(aborts)
    finally:
        timer.cancel()


def _ended(asked: Generation, overdue: bool) -> ApiError:
    if overdue:
        return ApiError(UNAVAILABLE, "the request was ended: its time is over", code="deadline_exceeded")
    if asked.served.models.draining:
        return ApiError(UNAVAILABLE, "the request was ended: the server shuts down", code="draining")
    return ApiError(UNAVAILABLE, "the request was ended: it was aborted", code="aborted")


def message_of(asked: Generation, completion: CompletionOutput) -> ParsedMessage:
    """A whole completion as a message: told apart where a message format was chosen, else all of it content."""
    if completion.message is None:
        return ParsedMessage(completion.text, None, [])
    return (_kept(asked, _sum(completion.message)) or MessageDelta()).message()


def _sum(message: ParsedMessage) -> MessageDelta:
    """A message as the sum of its deltas."""
    calls = [ToolCallDelta(i, call.id, call.name, call.arguments) for i, call in enumerate(message.tool_calls)]
    return MessageDelta(message.content, message.reasoning, calls)


def _kept(asked: Generation, message: MessageDelta | None) -> MessageDelta | None:
    if message is None:
        return None
    calls = message.tool_calls
    if not asked.parallel_tool_calls:
        calls = [call for call in calls if call.index == 0]
    return MessageDelta(None if asked.only_calls else message.content, message.reasoning, calls)


def prompt_ids(prompt: Prompt) -> list[int]:
    """The ids of a prompt that was given as ids."""
    if isinstance(prompt, str) or "prompt_token_ids" not in prompt:
        return []
    return list(prompt["prompt_token_ids"])
