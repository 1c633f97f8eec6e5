"""POST /v1/completions: the older API, which continues a text without a chat template."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from fastapi import APIRouter
from starlette.responses import Response

from ferrule._engine.request import Reports
from ferrule._text.prompt import TextPrompt, TokensPrompt
from ferrule.errors import InvalidParameterError, PromptError
from ferrule.outputs import CompletionOutput, RequestOutput, StreamDelta, StreamStep, TokenLogprobs
from ferrule.server.context import Context
from ferrule.server.error_responses import api_error
from ferrule.server.errors import unsupported
from ferrule.server.generation import Generation, all_of, complete, new_request_id, stream_steps
from ferrule.server.merging import merged
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
from ferrule.server.openai.prompts import prompts_of
from ferrule.server.openai.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from ferrule.server.openai.protocol.usage import Usage
from ferrule.server.request_body import BodyRoute
from ferrule.server.request_record import name_fields
from ferrule.server.schema import llama_cpp
from ferrule.server.schema.base import one_of
from ferrule.server.schema.sampling import sampling_params
from ferrule.server.schema.timings import ProgressReporter, prompt_progress, timings
from ferrule.server.streaming import DONE, EventStream, event


def router(server: Context) -> APIRouter:
    """Creates the route."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/completions", response_model=Completion, include_in_schema=False)
    @routes.post("/v1/completions", response_model=Completion)
    async def completions(request: CompletionRequest) -> Response:
        """Continues one text or several (OpenAI's completions), whole or as a stream of server-sent events."""
        check_stream_options(request)
        name_fields({**field_names(request), "prompt_token_ids": "prompt"})
        writer = CompletionWriter(request, await generations(await server.lease(request.model), request))
        if request.stream:
            return await EventStream(writer.events(), server.settings.keep_alive).begin()
        outputs = await _complete_all(writer.generations)
        body = await write_logprobs(lambda: writer.full(outputs).model_dump_json(), outputs)
        return Response(body, media_type="application/json")

    return routes


async def generations(served: ServedModel, request: CompletionRequest) -> list[Generation]:
    """Converts a request to one generation for each prompt.

    Raises ApiError, InvalidParameterError.
    """
    if request.suffix is not None and request.echo:
        raise unsupported("echo", "echo is not supported with suffix")
    limit = _max_tokens(request)
    logprobs: int | None = one_of(request, "logprobs", "n_probs")
    # The engine generates at least one token, which an echo without output drops.
    params = sampling_params(
        request,
        max_tokens=1 if limit == 0 and request.echo else limit,
        logprobs=logprobs,
        structure=structure_of(request),
        others=llama_cpp.sampling_values(request),
    )
    search = beam_search_of(served, request, params)
    if request.echo and logprobs is not None:
        params = replace(params, prompt_logprobs=max(logprobs, request.prompt_logprobs or 0))
    prompts = await prompts_of(served, request, limit)
    _check_room(served, len(prompts), params.best_of or params.n)
    name = new_request_id("cmpl")
    reports = Reports(prompt_progress=bool(request.stream and request.return_progress))
    return [
        Generation(
            served,
            prompt,
            params,
            f"{name}-{index}",
            priority=request.priority,
            reports=reports,
            beam_search=search,
        )
        for index, prompt in enumerate(prompts)
    ]


def _max_tokens(request: CompletionRequest) -> int | None:
    given = request.model_fields_set & {"max_tokens", "n_predict"}
    return llama_cpp.max_tokens(request, "max_tokens") if given else request.max_tokens


def _check_room(served: ServedModel, prompts: int, each: int) -> None:
    """Raises InvalidParameterError for a request that does not fit into an empty queue."""
    running, waiting = served.info["max_num_seqs"], served.info["max_queued_requests"]
    if prompts * each > running + waiting:
        raise InvalidParameterError(
            "prompt",
            prompts * each,
            f"prompts with at most {running + waiting} completions in all (max_num_seqs {running} + "
            f"max_queued_requests {waiting})",
        )


async def _complete_all(request: Sequence[Generation]) -> list[RequestOutput]:
    """Runs all generations at once and returns their outputs in order; a failure of one ends all.

    Raises as `complete`.
    """

    async def run(number: int) -> RequestOutput:
        with _naming_prompt(number, request):
            return await complete(request[number])

    return await all_of(map(run, range(len(request))))


async def _streamed(number: int, request: Sequence[Generation]) -> AsyncGenerator[StreamStep, None]:
    with _naming_prompt(number, request):
        async with aclosing(stream_steps(request[number])) as all_steps:
            async for step in all_steps:
                yield step


@contextmanager
def _naming_prompt(number: int, request: Sequence[Generation]) -> Generator[None, None, None]:
    """Names the prompt in its errors where a request has several.

    Raises ApiError.
    """
    try:
        yield
    except PromptError as error:
        if len(request) > 1:
            name_fields(dict.fromkeys(("prompt_token_ids", "prompt"), f"prompt[{number}]"))
        raise api_error(error) from None


@dataclass
class _TextPosition:
    """Position in the text of a choice."""

    characters: int = 0
    begun: bool = False
    _decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    def advance(self, generation: Generation, token: int, prompt: str) -> None:
        """Moves behind a token; tokens of one character begin where the character does.

        Special tokens that the text leaves out have no characters; `prompt` is the echoed text, which may spell them.
        """
        llm = generation.served.llm
        text = llm.token_text(token)
        if (
            generation.params.skip_special_tokens
            and not llm.detokenize([token], skip_special_tokens=True)
            and not prompt.startswith(text, self.characters)
        ):
            return
        found = llm.token_bytes(token)
        self.characters += len(text if found is None else self._decoder.decode(found))


