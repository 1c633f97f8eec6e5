"""`LLM`: a model in this process, for any number of threads."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

from ferrule.checks import check_whole, shown
from ferrule.driver import Driver
from ferrule.errors import ChatTemplateError, InvalidParameterError
from ferrule.loading import EMBEDDED, find_model, read_model_files
from ferrule.options import EngineOptions
from ferrule.outputs import Candidate, Explanation, RequestOutput, StreamDelta
from ferrule.params import MAX_LOGPROBS, SamplingParams
from ferrule.prompt import Prompt, TokensPrompt, check_token_ids, read_prompt
from ferrule.request import Model, Request, check_vocabulary
from ferrule.run import run
from ferrule.shapes import find_shape
from ferrule.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ferrule._native import SampleTrace
    from ferrule.chat import Message

LOAD_FORMATS = ("auto", "dummy")
MAX_CANDIDATES = 1000
"""Tokens that an explanation lists for a step."""


class LLM:
    """A model, its tokenizer and its engine.

    `model` is a directory, `org/repo` on the Hugging Face hub (`revision` a branch, tag or commit of it), or nothing
    for the small model that ships with ferrule. `tokenizer` is another directory or repository to take the
    tokenizer from. `load_format="dummy"` makes random weights instead of reading any. `seed` makes the seeds that
    requests draw repeatable. The other arguments are those of EngineOptions.
    `progress` is called with the bytes of weights loaded so far and in all.

    Safe to use from several threads at once: their requests share the engine's steps.

    Raises ModelNotFoundError, ModelFileError, ConfigError, TokenizerError, InvalidParameterError,
    InsufficientMemoryError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        quantization: str = "auto",
        threads: int | None = None,
        max_model_len: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_memory: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        load_format: str = "auto",
        seed: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        options = EngineOptions(
            quantization=quantization,
            threads=threads,
            max_model_len=max_model_len,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        if load_format not in LOAD_FORMATS:
            raise InvalidParameterError(f"load_format is {shown(load_format)}; it must be auto or dummy")
        self._seeds = random.Random(None if seed is None else check_whole("seed", seed, 0, 2**64 - 1))
        self._files = read_model_files(find_model(model, revision))
        directory = self._files.directory if tokenizer is None else find_model(tokenizer)
        self._tokenizer = Tokenizer(directory)
        self._name = EMBEDDED if model is None else os.fspath(model)
        from ferrule import _native

        weights = None if load_format == "dummy" else os.fspath(self._files.directory)
        engine = _native.Engine(self._files.spec.to_json(), weights, options.to_json(), progress)
        self._driver = Driver(engine)
        self._engine_info: dict[str, Any] = json.loads(self._driver.info())
        wanted = max_model_len or self._files.spec.max_position_embeddings
        held = int(self._engine_info["max_model_len"])
        self._model = Model(
            tokenizer=self._tokenizer,
            vocab_size=self._files.spec.vocab_size,
            max_model_len=held,
            limited_by="max_model_len" if held >= wanted else "the key-value cache (kv_cache_memory)",
            eos_token_ids=self._files.eos_token_ids or self._tokenizer_eos(),
        )
        self._request_numbers = itertools.count()

    @classmethod
    def from_shape(cls, name: str, **options: Any) -> LLM:
        """A model of random numbers in a well-known shape, to measure speed without a download; feed it token ids.

        `name` is one of `ferrule.shapes.shape_names()`; `options` are those of the class but for `load_format`.

        Raises InvalidParameterError, InsufficientMemoryError.
        """
        return cls(find_shape(name), load_format="dummy", **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues one prompt or several at once; the outputs have the order of the prompts.

        One SamplingParams serves all prompts, a list has one for each. Ctrl-C ends the call's own requests only.

        Raises PromptError, TokenizerError, InvalidParameterError, EngineError.
        """
        several = list(prompts) if _is_several(prompts) else [cast("Prompt", prompts)]
        params = _one_each(sampling_params, len(several))
        requests = [self._request(prompt, each) for prompt, each in zip(several, params, strict=True)]
        with closing(run(self._driver, requests)) as progress:
            for _ in progress:
                pass
        return [request.output() for request in requests]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamDelta, None, None]:
        """Continues a prompt and yields what each step brings; the last delta carries the whole output.

        Closing the generator, or Ctrl-C, ends the request.

        Raises as `generate`; parameters are checked at once.
        """
        return self._stream(self._request(prompt, _only_one(sampling_params)))

    def stream_all(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generator[tuple[int, StreamDelta], None, None]:
        """Continues several prompts at once and yields what each step brings, after the position of its prompt.

        As `generate` otherwise, and as `stream`: closing the generator ends what still runs.
        """
        params = _one_each(sampling_params, len(prompts))
        pairs = zip(prompts, map(_only_one, params), strict=True)
        return self._stream_all([self._request(prompt, each) for prompt, each in pairs])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several at once.

        Raises ChatTemplateError, and as `generate`.
        """
        if not isinstance(cast("object", messages), Sequence) or isinstance(messages, (str, bytes)):
            raise ChatTemplateError(f"messages is {shown(messages)}; it must be a list of messages")
        single = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokensPrompt:
        """A conversation as the prompt that `generate` and `stream` take.

        `chat_template` is a template or the name of one of the model's; the template itself writes the special tokens.

        Raises ChatTemplateError, TokenizerError.
        """
        from ferrule.chat import render_chat

        text = render_chat(
            self._chat_template(chat_template),
            messages,
            special_tokens=self._tokenizer.special_tokens,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            arguments=chat_template_kwargs,
        )
        return {"prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}

    def explain(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, candidates: int = 10
    ) -> Generator[Explanation, None, None]:
        """Continues a prompt and yields, for each token, what the sampler saw and why it chose as it did.

        Raises as `generate`.
        """
        candidates = check_whole("candidates", candidates, 1, MAX_CANDIDATES)
        params = _only_one(sampling_params)
        return self._explain(self._request(prompt, params), candidates)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits after each token: float32 `[tokens, vocab_size]`.

        Raises PromptError, EngineError.
        """
        import numpy as np

        ids = check_token_ids(token_ids, self._model.vocab_size)
        return np.frombuffer(self._driver.logits(ids), dtype=np.float32).reshape(len(ids), self._model.vocab_size)

    def next_token_probs(self, prompt: Prompt, top: int = 5) -> list[tuple[str, float]]:
        """The likeliest next tokens, as text and probability, before any sampler stage.

        Raises as `generate`.
        """
        top = check_whole("top", top, 1, MAX_LOGPROBS)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=top)
        output = self.generate([prompt], params)[0].outputs[0]
        alternatives = sorted((output.logprobs or [{}])[0].values(), key=lambda entry: entry.rank)[:top]
        return [(entry.decoded_token, math.exp(entry.logprob)) for entry in alternatives]

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Raises TokenizerError, PromptError.
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids. An id of the vocabulary for which the tokenizer has no token is empty text.

        Raises TokenizerError, PromptError.
        """
        ids = check_token_ids(token_ids, self._model.vocab_size, may_be_empty=True)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of a single token, special or not; U+FFFD where it is part of a character."""
        return self._tokenizer.token_text(check_token_ids([token_id], self._model.vocab_size)[0])

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends; None in fields that it leaves open."""
        return self._files.defaults

    def info(self) -> dict[str, Any]:
        """What is loaded and how: the model's sizes, formats, bytes and limits, and the machine's part in it."""
        spec = self._files.spec
        return {
            "model": self._name,
            "directory": os.fspath(self._files.directory),
            "architecture": spec.architecture,
            "layers": len(spec.layers),
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "context": spec.max_position_embeddings,
            "tokenizer": self._tokenizer.available,
            "chat_template": "default" in self._tokenizer.chat_templates,
            "eos_token_ids": list(self._model.eos_token_ids),
            **self._engine_info,
        }

    def close(self) -> None:
        """Frees weights and cache. A call that still runs in another thread gets an EngineError."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, prompt: object, params: SamplingParams) -> Request:
        model = self._model
        check_vocabulary(params, model.vocab_size)
        read = read_prompt(
            prompt,
            self._tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            limited_by=model.limited_by,
        )
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        number = str(next(self._request_numbers))
        return Request(number, read, params.completed(self._files.defaults), seed, model)

    def _stream(self, request: Request) -> Generator[StreamDelta, None, None]:
        with closing(self._stream_all([request])) as deltas:
            for _, delta in deltas:
                yield delta

    def _stream_all(self, requests: Sequence[Request]) -> Generator[tuple[int, StreamDelta], None, None]:
        positions = {request.request_id: position for position, request in enumerate(requests)}
        with closing(run(self._driver, requests)) as progress:
            for step in progress:
                request, delta = step.request, step.delta
                output = request.output() if request.finished else None
                yield positions[request.request_id], replace(delta, output=output)

    def _explain(self, request: Request, candidates: int) -> Generator[Explanation, None, None]:
        position = len(request.prompt.token_ids)
        with closing(run(self._driver, [request], trace=candidates)) as progress:
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
                Candidate(c.id, text(c.id), c.logit, c.probability, c.final_probability, c.dropped_by)
                for c in trace.candidates
            ],
        )

    def _chat_template(self, chosen: str | None) -> str:
        templates = self._tokenizer.chat_templates
        if chosen is None:
            if "default" not in templates:
                where = f"{self._files.directory}: neither chat_template.jinja nor tokenizer_config.json has one"
                raise ChatTemplateError(f"the model has no chat template ({where}); give chat_template")
            return templates["default"]
        return templates.get(chosen, chosen)

    def _tokenizer_eos(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence token, for models whose configuration names none."""
        token = self._tokenizer.special_tokens.get("eos_token")
        token_id = None if token is None else self._tokenizer.token_id(token)
        return () if token_id is None else (token_id,)


def _is_several(prompts: object) -> bool:
    return isinstance(prompts, Sequence) and not isinstance(prompts, str)


def _one_each(params: object, prompts: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * prompts
    several = list(cast("Sequence[object]", params)) if isinstance(params, Sequence) else [params]
    checked = [each for each in several if isinstance(each, SamplingParams)]
    if len(checked) != len(several):
        limit = "a SamplingParams or a list of them"
        raise InvalidParameterError(f"sampling_params is {shown(cast('object', params))}; it must be {limit}")
    if len(checked) != prompts:
        raise InvalidParameterError(
            f"sampling_params has {len(checked)} entries; it must have one for each of {prompts} prompts"
        )
    return checked


def _only_one(params: object) -> SamplingParams:
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise InvalidParameterError(f"sampling_params is {shown(params)}; it must be a SamplingParams")
    if params.n != 1:
        raise InvalidParameterError(f"n is {params.n}; a stream has one completion: the limit is 1")
    return params
