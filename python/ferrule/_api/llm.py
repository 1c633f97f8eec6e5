"""`LLM`: offline inference with a model in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, cast

from ferrule._api.arguments import FOREIGN
from ferrule._api.evaluation_methods import EvaluationMethods
from ferrule._api.loaded import beam_params, stream_params
from ferrule._api.loglikelihood import Continuation, loglikelihood_of, pair, read_continuation
from ferrule._api.pooling_methods import PoolingMethods
from ferrule._api.progress import UseTqdm, progress_bar
from ferrule._engine.beams import BeamSearchParams
from ferrule._engine.lora import LoRAAdapter
from ferrule._engine.request import Reports, Request
from ferrule._engine.run import run
from ferrule._params.compatibility import compatible_call
from ferrule._params.lora import LoRA
from ferrule._params.sampling import MAX_LOGPROBS, SamplingParams
from ferrule._text.chat.options import FOREIGN as FOREIGN_CHAT_OPTIONS
from ferrule._text.chat.options import ChatOptions
from ferrule._text.prompt import IMAGES, Prompt, TokensPrompt
from ferrule._validation import check_integer, shown
from ferrule.errors import ChatTemplateError, InvalidParameterError, PromptError
from ferrule.outputs import (
    BeamSearchOutput,
    Candidate,
    Explanation,
    LoglikelihoodOutput,
    RequestOutput,
    StageEffect,
    StreamDelta,
)

if TYPE_CHECKING:
    import os

    from ferrule._native import SampleTrace
    from ferrule._text.chat import Message
    from ferrule._text.parsers import MessageFormat

MAX_CANDIDATES = 1000
"""Maximum number of candidates in the explanation of a token."""


class LLM(PoolingMethods, EvaluationMethods):
    """A model with its tokenizer and engine, for offline inference. Names and meanings are vLLM's.

    The constructor takes the fields of EngineArgs. All methods may be called from several threads at once; their
    requests share the engine's steps.

        >>> from ferrule import LLM, SamplingParams
        >>> llm = LLM(max_model_len=512)  # a directory, a GGUF file, "org/repo", or nothing for the embedded model
        >>> outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
        >>> outputs[0].outputs[0].text
        ' Paris.'
        >>> llm.close()
    """

    @compatible_call(FOREIGN)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        message_format: MessageFormat | None = None,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
    ) -> list[RequestOutput]:
        """Generates completions of one prompt or several; the outputs are in the order of the prompts.

        `sampling_params` is one SamplingParams for all prompts or a list with one for each; None means
        `get_default_sampling_params()`. `priority` is one number or a list; requests with lower numbers are scheduled
        earlier, and None means 0. `lora_request` is the name of an adapter, a LoRARequest, or None for the base model;
        it may be a list too. With a `message_format` each completion has a `message`. `use_tqdm` shows a progress bar
        after two seconds if stderr is a terminal; it may be a class such as `tqdm.tqdm`, whose bar is always shown.
        Ctrl-C ends only the requests of this call.

        Raises PromptError, TokenizerError, InvalidParameterError, QueueFullError, EngineError, PipelineStageError for a
        lost pipeline stage, and the errors of `load_lora_adapter` if an adapter is loaded.
        """
        several = list(prompts) if _is_several(prompts) else [cast("Prompt", prompts)]
        params = self._one_each(sampling_params, len(several))
        priorities = _list_of_one_each("priority", 0 if priority is None else priority, len(several))
        adapters = _list_of_one_each("lora_request", lora_request, len(several))
        requests = [
            self._request(prompt, each, priority=level, message_format=message_format, lora_request=lora)
            for prompt, each, level, lora in zip(several, params, priorities, adapters, strict=True)
        ]
        self._finish(requests, use_tqdm)
        return [request.output() for request in requests]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        message_format: MessageFormat | None = None,
        lora_request: LoRA | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generator[StreamDelta, None, None]:
        """Generates a completion and yields what each step adds; the last delta carries the whole output.

        With a `message_format` each delta has its part of the `message`. `progress` is called during the prefill of a
        long prompt with the number of computed prompt tokens and their total number. Closing the generator, or Ctrl-C,
        ends the request.

        Raises the errors of `generate`; parameters are checked at once.
        """
        params = stream_params(self._params(sampling_params))
        request = self._request(
            prompt,
            params,
            priority=priority,
            reports=Reports(prompt_progress=progress is not None),
            message_format=message_format,
            lora_request=lora_request,
        )
        return self._stream(request, progress)

    def stream_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
    ) -> Generator[tuple[int, StreamDelta], None, None]:
        """Generates completions of several prompts and yields what each step adds, with the index of its prompt.

        Closing the generator ends the requests that still run. The arguments are those of `generate`.

        Raises the errors of `generate`; parameters are checked at once.
        """
        params = self._one_each(sampling_params, len(prompts))
        adapters = _list_of_one_each("lora_request", lora_request, len(prompts))
        given = zip(prompts, map(stream_params, params), adapters, strict=True)
        return self._stream_all([self._request(prompt, each, lora_request=lora) for prompt, each, lora in given])

    @compatible_call(FOREIGN_CHAT_OPTIONS)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answers one conversation or several.

        `options` are the fields of ChatOptions: the template, its variables, and tools. `chat_prompt` documents
        messages. With a parser, by name or `auto` (see `message_format`), each completion's `message` has tool calls
        and reasoning separate from the content. The other arguments are those of `generate`.

        Raises ChatTemplateError, and the errors of `generate`.
        """
        if not isinstance(cast("object", messages), Sequence) or isinstance(messages, (str, bytes)):
            raise ChatTemplateError(f"messages must be a list of messages, got {shown(messages)}")
        message_format = self.message_format(
            tool_call_parser,
            reasoning_parser,
            tools=options.get("tools"),
            chat_template=options.get("chat_template"),
        )
        single = not messages or isinstance(messages[0], str) or not isinstance(messages[0], Sequence)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        return self.generate(
            [self.chat_prompt(conversation, **options) for conversation in conversations],
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            message_format=message_format,
            lora_request=lora_request,
        )

    @compatible_call(FOREIGN)
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        use_tqdm: UseTqdm = False,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Searches for the most likely completions of each prompt by beam search; the best come first.

        The sequences and scores are those of Hugging Face's `generate(num_beams=...)`. Searches share steps, pages and
        the prefix cache with all other requests. The other arguments are those of `generate`.

        Raises the errors of `generate`; InvalidParameterError also if `beam_width` exceeds `max_num_seqs` or the pages
        of the KV cache.
        """
        search = beam_params(params)
        several = list(prompts) if _is_several(prompts) else [cast("Prompt", prompts)]
        priorities = _list_of_one_each("priority", 0 if priority is None else priority, len(several))
        adapters = _list_of_one_each("lora_request", lora_request, len(several))
        requests = [
            self._beam_request(prompt, search, priority=level, lora_request=lora)
            for prompt, level, lora in zip(several, priorities, adapters, strict=True)
        ]
        self._finish(requests, use_tqdm)
        return [request.output() for request in requests]

    def loglikelihood(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Continuation | Sequence[Continuation],
        *,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
    ) -> list[LoglikelihoodOutput]:
        """Computes the log-probability of each continuation after its prompt, before any sampler stage.

        `prompts` is one prompt for all continuations or a list with one for each; so is `lora_request`. A continuation
        is token ids, or text, which is tokenized separately and without special tokens. This is the `loglikelihood`
        of lm-evaluation-harness.

        Raises the errors of `generate`; PromptError also for an empty continuation.
        """
        pairs = pair(list(prompts) if _is_several(prompts) else cast("Prompt", prompts), continuations)
        lengths: list[int] = []
        requests: list[Request] = []
        adapters = _list_of_one_each("lora_request", lora_request, len(pairs))
        for (prompt, continuation), lora in zip(pairs, adapters, strict=True):
            read = self._read_prompt(prompt)
            ids = read_continuation(continuation, self._tokenizer, self._model.vocab_size)
            whole: TokensPrompt = {"prompt_token_ids": [*read.token_ids, *ids]}
            if read.cache_salt is not None:
                whole["cache_salt"] = read.cache_salt
            if read.features:
                whole["multi_modal_data"] = cast("Any", prompt)[IMAGES]
            params = SamplingParams.with_model_defaults(temperature=0, max_tokens=1, prompt_logprobs=0)
            first = len(read.token_ids)
            requests.append(self._request(whole, params, prompt_logprobs_from=first, lora_request=lora))
            lengths.append(len(ids))
        self._finish(requests)
        return [loglikelihood_of(request.output(), length) for request, length in zip(requests, lengths, strict=True)]

    def explain(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        candidates: int = 10,
        lora_request: LoRA | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generator[Explanation, None, None]:
        """Generates a completion and yields, for each token, its candidates and the effect of each sampler stage.

        `progress` is called as in `stream`.

        Raises the errors of `generate`.
        """
        candidates = check_integer("candidates", candidates, 1, MAX_CANDIDATES)
        params = stream_params(self._params(sampling_params))
        reports = Reports(prompt_progress=progress is not None)
        request = self._request(prompt, params, reports=reports, lora_request=lora_request)
        return self._explain(request, candidates, progress)

    def next_token_probs(
        self, prompt: Prompt, top: int = 5, *, lora_request: LoRA | None = None
    ) -> list[tuple[str, float]]:
        """Returns the `top` most likely next tokens as text and probability, before any sampler stage.

        Raises the errors of `generate`.
        """
        top = check_integer("top", top, 1, MAX_LOGPROBS)
        params = SamplingParams.with_model_defaults(temperature=0, max_tokens=1, logprobs=top)
        output = self.generate([prompt], params, use_tqdm=False, lora_request=[lora_request])[0].outputs[0]
        alternatives = sorted((output.logprobs or [{}])[0].values(), key=lambda entry: entry.rank)[:top]
        return [(entry.decoded_token, math.exp(entry.logprob)) for entry in alternatives]

    def load_lora_adapter(self, name: str, path: str | os.PathLike[str]) -> LoRAAdapter:
        """Loads a low-rank adapter in PEFT's format under a name for requests. Running requests continue meanwhile.

        `path` is a directory, or `org/repo` on the Hugging Face hub. A name in use must be unloaded first.

        Raises InvalidParameterError, ModelNotFoundError, ModelFileError, InsufficientMemoryError; ConfigError if the
        adapter does not fit the model, UnsupportedModelError if it has more than low-rank updates of linear layers.
        """
        return self._adapters.load(name, path)

    def unload_lora_adapter(self, name: str) -> None:
        """Unloads an adapter: new requests cannot use it, and its memory is freed when running requests have ended.

        Raises InvalidParameterError if no adapter has that name.
        """
        self._adapters.unload(name)

    def save_state(self, prompt: Prompt, *, lora_request: LoRA | None = None) -> bytes:
        """Computes a prompt and returns its KV cache, to continue from it later or in another process.

        Raises PromptError, TokenizerError, InvalidParameterError, EngineError.
        """
        self._encoding.check_generates("a saved state")
        read = self._read_prompt(prompt)
        if read.features:
            raise PromptError(f"{IMAGES} must be absent, because a saved state holds text only", field=IMAGES)
        return self._driver.save_state(read.token_ids, read.cache_salt, self._adapters.find(lora_request))

    def restore_state(self, state: bytes) -> TokensPrompt:
        """Puts a saved state into the prefix cache and returns its prompt, to continue from.

            prompt = llm.restore_state(state)
            more = llm.tokenize(" And then", add_special_tokens=False)
            llm.generate({"prompt_token_ids": [*prompt["prompt_token_ids"], *more]})  # computes little but `more`

        A state holds whole pages of 16 tokens. Tokens after the last whole page, and tokens for which the cache has no
        space, are computed again. A state fits only the same weights, formats (`quantization`, `kv_cache_dtype`),
        instruction set and version of ferrule. A prompt that was saved with a `cache_salt` needs the same salt; a
        prompt that was saved with an adapter needs the same adapter, under any name.

        Restore only states that you trust. The checksum detects damage, not manipulation: the author of a valid state
        controls the results of requests that begin with its tokens. A state contains its `cache_salt` in clear text.

        Raises InvalidParameterError for bytes that are not a state of this model, and with prefix caching disabled.
        """
        if not isinstance(cast("object", state), (bytes, bytearray, memoryview)):
            raise InvalidParameterError("state", state, "bytes that save_state returned")
        token_ids, _ = self._driver.restore_state(bytes(state))
        return {"prompt_token_ids": token_ids}

    def _finish(self, requests: Sequence[Request], use_tqdm: UseTqdm = False) -> None:
        with (
            closing(run(self._driver, requests, streams=False)) as progress,
            progress_bar(use_tqdm, len(requests)) as bar,
        ):
            for step in progress:
                if step.request.finished:
                    bar.update(1)

    def _params(self, sampling_params: SamplingParams | None) -> SamplingParams:
        return self.get_default_sampling_params() if sampling_params is None else sampling_params

    def _one_each(self, params: object, prompts: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        return _one_each(params, prompts)

    def _stream(
        self, request: Request, prefilled: Callable[[int, int], None] | None
    ) -> Generator[StreamDelta, None, None]:
        with closing(self._stream_all([request], prefilled)) as deltas:
            for _, delta in deltas:
                yield delta

    def _stream_all(
        self, requests: Sequence[Request], prefilled: Callable[[int, int], None] | None = None
    ) -> Generator[tuple[int, StreamDelta], None, None]:
        positions = {request.request_id: position for position, request in enumerate(requests)}
        with closing(run(self._driver, requests, prefilled=prefilled)) as progress:
            for step in progress:
                request, delta = step.request, step.delta
                if not delta.token_ids and not request.finished:
                    continue  # a prefill chunk
                output = request.output() if request.finished else None
                yield positions[request.request_id], replace(delta, output=output)

    def _explain(
        self, request: Request, candidates: int, prefilled: Callable[[int, int], None] | None
    ) -> Generator[Explanation, None, None]:
        position = len(request.prompt.token_ids)
        with closing(run(self._driver, [request], candidates, prefilled=prefilled)) as progress:
            for step in progress:
                for trace in step.step.trace[: len(step.delta.token_ids)]:
                    yield self._explanation(position, trace)
                    position += 1

    def _explanation(self, position: int, trace: SampleTrace) -> Explanation:
        text = self._tokenizer.token_text
        return Explanation(
            position=position,
            token_id=trace.chosen,
            text=text(trace.chosen),
            draw=trace.draw,
            candidates=[
                Candidate(
                    token_id=c.id,
                    text=text(c.id),
                    logit=c.logit,
                    probability=c.probability,
                    final_probability=c.final_probability,
                    dropped_by=c.dropped_by,
                    stage_probabilities=c.stage_probabilities,
                )
                for c in trace.candidates
            ],
            stages=[StageEffect(*stage) for stage in trace.stages],
        )


def _is_several(prompts: object) -> bool:
    return isinstance(prompts, Sequence) and not isinstance(prompts, str)


def _one_each(params: object, prompts: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * prompts
    several = list(cast("Sequence[object]", params)) if isinstance(params, Sequence) else [params]
    checked = [each for each in several if isinstance(each, SamplingParams)]
    if len(checked) != len(several):
        raise InvalidParameterError("sampling_params", cast("object", params), "a SamplingParams or a list of them")
    if len(checked) != prompts:
        raise InvalidParameterError(
            "sampling_params", cast("object", params), f"a list of {prompts}, one for each prompt"
        )
    return checked


def _list_of_one_each(field: str, given: object, prompts: int) -> Sequence[object]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        return [given] * prompts
    several = cast("Sequence[object]", given)
    if len(several) != prompts:
        raise InvalidParameterError(field, several, f"a list of {prompts}, one for each prompt")
    return several
