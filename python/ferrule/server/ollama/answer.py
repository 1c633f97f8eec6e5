"""What is said of a generation: whole, or as the lines of a stream. A call of a tool comes when it is whole."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ferrule.outputs import RequestOutput, TokenLogprobs
from ferrule.server.generation import Generation, finished, message_of, steps
from ferrule.server.ollama.protocol import (
    CallOut,
    ChatResponse,
    Generated,
    GenerateResponse,
    MessageOut,
    timestamp,
)
from ferrule.server.openai.protocol import TokenLogprob
from ferrule.server.openai.shapes import token_logprob
from ferrule.server.parts import Part, Parts, call_input
from ferrule.server.streaming import line

NANOSECONDS = 1e9


@dataclass
class Answer:
    """The answer of a route: of a conversation, or of a text."""

    generation: Generation
    chat: bool
    top_logprobs: int | None = None

    def whole(self, output: RequestOutput) -> Generated:
        """The answer at once."""
        completion = output.outputs[0]
        parts = Parts.of(message_of(self.generation, completion), None).all
        return self._body(
            text="".join(part.text for part in parts if part.kind == "text"),
            thinking="".join(part.text for part in parts if part.kind == "reasoning"),
            calls=[part for part in parts if part.kind == "call"],
            logprobs=completion.logprobs or (),
            output=output,
        )

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        parts = Parts()
        output: RequestOutput | None = None
        async with aclosing(steps(self.generation)) as all_steps:
            async for step in all_steps:
                output = step.output
                for new in step.deltas:
                    for happened in parts.add(new):
                        if happened.what == "grown" and happened.part.kind == "text":
                            yield line(self._body(text=happened.text, logprobs=happened.logprobs))
                        elif happened.what == "grown" and happened.part.kind == "reasoning":
                            yield line(self._body(thinking=happened.text))
                        elif happened.what == "closed" and happened.part.kind == "call":
                            yield line(self._body(calls=[happened.part]))
        output = finished(self.generation, output)
        for happened in parts.end():
            if happened.part.kind == "call":
                yield line(self._body(calls=[happened.part]))
        yield line(self._body(output=output))

    def _body(
        self,
        *,
        text: str = "",
        thinking: str = "",
        calls: Sequence[Part] = (),
        logprobs: Iterable[TokenLogprobs] = (),
        output: RequestOutput | None = None,
    ) -> Generated:
        fields: dict[str, Any] = {
            "model": self.generation.served.name,
            "created_at": timestamp(time.time()),
            "done": output is not None,
            "logprobs": self._logprobs(logprobs) or None,
            **({} if output is None else _ended(output)),
        }
        if not self.chat:
            return GenerateResponse(**fields, response=text, thinking=thinking or None)
        called = [CallOut(id=call.call_id, function=_function(call)) for call in calls]
        message = MessageOut(content=text, thinking=thinking or None, tool_calls=called or None)
        return ChatResponse(**fields, message=message)

    def _logprobs(self, given: Iterable[TokenLogprobs]) -> list[TokenLogprob]:
        return [token_logprob(self.generation.served, each, self.top_logprobs or 0) for each in given]


def loaded(name: str, *, chat: bool) -> Generated:
    """What is said to whoever asks for nothing but that the model be loaded."""
    now = timestamp(time.time())
    if not chat:
        return GenerateResponse(model=name, created_at=now, done=True, done_reason="load", response="")
    return ChatResponse(model=name, created_at=now, done=True, done_reason="load", message=MessageOut(content=""))


def _function(call: Part) -> dict[str, Any]:
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
