"""What a protocol asks of a model, and what comes back, in no protocol's words.

Each API turns its request into a `Generation` and gets `Step`s: what is new of each completion, and in the last one
all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from ferrule.errors import InvalidParameterError
from ferrule.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from ferrule.params import SamplingParams
from ferrule.parsers import MessageDelta, MessageFormat, ParsedMessage, ToolCallDelta
from ferrule.prompt import Prompt
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
    states: bool = False
    """Whether each step has the output so far."""
    only_calls: bool = False
    """Whether a completion is calls and nothing else: what was cut off before it became one is dropped."""


@dataclass(frozen=True)
class ChoiceDelta:
    """What is new of a completion."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    message: MessageDelta | None
    """Where a message format was chosen."""
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class Step:
    """What is new of a request; the last step has `output.finished`."""

    choices: list[ChoiceDelta]
    output: RequestOutput | None
    """The state so far; where one completion alone is streamed, with the last step only, unless all were asked for."""


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


async def steps(asked: Generation) -> AsyncGenerator[Step, None]:
    """What is new, as it comes; closing it ends the request.

    Raises as `AsyncLLM.generate`; ApiError where the adapter has gone meanwhile, or the request was ended from outside,
    after what came until then.
    """
    record = current.get() or Record(asked.request_id)
    record.model = asked.served.name
    several = asked.params.n > 1 or asked.params.prompt_logprobs is not None or asked.states
    written, ended = 0, False
    try:
        async with aclosing(_there(asked, several)) as all_steps, _deadline(asked, record) as overdue:
            async for step in all_steps:
                written += sum(len(choice.token_ids) for choice in step.choices)
                if step.output is not None and step.output.finished:
                    ended = True
                    record.counted.append(Counted.of(step.output))
                if not any(choice.finish_reason == ABORT for choice in step.choices):
                    yield step
                    continue
                said = [choice for choice in step.choices if choice.token_ids or choice.text]
                rest = [replace(choice, finish_reason=None) for choice in said]
                if rest:
                    yield replace(step, choices=rest)
                raise _ended(asked, overdue())
    except (asyncio.CancelledError, GeneratorExit):
        if not ended:
            record.counted.append(Counted(None, written, (ABORT,) * asked.params.n))
        raise


async def _there(asked: Generation, several: bool) -> AsyncGenerator[Step, None]:
    async with aclosing(_several(asked) if several else _one(asked)) as all_steps:
        try:
            async for step in all_steps:
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


async def _one(asked: Generation) -> AsyncGenerator[Step, None]:
    deltas = asked.served.llm.stream(
        asked.prompt,
        asked.params,
        asked.request_id,
        priority=asked.priority,
        message_format=asked.message_format,
        lora_request=asked.served.adapter,
    )
    async with aclosing(deltas):
        async for delta in deltas:
            completion = None if delta.output is None else delta.output.outputs[0]
            choice = ChoiceDelta(
                0,
                delta.text,
                delta.token_ids,
                delta.logprobs,
                _kept(asked, delta.message),
                None if completion is None else completion.finish_reason,
                None if completion is None else completion.stop_reason,
            )
            yield Step([choice], delta.output)


async def _several(asked: Generation) -> AsyncGenerator[Step, None]:
    outputs = asked.served.llm.generate(
        asked.prompt,
        asked.params,
        asked.request_id,
        priority=asked.priority,
        message_format=asked.message_format,
        lora_request=asked.served.adapter,
    )
    before: Mapping[int, CompletionOutput] = {}
    async with aclosing(outputs):
        async for output in outputs:
            choices = [
                _since(asked, before.get(completion.index), completion)
                for completion in output.outputs
                if _is_new(before.get(completion.index), completion)
            ]
            before = {completion.index: completion for completion in output.outputs}
            yield Step(choices, output)


def _is_new(before: CompletionOutput | None, now: CompletionOutput) -> bool:
    if before is None:
        return bool(now.token_ids) or now.finish_reason is not None
    return len(now.token_ids) > len(before.token_ids) or (now.finish_reason != before.finish_reason)


def _since(asked: Generation, before: CompletionOutput | None, now: CompletionOutput) -> ChoiceDelta:
    start = 0 if before is None else len(before.token_ids)
    message = None
    if now.message is not None:
        earlier = MessageDelta() if before is None or before.message is None else _sum(before.message)
        message = _sum(now.message).since(earlier)
    return ChoiceDelta(
        now.index,
        now.text[0 if before is None else len(before.text) :],
        now.token_ids[start:],
        None if now.logprobs is None else now.logprobs[start:],
        _kept(asked, message),
        now.finish_reason,
        now.stop_reason,
    )


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
