"""Responses of Ollama's API, whole or as lines of a stream. A tool call is sent once it is complete."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ferrule.outputs import RequestOutput, TokenLogprobs
from ferrule.server.generation import Generation, finished, parsed_message, stream_steps
from ferrule.server.ollama.protocol import (
    ChatResponse,
    GenerateResponse,
    GenerationLine,
    ResponseMessage,
    ResponseToolCall,
    timestamp,
)
from ferrule.server.output_parts import OutputPart, OutputParts, call_input
from ferrule.server.schema.logprobs import TokenLogprob, token_logprob
from ferrule.server.streaming import line

NANOSECONDS = 1e9


@dataclass
class ResponseWriter:
    """Writes the response of a generation, for /api/chat or /api/generate."""

    generation: Generation
    chat: bool
    top_logprobs: int | None = None

    def full(self, output: RequestOutput) -> GenerationLine:
        """Returns the response of a finished generation."""
        completion = output.outputs[0]
        parts = OutputParts.of(parsed_message(self.generation, completion), None).all
        return self._body(
            text="".join(part.text for part in parts if part.kind == "text"),
            thinking="".join(part.text for part in parts if part.kind == "reasoning"),
            calls=[part for part in parts if part.kind == "call"],
            logprobs=completion.logprobs or (),
            output=output,
        )

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yields the lines of the stream."""
        parts = OutputParts()
        output: RequestOutput | None = None
        async with aclosing(stream_steps(self.generation)) as all_steps:
            async for step in all_steps:
                output = step.output
                for new in step.deltas:
                    for part_event in parts.add(new):
                        if part_event.kind == "delta" and part_event.part.kind == "text":
                            yield line(self._body(text=part_event.text, logprobs=part_event.logprobs))
                        elif part_event.kind == "delta" and part_event.part.kind == "reasoning":
                            yield line(self._body(thinking=part_event.text))
                        elif part_event.kind == "stop" and part_event.part.kind == "call":
                            yield line(self._body(calls=[part_event.part]))
        output = finished(self.generation, output)
        for part_event in parts.end():
            if part_event.part.kind == "call":
                yield line(self._body(calls=[part_event.part]))
        yield line(self._body(output=output))

    def _body(
        self,
        *,
        text: str = "",
        thinking: str = "",
        calls: Sequence[OutputPart] = (),
        logprobs: Iterable[TokenLogprobs] = (),
        output: RequestOutput | None = None,
    ) -> GenerationLine:
        fields: dict[str, Any] = {
            "model": self.generation.served.name,
            "created_at": timestamp(time.time()),
            "done": output is not None,
            "logprobs": self._logprobs(logprobs) or None,
            **({} if output is None else _ended(output)),
        }
        if not self.chat:
            return GenerateResponse(**fields, response=text, thinking=thinking or None)
        called = [ResponseToolCall(id=call.call_id, function=_function(call)) for call in calls]
        message = ResponseMessage(content=text, thinking=thinking or None, tool_calls=called or None)
        return ChatResponse(**fields, message=message)

    def _logprobs(self, given: Iterable[TokenLogprobs]) -> list[TokenLogprob]:
        return [token_logprob(self.generation.served, each, self.top_logprobs or 0) for each in given]


def load_response(name: str, reason: str, *, chat: bool) -> GenerationLine:
    """Returns the response of a request without a prompt; `reason` is `load` or `unload`."""
    now = timestamp(time.time())
    if not chat:
        return GenerateResponse(model=name, created_at=now, done=True, done_reason=reason, response="")
    return ChatResponse(model=name, created_at=now, done=True, done_reason=reason, message=ResponseMessage(content=""))


def _function(call: OutputPart) -> dict[str, Any]:
    return {"index": call.number, "name": call.name, "arguments": call_input(call.text)}


def _ended(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "done_reason": output.outputs[0].finish_reason,
        "total_duration": int(metrics.total_time * NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": metrics.prompt_tokens,
        "prompt_eval_duration": int((metrics.prefill_time or 0) * NANOSECONDS),
        "eval_count": metrics.output_tokens,
        "eval_duration": int((metrics.decode_time or 0) * NANOSECONDS),
    }
