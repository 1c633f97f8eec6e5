"""`AsyncLLM`: inference with a model in this process, for asyncio tasks."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence, Sized
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, Unpack, cast

from ferrule._api.arguments import FOREIGN, FOREIGN_ABORT, FOREIGN_POOLING, pooling_arguments
from ferrule._api.loaded import LoadedModel, beam_params, only_params, stream_params
from ferrule._engine.beams import BeamSearchParams
from ferrule._engine.collector import Collector
from ferrule._engine.driver import Driver
from ferrule._engine.encoding import Plan
from ferrule._engine.encoding.queue import Portion
from ferrule._engine.encoding.texts import TextInput, TextOrPair
from ferrule._engine.engine_thread import EngineThread
from ferrule._engine.lora import LoRAAdapter
from ferrule._engine.metrics import EngineMetrics
from ferrule._engine.registry import Load, Registry
from ferrule._engine.request import USUAL_REPORTS, Reports, Request
from ferrule._engine.workers import LARGE_INPUT, WORKERS, workers_for
from ferrule._params.compatibility import compatible_call
from ferrule._params.declaration import signature_of
from ferrule._params.lora import LoRA
from ferrule._params.options import AsyncEngineArgs, EngineArgs
from ferrule._params.pooling import PoolingParams
from ferrule._params.sampling import RequestOutputKind, SamplingParams
from ferrule._text.chat.options import FOREIGN as FOREIGN_CHAT_OPTIONS
from ferrule._text.chat.options import ChatOptions
from ferrule._text.prompt import Prompt
from ferrule._validation import check_number
from ferrule.errors import InvalidParameterError
from ferrule.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    RerankOutput,
    ScoringRequestOutput,
    StreamDelta,
    StreamStep,
)

if TYPE_CHECKING:
    import os

    from ferrule._text.chat import Message
    from ferrule._text.parsers import MessageFormat

T = TypeVar("T")
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY

LONG = 4000
"""Number of characters and tokens of a request above which another thread tokenizes it, as that takes milliseconds."""
LONGEST_TIMEOUT = 1e9
"""Largest timeout, in seconds."""
STEP_CHECK = 0.005
"""Interval in seconds at which closing checks whether the last step has ended."""


class _PromptInput(NamedTuple):
    """Unchecked input of a request."""

    prompt: object
    message_format: object
    search: BeamSearchParams | None = None
    """Parameters of a beam search."""


class AsyncLLM(LoadedModel):
    """A model with its tokenizer and engine, for asyncio programs. Names and meanings are vLLM's.

    The constructor takes the fields of AsyncEngineArgs. It blocks while it loads the model, so call it before the event
    loop runs or in a thread. Nothing else blocks the loop: the engine has its own thread, and each step's tokens arrive
    in one callback. Tasks of several event loops, in any threads, may use one AsyncLLM.

        >>> import asyncio
        >>> from ferrule import AsyncLLM, SamplingParams
        >>> async def main():
        ...     async with AsyncLLM(max_model_len=512) as llm:
        ...         params = SamplingParams(temperature=0, max_tokens=8)
        ...         async for delta in llm.stream("The capital of France is", params):
        ...             print(delta.text, end="")
        >>> asyncio.run(main())
         Paris.
    """

    _engine_args: ClassVar[type[EngineArgs]] = AsyncEngineArgs

    @signature_of(AsyncEngineArgs)
    def __init__(self, *given: Any, **options: Any) -> None:
        """Loads a model. The arguments are the fields of AsyncEngineArgs, which documents them.

        Raises ModelNotFoundError, ModelFileError, ConfigError, TokenizerError, InvalidParameterError,
        InsufficientMemoryError; PipelineStageError for a stage that fails while it loads, EngineError and
        MissingDependencyError for stages that Ray cannot start.
        """
        super().__init__(*given, **options)

    def _loaded(self) -> None:
        limit, places = self._options.max_queued_requests or 0, int(self._engine_info["max_num_seqs"])
        self._registry = Registry(limit, places, partial(_load, self._driver))
        self._engine_thread = EngineThread(self._driver, self._registry, self._portion)
        # An AsyncLLM that is dropped without being closed must not leave a thread and the weights behind.
        weakref.finalize(self, self._engine_thread.stop).atexit = False

    @compatible_call(FOREIGN)
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        message_format: MessageFormat | None = None,
        lora_request: LoRA | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generates completions of a prompt and yields an output after each step; the last output is finished.

        Each output has all tokens so far. With `output_kind=RequestOutputKind.DELTA` it has only the new tokens, and
        with `FINAL_ONLY` only the finished output is yielded. A slow reader gets the newest state. `request_id` is for
        `abort` and must differ from the ids of running requests. Requests with lower `priority` are scheduled
        earlier. With a `message_format` each completion has a `message`. `lora_request` is the name of an adapter, or a
        LoRARequest, whose adapter is loaded if necessary. Cancelling the reading task or closing the generator ends
        the request.

        Raises PromptError, TokenizerError, InvalidParameterError, QueueFullError, EngineError, and the errors of
        `load_lora_adapter` if an adapter is loaded, all at the first iteration; PipelineStageError for a pipeline stage
        that is lost at any time.
        """
        asked = _PromptInput(prompt, message_format)
        return self._outputs(asked, sampling_params, request_id, priority=priority, lora_request=lora_request)

    @compatible_call(FOREIGN_CHAT_OPTIONS)
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRA | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a conversation. `options` are the fields of ChatOptions; the other arguments are those of `generate`.

        With a parser, by name or `auto` (see `message_format`), each completion's `message` has tool calls and
        reasoning separate from the content. To stream deltas, pass the prompt of
        `await asyncio.to_thread(llm.chat_prompt, messages)` and a `message_format` to `stream`.

        Raises ChatTemplateError, and the errors of `generate`.
        """

        def render() -> _PromptInput:
            prompt = self.chat_prompt(messages, **options)
            message_format = self.message_format(
                tool_call_parser,
                reasoning_parser,
                tools=options.get("tools"),
                chat_template=options.get("chat_template"),
            )
            return _PromptInput(prompt, message_format)

        return self._outputs(render, sampling_params, request_id, priority=priority, lora_request=lora_request)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        message_format: MessageFormat | None = None,
        lora_request: LoRA | None = None,
    ) -> AsyncGenerator[StreamDelta, None]:
        """Continues a prompt and yields what each step adds; the last delta carries the whole output.

        With a `message_format` each delta has its part of the `message`. A late reader gets everything it missed in one
        delta. Otherwise it works like `generate`, for one completion.
        """
        steps = self.stream_steps(
            prompt,
            stream_params(self._params(sampling_params)),
            request_id,
            priority=priority,
            message_format=message_format,
            lora_request=lora_request,
        )
        async with aclosing(steps):
            async for step in steps:
                for delta in step.deltas:
                    yield replace(delta, output=step.output) if step.output.finished else delta

    async def stream_steps(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        message_format: MessageFormat | None = None,
        lora_request: LoRA | None = None,
        reports: Reports = USUAL_REPORTS,
    ) -> AsyncGenerator[StreamStep, None]:
        """Generates completions of a prompt and yields what each step adds to them.

        It works like `stream`, for several completions. With `best_of` everything arrives at the end, when the best
        completions are known. `reports` changes what is reported: with `prompt_progress` there are steps without deltas
        while the prompt is computed.
        """
        params = only_params(self._params(sampling_params))
        asked = _PromptInput(prompt, message_format)
        async with self._collecting(
            asked, params, request_id, priority=priority, lora_request=lora_request, reports=reports
        ) as collector:
            while True:
                step = await collector.next_step()
                yield step
                if step.output.finished:
                    return

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        message_format: MessageFormat | None = None,
        lora_request: LoRA | None = None,
    ) -> BeamSearchOutput:
        """Runs `LLM.beam_search` for one prompt; cancelling the task ends it.

        With a `message_format` each sequence has a `message`. The output of an aborted search has no sequences.
        """
        search = beam_params(params)
        asked = _PromptInput(prompt, message_format, search)
        async with self._collecting(
            asked, search.sampling(), request_id, priority=priority, lora_request=lora_request
        ) as collector:
            return cast("BeamSearchOutput", await collector.next_output())

    async def load_lora_adapter(self, name: str, path: str | os.PathLike[str]) -> LoRAAdapter:
        """Loads a low-rank adapter in PEFT's format under a name for requests, in another thread.

        `path` is a directory, or `org/repo` on the Hugging Face hub. A name in use must be unloaded first.

        Raises InvalidParameterError, ModelNotFoundError, ModelFileError, InsufficientMemoryError, EngineError;
        ConfigError if the adapter does not fit the model, UnsupportedModelError if it has more than low-rank updates of
        linear layers.
        """
        return await WORKERS.run(self._adapters.load, name, path)

    async def unload_lora_adapter(self, name: str) -> None:
        """Unloads an adapter: new requests cannot use it, and its memory is freed when running requests have ended.

        Raises InvalidParameterError if no adapter has that name.
        """
        self._adapters.unload(name)

    @compatible_call(FOREIGN_POOLING)
    async def embed(
        self,
        prompts: TextInput | Sequence[TextInput],
        *,
        pooling_params: PoolingParams | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Runs `LLM.embed`; cancelling the task ends it."""
        plan = partial(
            self._encoding.embed,
            prompts,
            pooling=pooling,
            prompt_name=prompt_name,
            **pooling_arguments(
                pooling_params,
                normalize=normalize,
                dimensions=dimensions,
                truncate_prompt_tokens=truncate_prompt_tokens,
            ),
        )
        return await self._encode(plan)

    @compatible_call(FOREIGN_POOLING)
    async def classify(
        self,
        prompts: TextOrPair | Sequence[TextOrPair],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Runs `LLM.classify`; cancelling the task ends it."""
        given = pooling_arguments(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens)
        return await self._encode(partial(self._encoding.classify, prompts, **given))

    @compatible_call(FOREIGN_POOLING)
    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Runs `LLM.score`; cancelling the task ends it."""
        given = pooling_arguments(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens)
        return await self._encode(partial(self._encoding.score, data_1, data_2, **given))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[RerankOutput]:
        """Runs `LLM.rerank`; cancelling the task ends it."""
        plan = partial(
            self._encoding.rerank,
            query,
            documents,
            top_n=top_n,
            instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return await self._encode(plan)

    @compatible_call(FOREIGN_ABORT)
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Aborts one request or several; the reader of each gets a last output with finish_reason `abort`.

        Ids of requests that are not running are ignored.
        """
        for each in [request_id] if isinstance(request_id, str) else request_id:
            collector = self._registry.find(each)
            if collector is not None:
                self._abort(collector)

    async def drain(self, timeout: float | None = None) -> None:
        """Refuses new requests and waits for the running ones; after `timeout` seconds it aborts them.

        Raises InvalidParameterError.
        """
        if timeout is not None:
            timeout = check_number("timeout", timeout, 0, LONGEST_TIMEOUT)
        self._registry.drain()
        try:
            async with asyncio.timeout(timeout):
                await self._registry.wait_until_idle()
        except TimeoutError:
            for collector in self._registry.all():
                self._abort(collector)
            self._engine_thread.drop_encodes("aborted: the engine was drained")

    async def check_health(self) -> None:
        """Raises EngineError if the engine has failed or is closed."""
        self._registry.check_health()

    def metrics(self) -> EngineMetrics:
        """Returns counters and gauges of the engine, without waiting for a running step.

        Raises EngineError once the engine is closed.
        """
        metrics = super().metrics()
        return replace(metrics, requests_refused=metrics.requests_refused + self._registry.refused)

    async def aclose(self) -> None:
        """Closes the engine after the running step and frees weights and cache; readers get an EngineError."""
        self._engine_thread.stop()
        while self._engine_thread.alive:
            await asyncio.sleep(STEP_CHECK)
        await asyncio.to_thread(self._release)

    def close(self) -> None:
        """Closes the engine like `aclose`, but blocks until the running step has ended."""
        self._engine_thread.stop()
        self._engine_thread.join()
        self._release()

    def shutdown(self, timeout: float | None = None) -> None:
        """Closes the engine (vLLM's name for `close`); `timeout` has no effect, as no step takes long."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _encode(self, make: Callable[[], Plan[T]]) -> list[T]:
        """Makes a plan in another thread, and runs it on the engine's thread portion by portion."""
        with self._registry.encoding():
            plan = await workers_for().run(make)
            answers: list[bytes] = []
            numbers = iter(plan.numbers)
            for texts in plan.slices(*self._portion):
                portion = Portion(texts, plan.task, 4 * sum(islice(numbers, len(texts))))
                self._engine_thread.encode(portion)
                answers.append(await portion.answer)
            return plan.outputs(answers)

    async def _outputs(
        self,
        asked: _PromptInput | Callable[[], _PromptInput],
        sampling_params: object,
        request_id: object,
        *,
        priority: object,
        lora_request: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        params = only_params(self._params(sampling_params))
        async with self._collecting(
            asked, params, request_id, priority=priority, lora_request=lora_request
        ) as collector:
            next_output = collector.next_delta if params.output_kind is DELTA else collector.next_output
            while True:
                output = await next_output()
                if output.finished or params.output_kind is not FINAL_ONLY:
                    yield output
                if output.finished:
                    return

    def _params(self, sampling_params: object) -> object:
        return self.get_default_sampling_params() if sampling_params is None else sampling_params

    @asynccontextmanager
    async def _collecting(
        self,
        asked: _PromptInput | Callable[[], _PromptInput],
        params: SamplingParams,
        request_id: object,
        *,
        priority: object,
        lora_request: object,
        reports: Reports = USUAL_REPORTS,
    ) -> AsyncGenerator[Collector, None]:
        """Runs a request from admission to end; if `asked` is a function, another thread calls it to get the prompt."""
        collector = Collector(self._name_of(request_id), params.best_of or params.n)
        self._registry.admit(collector)
        try:

            def read() -> Request:
                given = asked if isinstance(asked, _PromptInput) else asked()
                if given.search is not None:
                    return self._beam_request(
                        given.prompt,
                        given.search,
                        request_id=collector.request_id,
                        priority=priority,
                        message_format=given.message_format,
                        lora_request=lora_request,
                    )
                return self._request(
                    given.prompt,
                    params,
                    request_id=collector.request_id,
                    priority=priority,
                    reports=reports,
                    message_format=given.message_format,
                    lora_request=lora_request,
                )

            size = _size(asked.prompt, params) if isinstance(asked, _PromptInput) else LONG + 1
            long = size > LONG or self._adapters.must_load(lora_request) or params.structured_outputs is not None
            collector.begin(await workers_for(size).run(read) if long else read())
            if not collector.ended:
                self._engine_thread.add(collector)
            yield collector
        finally:
            self._end_request(collector)

    def _name_of(self, request_id: object) -> str:
        if request_id is None:
            return next(name for name in map(str, self._request_numbers) if self._registry.find(name) is None)
        if not isinstance(request_id, str):
            raise InvalidParameterError("request_id", request_id, "a string")
        return request_id

    def _abort(self, collector: Collector) -> None:
        """Aborts a request from any event loop; its own loop does the work, since it may be adding the request."""
        self._registry.remove(collector)
        if collector.loop is asyncio.get_running_loop():
            self._end_request(collector)
            return
        try:
            collector.loop.call_soon_threadsafe(self._end_request, collector)
        except RuntimeError:  # that loop is closed
            self._engine_thread.release(collector)

    def _end_request(self, collector: Collector) -> None:
        self._registry.remove(collector)
        if not collector.ended:
            collector.abort()
            self._engine_thread.release(collector)


def _load(driver: Driver) -> Load:
    metrics = json.loads(driver.metrics())
    return Load(int(metrics["running"]), int(metrics["waiting"]))


def _size(prompt: object, params: SamplingParams) -> int:
    """Returns the number of characters and tokens to process before a request can begin."""
    contents: list[object] = [prompt]
    if isinstance(prompt, Mapping):
        parts = cast("Mapping[object, object]", prompt)
        contents = [parts.get("prompt", parts.get("prompt_token_ids")), parts.get("suffix") or ""]
        if parts.get("multi_modal_data") is not None:
            return LARGE_INPUT  # a vision tower computes for seconds
    length = sum(len(content) if isinstance(content, Sized) else LONG + 1 for content in contents)
    allowed = len(params.allowed_token_ids or ())
    # Sequence breakers are searched in the whole vocabulary.
    words = (
        LONG + 1 if params.dry_multiplier else sum(map(len, (*(params.bad_words or ()), *(params.bad_words_ids or ()))))
    )
    length += len(params.prediction or ())
    return length + (params.best_of or params.n) * (
        sum(map(len, params.stop or ())) + len(params.logit_bias or ()) + allowed + words
    )
