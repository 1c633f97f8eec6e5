"""`LLM`: a model in this process, for any number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ferrule._api.distillation import check_count, export, top_logprobs_task, unpack
from ferrule._api.loaded import LoadedModel, beam_params, stream_params
from ferrule._api.loglikelihood import Continuation, loglikelihood_of, pair, read_continuation
from ferrule._engine.beams import BeamSearchParams
from ferrule._engine.encoding import Plan
from ferrule._engine.encoding.texts import Text, TextInput, TextOrPair, portions
from ferrule._engine.lora import LoRA, LoRAAdapter
from ferrule._engine.request import Request
from ferrule._engine.run import run
from ferrule._params.sampling import MAX_LOGPROBS, SamplingParams
from ferrule._text.prompt import Prompt, TokensPrompt, check_token_ids
from ferrule._validation import check_whole, shown
from ferrule.errors import ChatTemplateError, InvalidParameterError, PromptError
from ferrule.outputs import (
    BeamSearchOutput,
    Candidate,
    ClassificationOutput,
    EmbeddingOutput,
    Explanation,
    LoglikelihoodOutput,
    RequestOutput,
    RerankOutput,
    StageEffect,
    StreamDelta,
    TopLogprobs,
)

if TYPE_CHECKING:
    import os

    import numpy as np
    import numpy.typing as npt

    from ferrule._evaluation import Comparison, Perplexity, Subject, TextOrTokens
    from ferrule._native import SampleTrace
    from ferrule._text.chat import Message, Tool
    from ferrule._text.parsers import MessageFormat

T = TypeVar("T")

MAX_CANDIDATES = 1000
"""Tokens that an explanation lists for a step."""


class LLM(LoadedModel):
    """A model, its tokenizer and its engine, for programs that wait for their answers.

    Safe to use from several threads at once: their requests share the engine's steps.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        message_format: MessageFormat | None = None,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
    ) -> list[RequestOutput]:
        """Continues one prompt or several at once; the outputs have the order of the prompts.

        One SamplingParams serves all prompts, a list has one for each; likewise `priority`, where lower is scheduled
        earlier, and `lora_request`: the name of an adapter, a LoRARequest, which loads what is not loaded yet, or None
        for the model alone. With a `message_format` each completion has its `message`. Ctrl-C ends the call's own
        requests only.

        Raises PromptError, TokenizerError, InvalidParameterError, QueueFullError, EngineError; where an adapter is
        loaded, as `load_lora_adapter`.
        """
        several = list(prompts) if _is_several(prompts) else [cast("Prompt", prompts)]
        params = _one_each(sampling_params, len(several))
        priorities = _list_of_one_each("priority", priority, len(several))
        adapters = _list_of_one_each("lora_request", lora_request, len(several))
        requests = [
            self._request(prompt, each, priority=level, message_format=message_format, lora_request=lora)
            for prompt, each, level, lora in zip(several, params, priorities, adapters, strict=True)
        ]
        self._finish(requests)
        return [request.output() for request in requests]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        message_format: MessageFormat | None = None,
        lora_request: LoRA | None = None,
    ) -> Generator[StreamDelta, None, None]:
        """Continues a prompt and yields what each step brings; the last delta carries the whole output.

        With a `message_format` each delta has its part of the `message`. Closing the generator, or Ctrl-C, ends the
        request.

        Raises as `generate`; parameters are checked at once.
        """
        params = stream_params(sampling_params)
        return self._stream(
            self._request(prompt, params, priority=priority, message_format=message_format, lora_request=lora_request)
        )

    def stream_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
    ) -> Generator[tuple[int, StreamDelta], None, None]:
        """Continues several prompts at once and yields what each step brings, after the position of its prompt.

        As `generate` otherwise, and as `stream`: closing the generator ends what still runs.
        """
        params = _one_each(sampling_params, len(prompts))
        adapters = _list_of_one_each("lora_request", lora_request, len(prompts))
        given = zip(prompts, map(stream_params, params), adapters, strict=True)
        return self._stream_all([self._request(prompt, each, lora_request=lora) for prompt, each, lora in given])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several at once; `priority` and `lora_request` are those of `generate`.

        What the template gets is explained at `chat_prompt`. Where a parser is chosen, by name or with `auto` as
        `message_format` explains, each completion's `message` has its tool calls and its reasoning apart from the
        answer.

        Raises ChatTemplateError, and as `generate`.
        """
        if not isinstance(cast("object", messages), Sequence) or isinstance(messages, (str, bytes)):
            raise ChatTemplateError(f"messages is {shown(messages)}; it must be a list of messages")
        message_format = self.message_format(
            tool_call_parser, reasoning_parser, tools=tools, chat_template=chat_template
        )
        single = not messages or isinstance(messages[0], str) or not isinstance(messages[0], Sequence)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(
            prompts, sampling_params, priority=priority, message_format=message_format, lora_request=lora_request
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, as far as a beam search finds them; the best first.

        The search is that of Hugging Face's `generate(num_beams=...)`: same sequences, same scores. It shares steps,
        pages and the prefix cache with all other requests, and finds the same beside any of them. `priority` and
        `lora_request` are as in `generate`.

        Raises InvalidParameterError too where `beam_width` is more than `max_num_seqs`, or more than the key-value
        cache has pages for, and as `generate`.
        """
        search = beam_params(params)
        several = list(prompts) if _is_several(prompts) else [cast("Prompt", prompts)]
        priorities = _list_of_one_each("priority", priority, len(several))
        adapters = _list_of_one_each("lora_request", lora_request, len(several))
        requests = [
            self._beam_request(prompt, search, priority=level, lora_request=lora)
            for prompt, level, lora in zip(several, priorities, adapters, strict=True)
        ]
        self._finish(requests)
        return [request.output() for request in requests]

    def loglikelihood(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Continuation | Sequence[Continuation],
        *,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
    ) -> list[LoglikelihoodOutput]:
        """How likely each continuation is after its prompt, before any sampler stage.

        One prompt serves all continuations, a list has one for each; likewise `lora_request`. Continuations are text,
        tokenized by itself and without special tokens, or token ids. (What lm-evaluation-harness calls loglikelihood.)

        Raises as `generate`; PromptError too for a continuation that is empty.
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
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            first = len(read.token_ids)
            requests.append(self._request(whole, params, prompt_logprobs_from=first, lora_request=lora))
            lengths.append(len(ids))
        self._finish(requests)
        return [loglikelihood_of(request.output(), length) for request, length in zip(requests, lengths, strict=True)]

    def embed(
        self,
        prompts: TextInput | Sequence[TextInput],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """Turns texts into embeddings, many at once; the outputs have the order of the prompts.

        Which hidden state stands for a text is `pooling`: `"cls"` (the first token's), `"mean"`, `"last"`, or `"none"`,
        which gives that of every token. Where it is None the model's files decide (sentence-transformers'
        `modules.json`), else it is the last token of a decoder, and the mean of an encoder. `normalize` makes the
        length of each embedding 1: where it is None, as these files say, else it does. `dimensions` keeps so many of
        the leading numbers, for models that were trained for it (Matryoshka), before that.

        `prompt_name` puts a prompt of the model's in front of each text, one of those that
        `config_sentence_transformers.json` names; None for its default, if it has one. The special tokens are those
        that the tokenizer adds. A text of more tokens than the model takes is an error, unless `truncate_prompt_tokens`
        says how many to keep of its beginning, special tokens included; -1 for as many as the model takes.

        Embeddings do not depend on the texts beside them.

        Raises PromptError, TokenizerError, InvalidParameterError, UnsupportedModelError, InsufficientMemoryError,
        EngineError.
        """
        plan = self._encoding.embed(
            prompts,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return self._encode(plan)

    def classify(
        self, prompts: TextOrPair | Sequence[TextOrPair], *, truncate_prompt_tokens: int | None = None
    ) -> list[ClassificationOutput]:
        """Gives each text, or pair of texts, a score for each label of the model's classifier.

        A pair is a tuple of two strings. `truncate_prompt_tokens` is as in `embed`; of a pair the longer text is cut
        first.

        Raises UnsupportedTaskError for a model without a classifier, and as `embed`.
        """
        plan = self._encoding.classify(prompts, truncate_prompt_tokens=truncate_prompt_tokens)
        return self._encode(plan)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[RerankOutput]:
        """Puts documents in the order of their relevance to a query, the most relevant first; the `top_n` best.

        What decides is what the model was made for. A cross-encoder reads the query and a document together, and the
        sigmoid of its one label is the relevance. A decoder whose tokenizer knows Qwen's marks is asked in the way of
        Qwen3-Reranker, and the relevance is the probability of `yes` against `no`; `instruction` says what is looked
        for. Any other model embeds the query and the documents, with its prompts for either, if it has them: the
        relevance is (1 + cosine) / 2.

        `truncate_prompt_tokens` is as in `embed`; of a query and a document that are read together the longer one is
        cut first, and by a decoder the document.

        Raises UnsupportedTaskError for a classifier of several labels, and as `embed`.
        """
        plan = self._encoding.rerank(
            query,
            documents,
            top_n=top_n,
            instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return self._encode(plan)

    def explain(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        candidates: int = 10,
        lora_request: LoRA | None = None,
    ) -> Generator[Explanation, None, None]:
        """Continues a prompt and yields, for each token, what the sampler saw and why it chose as it did.

        Raises as `generate`.
        """
        candidates = check_whole("candidates", candidates, 1, MAX_CANDIDATES)
        params = stream_params(sampling_params)
        return self._explain(self._request(prompt, params, lora_request=lora_request), candidates)

    def logits(
        self, token_ids: Sequence[int], *, first: int = 0, lora_request: LoRA | None = None
    ) -> npt.NDArray[np.float32]:
        """The logits after each token from the one at `first` on: float32 `[tokens - first, vocab_size]`.

        Raises PromptError, InvalidParameterError, EngineError.
        """
        import numpy as np

        self._encoding.check_generates("logits")
        ids = check_token_ids(token_ids, self._model.vocab_size)
        first = check_whole("first", first, 0, len(ids) - 1)
        logits = self._driver.logits(ids, self._adapters.find(lora_request), first)
        return np.frombuffer(logits, dtype=np.float32).reshape(len(ids) - first, self._model.vocab_size)

    def perplexity(
        self,
        texts: TextOrTokens | Sequence[TextOrTokens],
        *,
        window: int | None = None,
        stride: int | None = None,
        min_context: int = 0,
        limit: int | None = None,
        lora_request: LoRA | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Perplexity:
        """How well the model predicts texts, each by itself: the perplexity of all their tokens, with its error.

        A text is read in windows of `window` tokens (512, or the context where that is less), which begin every
        `stride` tokens (half a window); each scores what the one before it did not. Every token is scored once, with
        half a window of context at the least but for those of a text's first window; `min_context` leaves out tokens
        with less context than that. Of a text without special tokens in front the first token is not scored. `limit`
        stops after so many windows. `progress` is called with the windows done and those in all.

        Raises PromptError for texts without a token to score, TokenizerError, InvalidParameterError,
        UnsupportedTaskError, InsufficientMemoryError, EngineError.
        """
        from ferrule._evaluation import perplexity

        subject = self._subject(lora_request)
        return perplexity(
            subject, texts, window=window, stride=stride, min_context=min_context, limit=limit, progress=progress
        )

    def compare(
        self,
        reference: LLM,
        texts: TextOrTokens | Sequence[TextOrTokens],
        *,
        window: int | None = None,
        stride: int | None = None,
        min_context: int = 0,
        limit: int | None = None,
        worst: int = 10,
        lora_request: LoRA | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Comparison:
        """How far the model is from a reference: the same weights in another format, or a model it was made from.

        Of the reference's distribution before each token that `perplexity` would score, the Kullback-Leibler divergence
        of this model's: mean and tail, the `worst` tokens with their context, how often both hold the same token for
        the likeliest, and the ratio of perplexities with the error of the paired difference. `lora_request` is for this
        model alone.

        Raises InvalidParameterError where the vocabularies differ, and as `perplexity`.
        """
        from ferrule._evaluation import compare

        if not isinstance(cast("object", reference), LLM):
            raise InvalidParameterError(f"reference is {shown(reference)}; it must be an LLM")
        return compare(
            self._subject(lora_request),
            reference._subject(None),
            texts,
            window=window,
            stride=stride,
            min_context=min_context,
            limit=limit,
            worst=worst,
            progress=progress,
        )

    def top_logprobs(self, texts: Iterable[TextInput], k: int) -> Generator[TopLogprobs, None, None]:
        """The `k` likeliest tokens after each token of each text: what a student of this model learns from.

        Outputs have the order of the texts. These are taken as they are needed, so that there may be any number, and as
        many as a step holds are computed side by side. What a text gets is the same to the last bit whatever stands
        beside it. A text may be token ids, `{"prompt_token_ids": [...]}`; special tokens are those that the tokenizer
        adds.

        Raises PromptError, TokenizerError, InvalidParameterError, UnsupportedTaskError, InsufficientMemoryError,
        EngineError.
        """
        self._encoding.check_generates("log-probabilities")
        return self._top_logprobs(self._read_each(texts), check_count(k, self._model.vocab_size))

    def export_top_logprobs(
        self,
        texts: Iterable[TextInput],
        k: int,
        out_dir: str | os.PathLike[str],
        *,
        shard_size: int = 1 << 20,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Writes `top_logprobs` of any number of texts as safetensors files; how many texts there are now.

        A shard is closed with the text that brings it to `shard_size` tokens: the file `shard-00000.safetensors` holds
        `token_ids` int32 `[tokens]`, `offsets` int64 `[texts + 1]` (text `i` has the tokens from `offsets[i]` to
        `offsets[i + 1]`), `top_ids` int32 and `top_logprobs` float32 `[tokens, k]`. `index.json` lists the shards, and
        says what they are of and whether that is all. Files appear whole or not at all. A directory whose export was
        interrupted is gone on with, if the same texts come first; one that holds anything else is refused. `progress`
        is called with the texts and the tokens that are written.

        Raises InvalidParameterError, OSError, and as `top_logprobs`.
        """
        self._encoding.check_generates("log-probabilities")
        k = check_count(k, self._model.vocab_size)
        info = self.info()
        made_of = {name: info[name] for name in ("model", "quantization", "kv_cache_dtype", "vocab_size")}
        return export(
            self._read_each(texts),
            lambda rest: self._top_logprobs(rest, k),
            out_dir,
            made_of={**made_of, "k": k},
            shard_size=shard_size,
            progress=progress,
        )

    def next_token_probs(
        self, prompt: Prompt, top: int = 5, *, lora_request: LoRA | None = None
    ) -> list[tuple[str, float]]:
        """The likeliest next tokens, as text and probability, before any sampler stage.

        Raises as `generate`.
        """
        top = check_whole("top", top, 1, MAX_LOGPROBS)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=top)
        output = self.generate([prompt], params, lora_request=[lora_request])[0].outputs[0]
        alternatives = sorted((output.logprobs or [{}])[0].values(), key=lambda entry: entry.rank)[:top]
        return [(entry.decoded_token, math.exp(entry.logprob)) for entry in alternatives]

    def load_lora_adapter(self, name: str, path: str | os.PathLike[str]) -> LoRAAdapter:
        """Loads a low-rank adapter that PEFT saved, for requests to ask for by `name`; those that run go on meanwhile.

        `path` is a directory, or `org/repo` on the Hugging Face hub. A name that is taken must be unloaded first.

        Raises InvalidParameterError, ModelNotFoundError, ModelFileError, InsufficientMemoryError; ConfigError where the
        adapter does not fit the model, UnsupportedModelError where it is more than low-rank updates of linear maps.
        """
        return self._adapters.load(name, path)

    def unload_lora_adapter(self, name: str) -> None:
        """Refuses an adapter to new requests; its memory is free once those that have it have ended.

        Raises InvalidParameterError where no adapter has that name.
        """
        self._adapters.unload(name)

    def save_state(self, prompt: Prompt, *, lora_request: LoRA | None = None) -> bytes:
        """What the engine computes of a prompt, its keys and values, to go on from there later or elsewhere.

        Raises PromptError, TokenizerError, InvalidParameterError, EngineError.
        """
        self._encoding.check_generates("state to go on from")
        read = self._read_prompt(prompt)
        return self._driver.save_state(read.token_ids, read.cache_salt, self._adapters.find(lora_request))

    def restore_state(self, state: bytes) -> TokensPrompt:
        """Puts a saved state into the prefix cache; the prompt that it is of, to continue from.

            prompt = llm.restore_state(state)
            more = llm.tokenize(" And then", add_special_tokens=False)
            llm.generate({"prompt_token_ids": [*prompt["prompt_token_ids"], *more]})  # computes little but `more`

        A state holds whole pages of 16 tokens: those after the last one are computed again, and so is what the cache
        had no room for. It fits the same weights, formats (`quantization`, `kv_cache_dtype`), instruction set and
        version of ferrule alone. A prompt that was saved with a `cache_salt` needs the same one again, one that was
        saved with an adapter the same adapter, under whatever name.

        Restore only states that you trust. The checksum finds damage, not malice: whoever writes a valid state decides
        what requests that begin with its tokens get. And a state holds its `cache_salt` in clear.

        Raises InvalidParameterError for bytes that are no state of this model, and where prefix caching is off.
        """
        if not isinstance(cast("object", state), (bytes, bytearray, memoryview)):
            raise InvalidParameterError(f"state is {shown(state)}; it must be what save_state gave")
        token_ids, _ = self._driver.restore_state(bytes(state))
        return {"prompt_token_ids": token_ids}

    def _subject(self, lora_request: LoRA | None) -> Subject:
        from ferrule._evaluation import Subject

        self._encoding.check_generates("logits")

        def logits(token_ids: list[int], first: int) -> npt.NDArray[np.float32]:
            return self.logits(token_ids, first=first, lora_request=lora_request)

        model = self._model
        return Subject(self._name, self._tokenizer, model.vocab_size, model.max_model_len, logits)

    def _read_each(self, texts: Iterable[TextInput]) -> Iterator[Text]:
        """The texts, read as they are taken."""
        if isinstance(texts, (str, bytes)) or not isinstance(cast("object", texts), Iterable):
            raise PromptError(
                f"texts is {shown(cast('object', texts))}; it must be a list or another iterable of texts"
            )
        return (self._encoding.read("texts", index, text) for index, text in enumerate(texts))

    def _top_logprobs(self, texts: Iterable[Text], k: int) -> Generator[TopLogprobs, None, None]:
        task = top_logprobs_task(k)
        for portion in portions(texts, *self._portion):
            yield from unpack(self._driver.encode(portion, task), portion, k)

    def _encode(self, plan: Plan[T]) -> list[T]:
        return plan.outputs(self._driver.encode_all(plan.slices(*self._portion), plan.task))

    def _finish(self, requests: Sequence[Request]) -> None:
        with closing(run(self._driver, requests, streams=False)) as progress:
            for _ in progress:
                pass

    def _stream(self, request: Request) -> Generator[StreamDelta, None, None]:
        with closing(self._stream_all([request])) as deltas:
            for _, delta in deltas:
                yield delta

    def _stream_all(self, requests: Sequence[Request]) -> Generator[tuple[int, StreamDelta], None, None]:
        positions = {request.request_id: position for position, request in enumerate(requests)}
        with closing(run(self._driver, requests)) as progress:
            for step in progress:
                request, delta = step.request, step.delta
                if not delta.token_ids and not request.finished:
                    continue  # a part of the prompt: nothing for who reads along
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


def _list_of_one_each(field: str, given: object, prompts: int) -> Sequence[object]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        return [given] * prompts
    several = cast("Sequence[object]", given)
    if len(several) != prompts:
        raise InvalidParameterError(
            f"{field} has {len(several)} entries; it must have one for each of {prompts} prompts"
        )
    return several
