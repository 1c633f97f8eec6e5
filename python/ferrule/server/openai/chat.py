"""POST /v1/chat/completions and /v1/chat/completions/input_tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ferrule._engine.request import Reports
from ferrule._text.parsers import MessageDelta
from ferrule.errors import InvalidParameterError
from ferrule.outputs import CompletionOutput, RequestOutput, StreamDelta, TokenLogprobs
from ferrule.server.context import Context
from ferrule.server.conversation import AUTO, NONE, Conversation, prepare_prompt
from ferrule.server.early_end import EndlessLoop
from ferrule.server.errors import unsupported
from ferrule.server.generation import Generation, complete, new_request_id, parsed_message, prompt_ids, stream_steps
from ferrule.server.models import ServedModel
from ferrule.server.openai.beam_search import beam_search_of
from ferrule.server.openai.completion_fields import (
    check_stream_options,
    excluded_fields,
    field_names,
    fingerprint,
    prompt_logprobs,
    structure_of,
    token_name,
    usage,
    wants_usage_per_chunk,
    write_logprobs,
)
from ferrule.server.openai.messages import TextPart, template_messages
from ferrule.server.openai.prompts import tokens_prompt
from ferrule.server.openai.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokens,
    NamedCustomTool,
    NamedTool,
    Verbose,
)
from ferrule.server.openai.protocol.usage import Usage
from ferrule.server.openai.tool_calls import ToolCallWriter
from ferrule.server.request_body import BodyRoute
from ferrule.server.request_record import name_fields
from ferrule.server.schema import llama_cpp
from ferrule.server.schema.base import one_of
from ferrule.server.schema.logprobs import TokenLogprob, token_logprob
from ferrule.server.schema.sampling import sampling_params
from ferrule.server.schema.timings import ProgressReporter, prompt_progress, timings
from ferrule.server.schema.tools import CustomToolDefinition, strict_names, tool_dicts
from ferrule.server.streaming import DONE, EventStream, event


def router(server: Context) -> APIRouter:
    """Creates the routes."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/chat/completions", response_model=ChatCompletion, include_in_schema=False)
    @routes.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(request: ChatCompletionRequest) -> Response:
        """Answers a conversation (OpenAI's chat completions), whole or as a stream of server-sent events."""
        check_stream_options(request)
        name_fields(_names(request))
        if request.stream and request.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "prompt_logprobs is not supported with stream; set stream to false")
        served = await server.lease(request.model)
        writer = ResponseWriter(request, await generation(server, served, request))
        if request.stream:
            return await EventStream(writer.events(), server.settings.keep_alive).begin()
        output = await complete(writer.generation)
        body = await write_logprobs(lambda: writer.full(output).model_dump_json(by_alias=True), [output])
        return Response(body, media_type="application/json")

    @routes.post("/chat/completions/input_tokens", response_model=ChatTokens, include_in_schema=False)
    @routes.post("/v1/chat/completions/input_tokens", response_model=ChatTokens)
    async def input_tokens(request: ChatCompletionRequest) -> ChatTokens:
        """Counts the tokens of the prompt that a request would have (llama.cpp's route)."""
        name_fields(_names(request))
        prepared = await prepare_prompt(await server.lease(request.model), server.settings, _conversation(request))
        return ChatTokens(input_tokens=len(prompt_ids(prepared.prompt)))

    return routes


async def generation(server: Context, served: ServedModel, request: ChatCompletionRequest) -> Generation:
    """Converts a request to a generation.

    Raises ApiError, FerruleError.
    """
    prepared = await prepare_prompt(served, server.settings, _conversation(request))
    limit = llama_cpp.max_tokens(request, "max_completion_tokens", "max_tokens")
    params = sampling_params(
        request,
        max_tokens=limit,
        logprobs=_logprobs(request),
        structure=prepared.structure,
        others=llama_cpp.sampling_values(request),
    )
    search = beam_search_of(served, request, params)
    if request.stop_on_loop and (params.n > 1 or params.ranks or search is not None):
        raise InvalidParameterError("stop_on_loop", request.stop_on_loop, "false unless n and best_of are 1")
    top_logprobs = _top_logprobs(request)
    if request.echo and not request.stream and request.prompt_logprobs is None and top_logprobs is not None:
        params = replace(params, prompt_logprobs=top_logprobs)
    return Generation(
        served,
        tokens_prompt(served, request, prepared.prompt, limit),
        params,
        new_request_id("chatcmpl"),
        prepared.message_format,
        request.priority,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        beam_search=search,
        only_calls=prepared.only_calls,
        reports=Reports(prompt_progress=bool(request.stream and request.return_progress)),
        end_conditions=(EndlessLoop,) if request.stop_on_loop and not params.ignore_eos else (),
    )