@dataclass
class CompletionWriter:
    """Writes the response of several generations, whole or as a stream; choices are numbered through all prompts."""

    request: CompletionRequest
    generations: Sequence[Generation]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def _silent(self) -> bool:
        """Whether the answer has no output, only the echo of the prompt."""
        return _max_tokens(self.request) == 0

    def full(self, outputs: Sequence[RequestOutput]) -> Completion:
        """Returns the response of finished generations."""
        choices = [
            self._choice(prompt, _as_delta(completion), output, _TextPosition())
            for prompt, output in enumerate(outputs)
            for completion in output.outputs
        ]
        body = self._body(choices)
        body.usage = self._usage(outputs)
        body.timings = timings(*outputs) if self.request.timings_per_token else None
        return body

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of the stream."""
        options = self.request.stream_options
        known: dict[int, RequestOutput] = {}
        hidden = excluded_fields(self.request)
        places: dict[tuple[int, int], _TextPosition] = {}
        progress = [ProgressReporter(asked=each.reports.prompt_progress) for each in self.generations]
        async with aclosing(
            merged([_streamed(number, self.generations) for number in range(len(self.generations))])
        ) as all_steps:
            async for prompt, step in all_steps:
                known[prompt] = step.output
                for state in progress[prompt].new(step.output):
                    index = prompt * self.generations[prompt].params.n
                    body = self._body([CompletionChoice(index=index, text="")])
                    body.prompt_progress = prompt_progress(state)
                    body.timings = timings(state) if self.request.timings_per_token else None
                    yield event(body, hidden)
                for new in step.deltas:
                    place = places.setdefault((prompt, new.index), _TextPosition())
                    write = partial(self._event, prompt, new, step.output, place, list(known.values()))
                    # The first event of a choice may have the log-probabilities of its prompt.
                    yield write() if place.begun else await write_logprobs(write, [step.output], prompts_only=True)
        if options is not None and options.include_usage:
            body = self._body([])
            body.usage = self._usage(list(known.values()))
            body.timings = timings(*known.values()) if self.request.timings_per_token else None
            yield event(body)
        yield DONE

    def _event(
        self, prompt: int, new: StreamDelta, output: RequestOutput, place: _TextPosition, known: list[RequestOutput]
    ) -> bytes:
        """Returns the event of the new part of a choice; `known` are the outputs so far."""
        body = self._body([self._choice(prompt, new, output, place)])
        if wants_usage_per_chunk(self.request):
            body.usage = self._usage(known)
        body.timings = timings(output) if self.request.timings_per_token else None
        return event(body, excluded_fields(self.request))

    def _choice(self, prompt: int, new: StreamDelta, output: RequestOutput, place: _TextPosition) -> CompletionChoice:
        """Returns the new part of a choice; the first part begins with the prompt where it is echoed."""
        request, generation = self.request, self.generations[prompt]
        silent = self._silent
        first, place.begun = not place.begun, True
        text, logprobs = (new.text, new.logprobs) if not silent else ("", new.logprobs and [])
        if request.echo and first:
            text = _prompt_text(generation) + text
        shown = None
        if logprobs is not None:
            shown = self._logprobs(generation, output if request.echo and first else None, logprobs, place)
        return CompletionChoice(
            index=prompt * generation.params.n + new.index,
            text=text,
            logprobs=shown,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            token_ids=([] if silent else new.token_ids) if request.return_token_ids else None,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs)
            if first and request.prompt_logprobs is not None
            else None,
            prompt_token_ids=output.prompt_token_ids if first and request.return_token_ids else None,
        )

    def _logprobs(
        self, generation: Generation, echoed: RequestOutput | None, given: Sequence[TokenLogprobs], place: _TextPosition
    ) -> CompletionLogprobs:
        shown = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        all_tokens: list[tuple[int, TokenLogprobs | None]] = [(next(iter(each)), each) for each in given]
        prompt = ""
        if echoed is not None and echoed.prompt_logprobs is not None:
            prompt = _prompt_text(generation)
            all_tokens = [*zip(echoed.prompt_token_ids, echoed.prompt_logprobs, strict=True), *all_tokens]
        for token, found in all_tokens:
            text = generation.served.llm.token_text(token)
            shown.tokens.append(token_name(self.request, token, text))
            shown.text_offset.append(place.characters)
            place.advance(generation, token, prompt)
            shown.token_logprobs.append(None if found is None else found[token].logprob)
            shown.top_logprobs.append(None if found is None else self._top(found))
        return shown

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        # Several tokens may have the same text: the most likely of them is reported.
        ranked = sorted(found.items(), key=lambda item: item[1].rank, reverse=True)
        return {token_name(self.request, token, each.decoded_token): each.logprob for token, each in ranked}

    def _usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        found = usage(outputs, predicted=self.request.prediction is not None)
        if self._silent:
            found.completion_tokens, found.total_tokens = 0, found.prompt_tokens
        return found

    def _body(self, choices: list[CompletionChoice]) -> Completion:
        generation = self.generations[0]
        return Completion(
            id=generation.request_id.rpartition("-")[0],
            created=self.created,
            model=generation.served.name,
            system_fingerprint=fingerprint(generation.served),
            choices=choices,
        )


def _as_delta(completion: CompletionOutput) -> StreamDelta:
    return StreamDelta(
        completion.text,
        completion.token_ids,
        completion.logprobs,
        index=completion.index,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def _prompt_text(generation: Generation) -> str:
    prompt = cast("TextPrompt | TokensPrompt", generation.prompt)
    if "prompt" in prompt:
        return prompt["prompt"]
    return generation.served.llm.detokenize(
        prompt["prompt_token_ids"], skip_special_tokens=generation.params.skip_special_tokens
    )
