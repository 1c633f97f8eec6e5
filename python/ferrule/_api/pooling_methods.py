"""`PoolingMethods`: methods of `LLM` that embed, classify and score texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from ferrule._api.arguments import FOREIGN_POOLING, pooling_arguments
from ferrule._api.loaded import LoadedModel
from ferrule._api.progress import ProgressBar, UseTqdm, progress_bar
from ferrule._engine.encoding import Plan
from ferrule._engine.encoding.texts import Text, TextInput, TextOrPair
from ferrule._params.compatibility import compatible_call
from ferrule._params.pooling import PoolingParams
from ferrule.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RerankOutput,
    ScoringRequestOutput,
)

T = TypeVar("T")


class PoolingMethods(LoadedModel):
    """Embeddings, classes, scores and ranks of texts."""

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

    def _encode(self, plan: Plan[T], use_tqdm: UseTqdm = False) -> list[T]:
        portions = list(plan.slices(*self._portion))
        with progress_bar(use_tqdm, len(plan.texts)) as bar:
            answers = self._driver.encode_all(_counted(portions, bar), plan.task)
        return plan.outputs(answers)


def _counted(portions: Iterable[Sequence[Text]], bar: ProgressBar) -> Iterator[Sequence[Text]]:
    """Yields portions of texts; adds each portion to the progress bar when the next one is requested."""
    for portion in portions:
        yield portion
        bar.update(len(portion))
