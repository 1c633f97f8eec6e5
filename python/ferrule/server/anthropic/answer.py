"""Responses of the Messages API, whole or as the events of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ferrule.outputs import CompletionOutput, RequestOutput
from ferrule.server.anthropic.errors import error_body
from ferrule.server.anthropic.protocol import (
    Content,
    Message,
    MessageUsage,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)
from ferrule.server.errors import ApiError
from ferrule.server.generation import Generation, finished, parsed_message, prompt_ids, stream_steps
from ferrule.server.output_parts import OutputPart, OutputParts, PartEvent, call_input
from ferrule.server.streaming import named_event

PING = named_event("ping", {"type": "ping"})
DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Type of a block's delta and name of its field, by the kind of the part."""


@dataclass
class ResponseWriter:
    """Writes the response of a generation."""

    generation: Generation
    _parts: OutputParts = field(default_factory=OutputParts)

    def full(self, output: RequestOutput) -> Message:
        """Returns the response of a finished generation."""
        completion = output.outputs[0]
        self._parts = OutputParts.of(parsed_message(self.generation, completion), None)
        reason, sequence = self._stop(completion)
        return Message(
            id=self.generation.request_id,
            model=self.generation.served.name,
            content=[_block(part) for part in self._parts.all],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=_usage(output),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of the stream."""
        begun = False
        output: RequestOutput | None = None
        async with aclosing(stream_steps(self.generation)) as all_steps:
            async for step in all_steps:
                output = step.output
                if not begun:
                    yield _event("message_start", message=self._empty())
                    begun = True
                for new in step.deltas:
                    for part_event in self._parts.add(new):
                        yield _part_events(part_event)
        output = finished(self.generation, output)
        for part_event in self._parts.end():
            yield _part_events(part_event)
        reason, sequence = self._stop(output.outputs[0])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=delta, usage=_usage(output))
        yield _event("message_stop")

    def _empty(self) -> Message:
        read = len(prompt_ids(self.generation.prompt))
        return Message(
            id=self.generation.request_id,
            model=self.generation.served.name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            # The number of cached tokens is known at the end.
            usage=MessageUsage(input_tokens=read, cache_read_input_tokens=0, output_tokens=0),
        )

    def _stop(self, completion: CompletionOutput) -> tuple[str, str | None]:
        """Returns the stop reason, and the stop sequence that was matched."""
        if completion.finish_reason == "length":
            most = self.generation.params.max_tokens
            full = most is not None and len(completion.token_ids) < most
            return "model_context_window_exceeded" if full else "max_tokens", None
        if isinstance(completion.stop_reason, str):
            return "stop_sequence", completion.stop_reason
        called = any(part.kind == "call" for part in self._parts.all)
        return "tool_use" if called else "end_turn", None


def failed(error: ApiError) -> bytes:
    """Returns the last event of a stream that failed."""
    return named_event("error", error_body(error))


def _part_events(part_event: PartEvent) -> bytes:
    """Converts an event of a part to an event of a block."""
    part = part_event.part
    match part_event.kind:
        case "start":
            empty = OutputPart(part.kind, part.index, call_id=part.call_id, name=part.name)
            return _event("content_block_start", index=part.index, content_block=_block(empty))
        case "delta":
            kind, name = DELTAS[part.kind]
            return _event("content_block_delta", index=part.index, delta={"type": kind, name: part_event.text})
        case "stop":
            return _event("content_block_stop", index=part.index)


def _block(part: OutputPart) -> Content:
    match part.kind:
        case "text":
            return TextContent(text=part.text)
        case "reasoning":
            return ThinkingContent(thinking=part.text)
        case "call":
            return ToolUseContent(id=part.call_id, name=part.name, input=call_input(part.text))


def _usage(output: RequestOutput) -> MessageUsage:
    cached = output.num_cached_tokens or 0
    return MessageUsage(
        input_tokens=output.metrics.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=output.metrics.output_tokens,
    )


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