def _conversation(request: ChatCompletionRequest) -> Conversation:
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        choice = f"function:{choice.function.name}"
    elif isinstance(choice, NamedCustomTool):
        choice = f"function:{choice.custom.name}"
    arguments: Mapping[str, Any] = request.chat_template_kwargs or {}
    if request.reasoning_effort is not None:
        arguments = {"reasoning_effort": request.reasoning_effort, **arguments}
    return Conversation(
        messages=template_messages(request.messages),
        tools=tool_dicts(request.tools or ()),
        strict_tools=strict_names(request.tools or ()),
        tool_choice=choice or (AUTO if request.tools else NONE),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        structure=structure_of(request),
        chat_template=request.chat_template,
        template_arguments=arguments,
        documents=request.documents,
        add_generation_prompt=request.begins_answer,
        continue_final_message=request.continue_final_message,
        parse_reasoning=request.reasoning_format != "none",
    )


def _names(request: ChatCompletionRequest) -> dict[str, str]:
    """Returns the request's names of the library's fields."""
    names = field_names(request)
    if request.tools and "structured_outputs.json" not in names and request.structured_outputs is None:
        names["structured_outputs.json"] = "tools"
    if request.tools and request.structured_outputs is None:
        names["structured_outputs.grammar"] = "tools"  # of an output that may call them
    if request.max_completion_tokens is not None and request.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    if request.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    return {**names, "prompt": "messages"}


def _top_logprobs(request: ChatCompletionRequest) -> int | None:
    """Returns the number of alternatives; None where the request asks for none."""
    return one_of(request, "top_logprobs", "n_probs")


def _logprobs(request: ChatCompletionRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidParameterError("top_logprobs", request.top_logprobs, "left out unless logprobs is true")
    top = _top_logprobs(request)
    return top or 0 if request.logprobs or request.n_probs else None


def _echoed(request: ChatCompletionRequest) -> str:
    """Returns the content that the answer repeats: that of a last message of the assistant."""
    last = request.messages[-1] if request.echo and request.messages else None
    if last is None or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text for part in last.content if isinstance(part, TextPart))


