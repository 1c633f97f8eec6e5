"""Responses of the Responses API, whole or as typed, numbered events of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ferrule.outputs import RequestOutput, TokenLogprobs
from ferrule.server.errors import ApiError
from ferrule.server.generation import Generation, finished, parsed_message, stream_steps
from ferrule.server.output_parts import OutputPart, OutputParts, PartEvent, custom_input
from ferrule.server.responses.carried_reasoning import wrap_reasoning
from ferrule.server.responses.protocol import (
    ENCRYPTED_REASONING,
    CustomTool,
    InputDetails,
    OutputCall,
    OutputCustomCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputText,
    ResponseBody,
    ResponseFailure,
    ResponsesRequest,
    ResponseStatus,
    ResponseUsage,
    Status,
    ToolChoice,
)
from ferrule.server.schema.logprobs import TokenLogprob, token_logprob
from ferrule.server.schema.timings import ProgressReporter, Timings, prompt_progress, timings
from ferrule.server.streaming import named_event

LENGTH = "length"
"""The finish reason of an output that reached its token limit."""
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
"""Prefix of an item's id, by the kind of the part."""
CUSTOM_PREFIX = "ctc"
"""Prefix of the id of a call of a custom tool."""


@dataclass
class ResponseWriter:
    """Writes the response of a generation."""

    request: ResponsesRequest
    generation: Generation
    created: int = field(default_factory=lambda: int(time.time()))
    ended: ResponseBody | None = None
    """The response that the last event of a stream reports; None before it."""
    _parts: OutputParts = field(default_factory=OutputParts)
    _timings: Timings | None = None
    """Timings so far, where the request asks for them."""
    _number: int = 0
    """Sequence number of the next event."""

    def full(self, output: RequestOutput) -> ResponseBody:
        """Returns the response of a finished generation."""
        completion = output.outputs[0]
        self._parts = OutputParts.of(parsed_message(self.generation, completion), completion.logprobs)
        return self._ended(output)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of the stream."""
        begun = False
        progress = ProgressReporter(asked=self.generation.reports.prompt_progress)
        output: RequestOutput | None = None
        async with aclosing(stream_steps(self.generation)) as all_steps:
            async for step in all_steps:
                output = step.output
                if not begun:
                    # Not earlier: an invalid request is answered with its HTTP status.
                    yield self._event("response.created", response=self._body("in_progress"))
                    yield self._event("response.in_progress", response=self._body("in_progress"))
                    begun = True
                for state in progress.new(output):
                    self._measure(state)
                    body = self._body("in_progress")
                    fields = {"prompt_progress": prompt_progress(state), **self._timed()}
                    yield self._event("response.in_progress", response=body, **fields)
                self._measure(output)
                for new in step.deltas:
                    for part_event in self._parts.add(new):
                        for each in self._part_events(part_event, "completed"):
                            yield each
        body = self._ended(finished(self.generation, output))
        for part_event in self._parts.end():
            for each in self._part_events(part_event, "completed" if body.status == "completed" else "incomplete"):
                yield each
        yield self._end(body)

    def progress(self) -> ResponseBody:
        """Returns the response as far as it is generated."""
        return self.ended or self._body("in_progress" if self._number else "queued")

    def failed(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that failed."""
        body = self._body("failed", "incomplete")
        body.error = ResponseFailure(code=error.code, message=error.detail)
        return self._end(body)

    def cancelled(self) -> bytes:
        """Returns the last event of a stream that was cancelled."""
        return self._end(self._body("cancelled", "incomplete"))

    def _end(self, body: ResponseBody) -> bytes:
        self.ended = body
        return self._event(f"response.{body.status}", response=body, **self._timed())

    def _ended(self, output: RequestOutput) -> ResponseBody:
        self._measure(output)
        cut_off = output.outputs[0].finish_reason == LENGTH
        body = self._body(*(("incomplete", "incomplete") if cut_off else ("completed", "completed")))
        body.incomplete_details = {"reason": "max_output_tokens"} if cut_off else None
        body.completed_at = None if cut_off else int(time.time())
        body.usage = self._usage(output)
        body.timings = self._timings
        return body

    def _measure(self, output: RequestOutput) -> None:
        self._timings = timings(output) if self.request.timings_per_token else None

    def _timed(self) -> dict[str, Timings]:
        """Returns the field with the timings so far, where the request asks for them."""
        return {} if self._timings is None else {"timings": self._timings}

    def _body(self, status: ResponseStatus, last: Status = "in_progress") -> ResponseBody:
        """Returns the response so far; `last` is the status of its last item."""
        request = self.request
        choice = request.tool_choice
        items = self._parts.all
        return ResponseBody(
            id=self.generation.request_id,
            created_at=self.created,
            status=status,
            model=self.generation.served.name,
            output=[self._item(part, last if part is items[-1] else "completed") for part in items],
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning={"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
            temperature=request.temperature,
            text={"format": _format(request)},
            tool_choice=choice.model_dump() if isinstance(choice, ToolChoice) else choice or "auto",
            tools=[tool.model_dump() for tool in request.tools or ()],
            top_logprobs=request.top_logprobs or 0,
            top_p=request.top_p,
            user=request.user,
            safety_identifier=request.safety_identifier,
            prompt_cache_key=request.prompt_cache_key,
            previous_response_id=request.previous_response_id,
            background=request.background is True,
            store=request.store is True,
        )

    def _part_events(self, part_event: PartEvent, status: Status) -> Iterator[bytes]:
        part = part_event.part
        if part_event.kind == "start":
            empty = OutputPart(part.kind, part.index, call_id=part.call_id, name=part.name)
            yield self._event("response.output_item.added", **self._place(part), item=self._item(empty, "in_progress"))
        match part.kind:
            case "text":
                yield from self._text_events(part_event)
            case "reasoning":
                yield from self._reasoning_events(part_event)
            case "call" if self._is_custom(part):
                yield from self._custom_call_events(part_event)
            case "call":
                yield from self._call_events(part_event)
        if part_event.kind == "stop":
            yield self._event("response.output_item.done", **self._place(part), item=self._item(part, status))

    def _text_events(self, part_event: PartEvent) -> Iterator[bytes]:
        part = part_event.part
        place = self._place(part, content=True)
        match part_event.kind:
            case "start":
                yield self._event("response.content_part.added", **place, part=OutputText(text=""))
            case "delta":
                logprobs = self._logprobs(part_event.logprobs)
                fields = {"delta": part_event.text, "logprobs": logprobs}
                yield self._event("response.output_text.delta", **place, **fields, **self._timed())
            case "stop":
                text = self._text(part)
                yield self._event("response.output_text.done", **place, text=text.text, logprobs=text.logprobs)
                yield self._event("response.content_part.done", **place, part=text)

    def _reasoning_events(self, part_event: PartEvent) -> Iterator[bytes]:
        place = self._place(part_event.part, content=True)
        match part_event.kind:
            case "start":
                yield self._event("response.content_part.added", **place, part=OutputReasoningText(text=""))
            case "delta":
                yield self._event("response.reasoning_text.delta", **place, delta=part_event.text)
            case "stop":
                text = part_event.part.text
                yield self._event("response.reasoning_text.done", **place, text=text)
                yield self._event("response.content_part.done", **place, part=OutputReasoningText(text=text))

    def _call_events(self, part_event: PartEvent) -> Iterator[bytes]:
        part = part_event.part
        place = self._place(part, content=False)
        match part_event.kind:
            case "start":
                pass
            case "delta":
                yield self._event("response.function_call_arguments.delta", **place, delta=part_event.text)
            case "stop":
                kind = "response.function_call_arguments.done"
                yield self._event(kind, **place, name=part.name, arguments=part.text)

    def _custom_call_events(self, part_event: PartEvent) -> Iterator[bytes]:
        # The input is known once the argument that holds it is complete.
        if part_event.kind == "stop":
            place = self._place(part_event.part, content=False)
            text = custom_input(part_event.part.text)
            yield self._event("response.custom_tool_call_input.delta", **place, delta=text)
            yield self._event("response.custom_tool_call_input.done", **place, input=text)

    def _is_custom(self, part: OutputPart) -> bool:
        tools = self.request.tools or ()
        return part.kind == "call" and any(isinstance(each, CustomTool) and each.name == part.name for each in tools)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(kind, body)

    def _place(self, part: OutputPart, *, content: bool | None = None) -> dict[str, Any]:
        """Returns the fields that locate a part: the item, with `content` its id, and the content in it."""
        place: dict[str, Any] = {"output_index": part.index}
        if content is not None:
            place["item_id"] = self._id(part)
        return place | ({"content_index": 0} if content else {})

    def _id(self, part: OutputPart) -> str:
        prefix = CUSTOM_PREFIX if self._is_custom(part) else PREFIXES[part.kind]
        return f"{prefix}_{self.generation.request_id.partition('_')[2]}_{part.index}"

    def _item(self, part: OutputPart, status: Status) -> OutputItem:
        match part.kind:
            case "text":
                # A message has no content before its content part is added.
                content = [self._text(part)] if part.text or part.logprobs or status != "in_progress" else []
                return OutputMessage(id=self._id(part), status=status, content=content)
            case "reasoning":
                content = [OutputReasoningText(text=part.text)] if part.text else []
                asked = ENCRYPTED_REASONING in (self.request.include or ()) and status != "in_progress"
                carried = wrap_reasoning(part.text) if asked else None
                return OutputReasoning(id=self._id(part), status=status, content=content, encrypted_content=carried)
            case "call" if self._is_custom(part):
                text = "" if status == "in_progress" else custom_input(part.text)
                return OutputCustomCall(
                    id=self._id(part), call_id=part.call_id, name=part.name, input=text, status=status
                )
            case "call":
                return OutputCall(
                    id=self._id(part), call_id=part.call_id, name=part.name, arguments=part.text, status=status
                )

    def _text(self, part: OutputPart) -> OutputText:
        return OutputText(text=part.text, logprobs=self._logprobs(part.logprobs))

    def _logprobs(self, given: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
        most = self.request.top_logprobs or 0
        return [token_logprob(self.generation.served, each, most) for each in given]

    def _usage(self, output: RequestOutput) -> ResponseUsage:
        read, written = output.metrics.prompt_tokens, output.metrics.output_tokens
        thought = "".join(part.text for part in self._parts.all if part.kind == "reasoning")
        reasoning = len(self.generation.served.llm.tokenize(thought, add_special_tokens=False)) if thought else 0
        return ResponseUsage(
            input_tokens=read,
            input_tokens_details=InputDetails(cached_tokens=output.num_cached_tokens or 0),
            output_tokens=written,
            output_tokens_details=OutputDetails(reasoning_tokens=min(reasoning, written)),
            total_tokens=read + written,
        )


def _format(request: ResponsesRequest) -> dict[str, Any]:
    form = None if request.text is None else request.text.format
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
