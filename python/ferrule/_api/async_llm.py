"""`AsyncLLM`: a model in this process, for any number of asyncio tasks."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, cast

from ferrule._api.loaded import LoadedModel, beam_params, only_params, stream_params
from ferrule._engine.beams import BeamSearchParams
from ferrule._engine.collector import Collector
from ferrule._engine.driver import Driver
from ferrule._engine.encoding import Plan
from ferrule._engine.encoding.queue import Portion
from ferrule._engine.encoding.texts import TextInput, TextOrPair
from ferrule._engine.engine_thread import EngineThread
from ferrule._engine.lora import LoRA, LoRAAdapter
from ferrule._engine.metrics import EngineMetrics
from ferrule._engine.registry import Load, Registry
from ferrule._engine.request import Request
from ferrule._engine.workers import WORKERS
from ferrule._params.sampling import SamplingParams
from ferrule._text.prompt import Prompt
from ferrule._validation import check_number, shown
from ferrule.errors import InvalidParameterError
from ferrule.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    EmbeddingOutput,
    RequestOutput,
    RerankOutput,
    StreamDelta,
    StreamStep,
)

if TYPE_CHECKING:
    import os

    from ferrule._text.chat import Message, Tool
    from ferrule._text.parsers import MessageFormat

T = TypeVar("T")

LONG = 4000
"""Characters or tokens of a request from which on it is read in another thread: some milliseconds of work."""
LONGEST_TIMEOUT = 1e9
"""Seconds."""
STEP_CHECK = 0.005
"""Seconds between looks at whether the last step is over, when closing."""


class _Asked(NamedTuple):
    """What a request is about, unchecked."""

    prompt: object
    message_format: object
    search: BeamSearchParams | None = None
    """Where it is a beam search."""


class AsyncLLM(LoadedModel):
    """A model, its tokenizer and its engine, for programs with an event loop.

    Loading takes its time and blocks, so do it before the event loop runs or in a thread. Everything else never
    blocks the loop: the engine runs in a thread of its own, requests and their ends are posted to it, and each step's
    tokens come back in one call. Tasks of any number of event loops, in any threads, may use one AsyncLLM.
    """

    _max_queued_requests: ClassVar[int | None] = 1024

    def _loaded(self) -> None:
        limit, places = self._options.max_queued_requests or 0, int(self._engine_info["max_num_seqs"])
        self._registry = Registry(limit, places, partial(_load, self._driver))
        self._engine_thread = EngineThread(self._driver, self._registry, self._portion)
        # An AsyncLLM that is dropped without being closed must not leave a thread and the weights behind.
        weakref.finalize(self, self._engine_thread.stop).atexit = False

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
        """Continues a prompt and yields its state, all of it each time, whenever there is more; the last is finished.

        A reader that is late gets the newest state and none of those that it missed. `request_id` is what `abort`
        takes, and must not be that of a request that still runs. Lower `priority` is scheduled earlier. With a
        `message_format` each completion has its `message`. `lora_request` is the name of an adapter, or a LoRARequest,
        which loads what is not loaded yet. Cancelling the task that reads, or closing the generator, ends the request.

        Raises PromptError, TokenizerError, InvalidParameterError, QueueFullError, EngineError, and where an adapter is
        loaded as `load_lora_adapter`, all when it is first read.
        """
        asked = _Asked(prompt, message_format)
        return self._outputs(asked, sampling_params, request_id, priority=priority, lora_request=lora_request)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRA | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a conversation; what the template gets is explained at `chat_prompt`, the rest at `generate`.

        Where a parser is chosen, by name or with `auto` as `message_format` explains, each completion's `message` has
        its tool calls and its reasoning apart from the answer. To stream deltas instead, give `stream` what
        `await asyncio.to_thread(llm.chat_prompt, messages)` returns, and a `message_format`.

        Raises ChatTemplateError, and as `generate`.
        """

        def render() -> _Asked:
            prompt = self.chat_prompt(
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                chat_template_kwargs=chat_template_kwargs,
            )
            message_format = self.message_format(
                tool_call_parser, reasoning_parser, tools=tools, chat_template=chat_template
            )
            return _Asked(prompt, message_format)

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
        """Continues a prompt and yields what is new; the last delta carries the whole output.

        With a `message_format` each delta has its part of the `message`. A reader that is late gets all that it missed
        in one delta. As `generate` otherwise, for one completion.
        """
        steps = self.stream_steps(
            prompt,
            stream_params(sampling_params),
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
    ) -> AsyncGenerator[StreamStep, None]:
        """Continues a prompt, once or several times, and yields what is new of all of its completions.

        As `stream` otherwise. With `best_of` all comes in the end, when it is known which ones are the best.
        """
        params = only_params(sampling_params)
        asked = _Asked(prompt, message_format)
        async with self._collecting(
            asked, params, request_id, priority=priority, lora_request=lora_request
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
        lora_request: LoRA | None = None,
    ) -> BeamSearchOutput:
        """As `LLM.beam_search`, for one prompt; cancelling the task ends it.

        One that `abort` ended has found nothing.
        """
        search = beam_params(params)
        asked = _Asked(prompt, None, search)
        async with self._collecting(
            asked, search.sampling(), request_id, priority=priority, lora_request=lora_request
        ) as collector:
            return cast("BeamSearchOutput", await collector.next_output())

    async def load_lora_adapter(self, name: str, path: str | os.PathLike[str]) -> LoRAAdapter:
        """Loads a low-rank adapter that PEFT saved, in another thread, for requests to ask for by `name`.

        `path` is a directory, or `org/repo` on the Hugging Face hub. A name that is taken must be unloaded first.

        Raises InvalidParameterError, ModelNotFoundError, ModelFileError, InsufficientMemoryError, EngineError;
        ConfigError where the adapter does not fit the model, UnsupportedModelError where it is more than low-rank
        updates of linear maps.
        """
        return await WORKERS.run(self._adapters.load, name, path)

    async def unload_lora_adapter(self, name: str) -> None:
        """Refuses an adapter to new requests; its memory is free once those that have it have ended.

        Raises InvalidParameterError where no adapter has that name.
        """
        self._adapters.unload(name)

    async def embed(
        self,
        prompts: TextInput | Sequence[TextInput],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """As `LLM.embed`; cancelling the task ends it."""
        plan = partial(
            self._encoding.embed,
            prompts,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return await self._encode(plan)

    async def classify(
        self, prompts: TextOrPair | Sequence[TextOrPair], *, truncate_prompt_tokens: int | None = None
    ) -> list[ClassificationOutput]:
        """As `LLM.classify`; cancelling the task ends it."""
        plan = partial(self._encoding.classify, prompts, truncate_prompt_tokens=truncate_prompt_tokens)
        return await self._encode(plan)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[RerankOutput]:
        """As `LLM.rerank`; cancelling the task ends it."""
        plan = partial(
            self._encoding.rerank,
            query,
            documents,
            top_n=top_n,
            instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return await self._encode(plan)

    async def abort(self, request_id: str) -> None:
        """Ends a request, whoever reads it: the reader gets a last output whose finish_reason is `abort`.

        Nothing happens where no such request runs.
        """
        collector = self._registry.find(request_id)
        if collector is not None:
            self._abort(collector)

    async def drain(self, timeout: float | None = None) -> None:
        """Refuses new requests and waits for those that run; after `timeout` seconds it aborts them.

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
        """Raises EngineError where the engine has died or is closed."""
        self._registry.check_health()

    def metrics(self) -> EngineMetrics:
        """What the engine has done and what it holds. Never waits for a running step.

        Raises EngineError once the engine is closed.
        """
        metrics = super().metrics()
        return replace(metrics, requests_refused=metrics.requests_refused + self._registry.refused)

    async def aclose(self) -> None:
        """Frees weights and cache once a running step is over; whoever still reads gets an EngineError."""
        self._engine_thread.stop()
        while self._engine_thread.alive:
            await asyncio.sleep(STEP_CHECK)
        self._adapters.close()

    def close(self) -> None:
        """As `aclose`, but waits for the running step: for programs whose event loop is gone."""
        self._engine_thread.stop()
        self._engine_thread.join()
        self._adapters.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _encode(self, make: Callable[[], Plan[T]]) -> list[T]:
        """Has a plan made in another thread, and carried out by the engine's, portion by portion."""
        with self._registry.encoding():
            plan = await WORKERS.run(make)
            answers: list[bytes] = []
            numbers = iter(plan.numbers)
            for texts in plan.slices(*self._portion):
                portion = Portion(texts, plan.task, 4 * sum(islice(numbers, len(texts))))
                self._engine_thread.encode(portion)
                answers.append(await portion.answer)
            return plan.outputs(answers)

    async def _outputs(
        self,
        asked: _Asked | Callable[[], _Asked],
        sampling_params: object,
        request_id: object,
        *,
        priority: object,
        lora_request: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        params = only_params(sampling_params)
        async with self._collecting(
            asked, params, request_id, priority=priority, lora_request=lora_request
        ) as collector:
            while True:
                output = await collector.next_output()
                yield output
                if output.finished:
                    return

    @asynccontextmanager
    async def _collecting(
        self,
        asked: _Asked | Callable[[], _Asked],
        params: SamplingParams,
        request_id: object,
        *,
        priority: object,
        lora_request: object,
    ) -> AsyncGenerator[Collector, None]:
        """A request from its admission to its end; `asked` is called where it takes long to make."""
        collector = Collector(self._name_of(request_id), params.best_of or params.n)
        self._registry.admit(collector)
        try:

            def read() -> Request:
                given = asked if isinstance(asked, _Asked) else asked()
                if given.search is not None:
                    return self._beam_request(
                        given.prompt,
                        given.search,
                        request_id=collector.request_id,
                        priority=priority,
                        lora_request=lora_request,
                    )
                return self._request(
                    given.prompt,
                    params,
                    request_id=collector.request_id,
                    priority=priority,
                    message_format=given.message_format,
                    lora_request=lora_request,
                )

            long = (
                not isinstance(asked, _Asked)
                or _size(asked.prompt, params) > LONG
                or self._adapters.must_load(lora_request)
                or params.structured_outputs is not None
            )
            collector.begin(await WORKERS.run(read) if long else read())
            if not collector.ended:
                self._engine_thread.add(collector)
            yield collector
        finally:
            self._let_go(collector)

    def _name_of(self, request_id: object) -> str:
        if request_id is None:
            return next(name for name in map(str, self._request_numbers) if self._registry.find(name) is None)
        if not isinstance(request_id, str):
            raise InvalidParameterError(f"request_id is {shown(request_id)}; it must be a string")
        return request_id

    def _abort(self, collector: Collector) -> None:
        """From any loop. The rest is done in the collector's own, where it may be about to add the request."""
        self._registry.remove(collector)
        if collector.loop is asyncio.get_running_loop():
            self._let_go(collector)
            return
        try:
            collector.loop.call_soon_threadsafe(self._let_go, collector)
        except RuntimeError:  # that loop is closed
            self._engine_thread.release(collector)

    def _let_go(self, collector: Collector) -> None:
        self._registry.remove(collector)
        if not collector.ended:
            collector.abort()
            self._engine_thread.release(collector)


def _load(driver: Driver) -> Load:
    metrics = json.loads(driver.metrics())
    return Load(int(metrics["running"]), int(metrics["waiting"]))


def _size(prompt: object, params: SamplingParams) -> int:
    """Characters and tokens that are looked at one by one before a request can begin."""
    contents: list[object] = [prompt]
    if isinstance(prompt, Mapping):
        parts = cast("Mapping[object, object]", prompt)
        contents = [parts.get("prompt", parts.get("prompt_token_ids")), parts.get("suffix") or ""]
    length = sum(len(content) if isinstance(content, Sized) else LONG + 1 for content in contents)
    allowed = len(params.allowed_token_ids or ())
    # Breakers of repeats are looked for in the whole vocabulary.
    words = LONG + 1 if params.dry_multiplier else sum(map(len, (*params.bad_words, *params.bad_words_ids)))
    length += len(params.prediction or ())
    return length + (params.best_of or params.n) * (
        sum(map(len, params.stop)) + len(params.logit_bias) + allowed + words
    )
