"""`LLM`: offline inference with a model in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, Unpack, cast

from ferrule._api.arguments import FOREIGN, FOREIGN_POOLING, pooling_arguments
from ferrule._api.distillation import check_count, export, top_logprobs_task, unpack
from ferrule._api.loaded import LoadedModel, beam_params, stream_params
from ferrule._api.loglikelihood import Continuation, loglikelihood_of, pair, read_continuation
from ferrule._api.progress import ProgressBar, UseTqdm, progress_bar
from ferrule._engine.beams import BeamSearchParams
from ferrule._engine.encoding import Plan
from ferrule._engine.encoding.texts import Text, TextInput, TextOrPair, portions
from ferrule._engine.lora import LoRAAdapter
from ferrule._engine.request import Reports, Request
from ferrule._engine.run import run
from ferrule._params.compatibility import compatible_call
from ferrule._params.lora import LoRA
from ferrule._params.pooling import PoolingParams
from ferrule._params.sampling import MAX_LOGPROBS, SamplingParams
from ferrule._text.chat.options import FOREIGN as FOREIGN_CHAT_OPTIONS
from ferrule._text.chat.options import ChatOptions
from ferrule._text.prompt import Prompt, TokensPrompt, check_token_ids
from ferrule._validation import check_integer, shown
from ferrule.errors import ChatTemplateError, InvalidParameterError, PromptError
from ferrule.outputs import (
    BeamSearchOutput,
    Candidate,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    Explanation,
    LoglikelihoodOutput,
    RequestOutput,
    RerankOutput,
    ScoringRequestOutput,
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
    from ferrule._text.chat import Message
    from ferrule._text.parsers import MessageFormat

T = TypeVar("T")

MAX_CANDIDATES = 1000
"""Maximum number of candidates in the explanation of a token."""


class LLM(LoadedModel):
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
            params = SamplingParams.with_model_defaults(temperature=0, max_tokens=1, prompt_logprobs=0)
            first = len(read.token_ids)
            requests.append(self._request(whole, params, prompt_logprobs_from=first, lora_request=lora))
            lengths.append(len(ids))
        self._finish(requests)
        return [loglikelihood_of(request.output(), length) for request, length in zip(requests, lengths, strict=True)]

    @compatible_call(FOREIGN_POOLING)
    def embed(
        self,
        prompts: TextInput | Sequence[TextInput],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Computes embeddings of texts; the outputs are in the order of the prompts.

        `pooling` selects the hidden state of a text: `"cls"` (first token), `"mean"`, `"last"`, or `"none"` for the
        hidden states of all tokens. None follows the model's files (sentence-transformers' `modules.json`); the default
        is `"last"` for a decoder and `"mean"` for an encoder. `normalize` scales embeddings to length 1; None follows
        the model's files, and the default is True. `dimensions` is the number of leading dimensions to keep before
        normalization, for models trained for it (Matryoshka). `pooling_params` sets some of these as one object, as in
        vLLM.

        `prompt_name` selects one of the model's prompts, by its name in `config_sentence_transformers.json`, and puts
        it before each text; None means the default prompt, if there is one. A text that is longer than the model's
        limit is an error, unless `truncate_prompt_tokens` sets the number of tokens to keep from its beginning, special
        tokens included; -1 keeps as many as the limit allows.

        The embedding of a text does not depend on the other texts of the call.

        Raises PromptError, TokenizerError, InvalidParameterError, UnsupportedModelError, InsufficientMemoryError,
        EngineError.
        """
        plan = self._encoding.embed(
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
        return self._encode(plan, use_tqdm)

    @compatible_call(FOREIGN_POOLING)
    def classify(
        self,
        prompts: TextOrPair | Sequence[TextOrPair],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Computes the probability of each label of the model's classifier for each text or pair of texts.

        A pair is a tuple of two strings. `truncate_prompt_tokens` works as in `embed` and truncates the longer text of
        a pair first.

        Raises UnsupportedTaskError for a model without a classifier, and the errors of `embed`.
        """
        given = pooling_arguments(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens)
        return self._encode(self._encoding.classify(prompts, **given), use_tqdm)

    @compatible_call(FOREIGN_POOLING)
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Computes the similarity of pairs of texts: one text with each of several, or two lists pair by pair.

        The score of a cross-encoder is the sigmoid of its logit, the score of Qwen3-Reranker is the probability of
        "yes", and the score of any other model is the cosine similarity of the two embeddings.
        `truncate_prompt_tokens` works as in `classify`.

        Raises UnsupportedTaskError for a classifier of several labels, and the errors of `embed`.
        """
        given = pooling_arguments(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens)
        return self._encode(self._encoding.score(data_1, data_2, **given), use_tqdm)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[RerankOutput]:
        """Ranks documents by their relevance to a query and returns the `top_n` most relevant, the best first.

        For a cross-encoder the relevance is the sigmoid of its logit. For a decoder with the tokens of Qwen3-Reranker,
        which answers "yes" or "no", it is the probability of "yes", and `instruction` describes the search. Any other
        model embeds the query and the documents, each with the model's prompt for it if there is one, and the
        relevance is (1 + cosine similarity) / 2.

        `truncate_prompt_tokens` works as in `embed`. A cross-encoder reads query and document together and truncates
        the longer of the two first; a decoder truncates the document.

        Raises UnsupportedTaskError for a classifier of several labels, and the errors of `embed`.
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

    def logits(
        self, token_ids: Sequence[int], *, first: int = 0, lora_request: LoRA | None = None
    ) -> npt.NDArray[np.float32]:
        """Computes the logits after each token from index `first` on: float32 `[tokens - first, vocab_size]`.

        Raises PromptError, InvalidParameterError, EngineError.
        """
        import numpy as np

        self._encoding.check_generates("logits")
        ids = check_token_ids(token_ids, self._model.vocab_size)
        first = check_integer("first", first, 0, len(ids) - 1)
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
        """Computes the perplexity of a model on texts, with its standard error. Texts do not share context.

        A text is read in windows of `window` tokens (default: 512, or the context length if that is less), which begin
        every `stride` tokens (default: half a window). Each window scores the tokens that the previous one did not
        score. So every token is scored once, with at least `window - stride` tokens of context except in the first
        window; tokens with less context than `min_context` are not scored. The first token of a text without leading
        special tokens is not scored. `limit` is the maximum number of windows. `progress` is called with the number of
        finished windows and their total number.

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
        """Compares the model with a reference, such as the same weights in another format or the original model.

        For each token that `perplexity` would score, it computes the Kullback-Leibler divergence of this model's
        distribution from the reference's. The result has the mean and quantiles of the divergence, the `worst` tokens
        with their context, the share of tokens for which both models predict the same most likely token, and the ratio
        of perplexities with the standard error of the paired difference. `lora_request` applies to this model only.

        Raises InvalidParameterError if the vocabularies differ, and the errors of `perplexity`.
        """
        from ferrule._evaluation import compare_each

        if not isinstance(cast("object", reference), LLM):
            raise InvalidParameterError("reference", reference, "an LLM")
        subject = self._subject(lora_request)
        [comparison] = compare_each(
            [subject],
            reference._subject(None),
            texts,
            reader=subject,
            window=window,
            stride=stride,
            min_context=min_context,
            limit=limit,
            worst=worst,
            progress=progress,
        )
        return comparison

    def compare_each(
        self,
        models: Sequence[LLM],
        texts: TextOrTokens | Sequence[TextOrTokens],
        *,
        window: int | None = None,
        stride: int | None = None,
        min_context: int = 0,
        limit: int | None = None,
        worst: int = 10,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Comparison]:
        """Compares several models with this one as their reference, such as its quantizations.

        The results are those of `model.compare(self, ...)` for each model, but this model reads the texts with its
        tokenizer, and computes its logits only once.

        Raises InvalidParameterError if a vocabulary differs, and the errors of `perplexity`.
        """
        from ferrule._evaluation import compare_each

        is_list = isinstance(cast("object", models), Sequence)
        if not is_list or not models or not all(isinstance(cast("object", each), LLM) for each in models):
            raise InvalidParameterError("models", models, "a list of at least one LLM")
        reference = self._subject(None)
        return compare_each(
            [model._subject(None) for model in models],
            reference,
            texts,
            reader=reference,
            window=window,
            stride=stride,
            min_context=min_context,
            limit=limit,
            worst=worst,
            progress=progress,
        )

    def top_logprobs(self, texts: Iterable[TextInput], k: int) -> Generator[TopLogprobs, None, None]:
        """Yields the `k` most likely tokens after each token of each text, as training data for distillation.

        Outputs are in the order of the texts. Texts are read lazily, so there may be any number of them. A step
        computes as many texts as it holds; the result of a text does not depend on the other texts. A text may be given
        as token ids, `{"prompt_token_ids": [...]}`; otherwise the tokenizer adds its special tokens.

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
        """Writes `top_logprobs` of any number of texts to safetensors files and returns the number of texts written.

        A shard ends with the text that brings it to `shard_size` tokens. The file `shard-00000.safetensors` holds
        `token_ids` int32 `[tokens]`, `offsets` int64 `[texts + 1]` (text `i` has the tokens from `offsets[i]` to
        `offsets[i + 1]`), `top_ids` int32 and `top_logprobs` float32 `[tokens, k]`. `index.json` lists the shards, the
        model and its formats, and whether the export is complete. Files are written atomically. An interrupted export
        resumes if `texts` begins with the same texts; a directory with any other content is an error. `progress` is
        called with the numbers of texts and tokens written.

        Raises InvalidParameterError, OSError, and the errors of `top_logprobs`.
        """
        self._encoding.check_generates("log-probabilities")
        k = check_count(k, self._model.vocab_size)
        info = self.info()
        source = {name: info[name] for name in ("model", "quantization", "kv_cache_dtype", "vocab_size")}
        return export(
            self._read_each(texts),
            lambda rest: self._top_logprobs(rest, k),
            out_dir,
            source={**source, "k": k},
            shard_size=shard_size,
            progress=progress,
        )

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

    def _subject(self, lora_request: LoRA | None) -> Subject:
        from ferrule._evaluation import Subject

        self._encoding.check_generates("logits")

        def logits(token_ids: list[int], first: int) -> npt.NDArray[np.float32]:
            return self.logits(token_ids, first=first, lora_request=lora_request)

        model = self._model
        return Subject(self._name, self._tokenizer, model.vocab_size, model.max_model_len, logits)

    def _read_each(self, texts: Iterable[TextInput]) -> Iterator[Text]:
        """Reads texts lazily.

        Raises PromptError, TokenizerError.
        """
        if isinstance(texts, (str, bytes)) or not isinstance(cast("object", texts), Iterable):
            raise PromptError(
                f"texts must be a list or another iterable of texts, got {shown(cast('object', texts))}", field="texts"
            )
        return (self._encoding.read("texts", index, text) for index, text in enumerate(texts))

    def _top_logprobs(self, texts: Iterable[Text], k: int) -> Generator[TopLogprobs, None, None]:
        task = top_logprobs_task(k)
        for portion in portions(texts, *self._portion):
            yield from unpack(self._driver.encode(portion, task), portion, k)

    def _encode(self, plan: Plan[T], use_tqdm: UseTqdm = False) -> list[T]:
        portions = list(plan.slices(*self._portion))
        with progress_bar(use_tqdm, len(plan.texts)) as bar:
            answers = self._driver.encode_all(_counted(portions, bar), plan.task)
        return plan.outputs(answers)

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


def _counted(portions: Iterable[Sequence[Text]], bar: ProgressBar) -> Iterator[Sequence[Text]]:
    """Yields portions of texts; adds each portion to the progress bar when the next one is requested."""
    for portion in portions:
        yield portion
        bar.update(len(portion))
