"""What a protocol asks of a model, and what comes back, in no protocol's words.

Each API turns its request into a `Generation` and gets `Step`s: what is new of each completion, and in the last one
all of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from ferrule.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from ferrule.params import SamplingParams
from ferrule.parsers import MessageDelta, MessageFormat, ParsedMessage, ToolCallDelta
from ferrule.prompt import Prompt
from ferrule.server.models import Served


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
    """The state so far; where one completion alone is streamed, with the last step only."""
    new_prompt_logprobs: bool = field(default=False)
    """Whether `output` has the log-probabilities of the prompt for the first time."""


async def complete(asked: Generation) -> RequestOutput:
    """All of it, once it is there.

    Raises as `AsyncLLM.generate`.
    """
    output: RequestOutput | None = None
    async with aclosing(steps(asked)) as all_steps:
        async for step in all_steps:
            output = step.output
    if output is None or not output.finished:
        raise RuntimeError(f"the request {asked.request_id} ended without an end")
    return output


async def steps(asked: Generation) -> AsyncGenerator[Step, None]:
    """What is new, as it comes; closing it ends the request.

    Raises as `AsyncLLM.generate`.
    """
    if asked.params.n == 1 and asked.params.prompt_logprobs is None:
        async for step in _one(asked):
            yield step
    else:
        async for step in _several(asked):
            yield step


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
    knew_prompt = False
    async with aclosing(outputs):
        async for output in outputs:
            choices = [
                _since(asked, before.get(completion.index), completion)
                for completion in output.outputs
                if _is_new(before.get(completion.index), completion)
            ]
            before = {completion.index: completion for completion in output.outputs}
            knows_prompt = output.prompt_logprobs is not None and any(each.token_ids for each in output.outputs)
            yield Step(choices, output, knows_prompt and not knew_prompt)
            knew_prompt = knows_prompt


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


def _sum(message: ParsedMessage) -> MessageDelta:
    """A message as the sum of its deltas."""
    calls = [ToolCallDelta(i, call.id, call.name, call.arguments) for i, call in enumerate(message.tool_calls)]
    return MessageDelta(message.content, message.reasoning, calls)


def _kept(asked: Generation, message: MessageDelta | None) -> MessageDelta | None:
    if message is None or asked.parallel_tool_calls:
        return message
    return MessageDelta(message.content, message.reasoning, [call for call in message.tool_calls if call.index == 0])


def prompt_ids(prompt: Prompt) -> list[int]:
    """The ids of a prompt that was given as ids."""
    if isinstance(prompt, str) or "prompt_token_ids" not in prompt:
        return []
    return list(prompt["prompt_token_ids"])
