"""`EvaluationMethods`: methods of `LLM` that compute logits and measure a model on texts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from ferrule._api.distillation import check_count, export, top_logprobs_task, unpack
from ferrule._api.loaded import LoadedModel
from ferrule._engine.encoding.texts import Text, TextInput, portions
from ferrule._params.lora import LoRA
from ferrule._text.prompt import check_token_ids
from ferrule._validation import check_integer, shown
from ferrule.errors import InvalidParameterError, PromptError
from ferrule.outputs import TopLogprobs

if TYPE_CHECKING:
    import os

    import numpy as np
    import numpy.typing as npt

    from ferrule._evaluation import Comparison, Perplexity, Subject, TextOrTokens


class EvaluationMethods(LoadedModel):
    """Logits, log-probabilities and perplexity of texts, and comparison with other models."""

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
        reference: EvaluationMethods,
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

        if not isinstance(cast("object", reference), EvaluationMethods):
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
        models: Sequence[EvaluationMethods],
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
        if not is_list or not models or not all(isinstance(cast("object", each), EvaluationMethods) for each in models):
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