@dataclass
class ResponseWriter:
    """Writes the response of a generation, whole or as a stream."""

    request: ChatCompletionRequest
    generation: Generation
    created: int = field(default_factory=lambda: int(time.time()))
    _calls: dict[int, bool] = field(default_factory=dict[int, bool])
    """Whether a completion has called a tool, by the index of the completion."""

    @cached_property
    def _tool_calls(self) -> ToolCallWriter:
        tools = self.request.tools or ()
        return ToolCallWriter({tool.custom.name for tool in tools if isinstance(tool, CustomToolDefinition)})

    def full(self, output: RequestOutput) -> ChatCompletion:
        """Returns the response of a finished generation."""
        served = self.generation.served
        return ChatCompletion(
            id=self.generation.request_id,
            created=self.created,
            model=served.name,
            system_fingerprint=fingerprint(served),
            choices=[self._choice(completion) for completion in output.outputs],
            usage=self._usage(output),
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if self.request.return_token_ids else None,
            timings=timings(output) if self.request.timings_per_token else None,
            verbose=self._verbose(output) if self.request.verbose else None,
        )

    def _verbose(self, output: RequestOutput) -> Verbose:
        prompt = self.generation.served.llm.detokenize(output.prompt_token_ids, skip_special_tokens=False)
        return Verbose(prompt=prompt, content=output.outputs[0].text if output.outputs else "")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of the stream."""
        options = self.request.stream_options
        begun: set[int] = set()
        hidden = excluded_fields(self.request)
        output: RequestOutput | None = None
        progress = ProgressReporter(asked=self.generation.reports.prompt_progress)
        async with aclosing(stream_steps(self.generation)) as all_steps:
            async for step in all_steps:
                output = step.output
                for state in progress.new(output):
                    chunk = self._chunk([ChatChunkChoice(index=0, delta=ChatDelta())])
                    chunk.prompt_progress = prompt_progress(state)
                    chunk.timings = timings(state) if self.request.timings_per_token else None
                    yield event(chunk, hidden)
                for new in step.deltas:
                    choice = self._delta(new, first=new.index not in begun)
                    if self._is_empty(choice):
                        continue
                    chunk = self._chunk([choice])
                    if self.request.return_token_ids and not begun:
                        chunk.prompt_token_ids = prompt_ids(self.generation.prompt)
                    if wants_usage_per_chunk(self.request):
                        chunk.usage = self._usage(output)
                    chunk.timings = timings(output) if self.request.timings_per_token else None
                    begun.add(new.index)
                    yield event(chunk, hidden)
        if options is not None and options.include_usage and output is not None:
            chunk = self._chunk([])
            chunk.usage = self._usage(output)
            chunk.timings = timings(output) if self.request.timings_per_token else None
            yield event(chunk)
        yield DONE

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        served = self.generation.served
        return ChatChunk(
            id=self.generation.request_id,
            created=self.created,
            model=served.name,
            system_fingerprint=fingerprint(served),
            choices=choices,
        )

    def _delta(self, new: StreamDelta, *, first: bool) -> ChatChunkChoice:
        message = new.message if new.message is not None else MessageDelta(new.text)
        index = new.index
        self._calls[index] = self._calls.get(index, False) or bool(message.tool_calls)
        delta = ChatDelta(
            role="assistant" if first else None,
            content=self._content(message, first=first),
            reasoning=message.reasoning,
            reasoning_content=message.reasoning,
            tool_calls=self._tool_calls.deltas(index, message.tool_calls, last=new.finish_reason is not None) or None,
        )
        return ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=self._logprobs(new.logprobs),
            finish_reason=_finish(new.finish_reason, called=self._calls[index]),
            stop_reason=new.stop_reason,
            token_ids=new.token_ids if self.request.return_token_ids else None,
        )

    def _content(self, message: MessageDelta, *, first: bool) -> str | None:
        """Returns the new content; the first delta begins with the echo, and is never without any field."""
        echoed = _echoed(self.request) if first else ""
        if echoed:
            return echoed + (message.content or "")
        return message.content if message else ("" if first else None)

    def _is_empty(self, choice: ChatChunkChoice) -> bool:
        """Whether a chunk of this choice has no contents, as for a token that is a part of a character."""
        reported = choice.logprobs or choice.token_ids or wants_usage_per_chunk(self.request)
        return choice.delta == ChatDelta() and choice.finish_reason is None and not reported

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        parsed = parsed_message(self.generation, completion)
        calls = [self._tool_calls.whole(call) for call in parsed.tool_calls]
        echoed = _echoed(self.request)
        message = ChatMessage(
            content=echoed + (parsed.content or "") if echoed else parsed.content,
            reasoning=parsed.reasoning,
            reasoning_content=parsed.reasoning,
            tool_calls=calls or None,
        )
        return ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._logprobs(completion.logprobs),
            finish_reason=_finish(completion.finish_reason, called=bool(message.tool_calls)) or "stop",
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self.request.return_token_ids else None,
        )

    def _logprobs(self, given: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        return None if given is None else ChatLogprobs(content=[self._token(each) for each in given])

    def _token(self, given: TokenLogprobs) -> TokenLogprob:
        return token_logprob(
            self.generation.served, given, _top_logprobs(self.request) or 0, partial(token_name, self.request)
        )

    def _usage(self, output: RequestOutput) -> Usage:
        return usage([output], predicted=self.request.prediction is not None)


def _finish(reason: str | None, *, called: bool) -> str | None:
    return "tool_calls" if reason == "stop" and called else reason
