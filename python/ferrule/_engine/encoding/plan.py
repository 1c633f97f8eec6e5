"""Plans for pooling tasks: the task that the engine runs on texts, and the conversion of its answer to outputs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, cast

from ferrule._engine.encoding.judge import Judge
from ferrule._engine.encoding.texts import Text, TextInput, TextOrPair, TextReader, portions
from ferrule._params.sampling import MAX_COUNT
from ferrule._validation import check_choice, check_flag, check_integer, shown
from ferrule.errors import InvalidParameterError, PromptError, UnsupportedModelError, UnsupportedTaskError
from ferrule.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RerankOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ferrule._loading import ModelFiles

    Rows: TypeAlias = list[npt.NDArray[np.float32]]
    Ranked: TypeAlias = Callable[[list[float], list[Text]], list[RerankOutput]]
    """Function that converts the documents' scores and the computed texts to outputs."""

T = TypeVar("T")

POOLINGS = ("cls", "mean", "last", "none")
"""Ways to pool hidden states; `none` returns the hidden state of each token."""
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of the document prompt, in the order in which sentence-transformers looks for them."""


@dataclass(frozen=True)
class Plan(Generic[T]):
    """A task for the engine, and the conversion of its answer."""

    task: str
    """Task as JSON, as the native module reads it."""
    texts: list[Text]
    """Texts to compute."""
    numbers: list[int]
    """Number of floats in the answer for each text."""
    finish: Callable[[Rows], list[T]]
    """Function that converts the numbers of each text to the outputs."""

    def slices(self, tokens: int, texts: int) -> Iterator[list[Text]]:
        """Splits the texts by `portions`."""
        return portions(self.texts, tokens, texts)

    def outputs(self, answers: Sequence[bytes | bytearray]) -> list[T]:
        """Returns the outputs, from the answers to all portions."""
        import numpy as np

        numbers = np.frombuffer(b"".join(answers), dtype=np.float32)
        ends = np.cumsum(self.numbers)
        # Copy, so that an output does not keep the numbers of all other outputs alive.
        return self.finish([row.copy() for row in np.split(numbers, ends[:-1])] if self.texts else [])


class Encoding:
    """Maker of plans for one model."""

    def __init__(self, files: ModelFiles, reader: TextReader, name: str) -> None:
        self._files = files
        self._spec = files.spec
        self._reader = reader
        self._name = name
        """Name of the model, for messages."""

    def embed(
        self,
        prompts: TextInput | Sequence[TextInput],
        *,
        pooling: str | None,
        normalize: bool | None,
        dimensions: int | None,
        prompt_name: str | None,
        truncate_prompt_tokens: int | None,
    ) -> Plan[EmbeddingRequestOutput]:
        """Makes a plan for `LLM.embed`."""
        sentence, spec = self._files.sentence, self._spec
        if pooling is not None:
            check_choice("pooling", pooling, POOLINGS)
        if normalize is not None:
            check_flag("normalize", normalize)
        pooling = sentence.pooling if pooling is None else pooling
        pooled = pooling != "none"
        if dimensions is not None:
            if not pooled:
                raise InvalidParameterError("dimensions", dimensions, 'left out with pooling="none"')
            dimensions = check_integer("dimensions", dimensions, 1, spec.embedding_size)
        if normalize is None:
            normalize = sentence.normalize and pooled
        prefix = self._prefix(prompt_name)
        most = self._reader.most(truncate_prompt_tokens)
        texts = self._read_all(prompts, prefix=prefix, most=most, no_tokens=True)
        if pooled:

            def vectors(rows: Rows) -> list[EmbeddingRequestOutput]:
                return _numbered(list(map(EmbeddingOutput, rows)), texts)

            return self._embedded(texts, vectors, pooling=pooling, normalize=normalize, dimensions=dimensions)

        def matrices(rows: Rows) -> list[EmbeddingRequestOutput]:
            return _numbered([EmbeddingOutput(row.reshape(-1, spec.hidden_size)) for row in rows], texts)

        task = {"type": "token_embeddings", "normalize": normalize}
        return _computed(task, texts, [len(text.token_ids) * spec.hidden_size for text in texts], 0, matrices)

    def classify(
        self, prompts: TextOrPair | Sequence[TextOrPair], *, truncate_prompt_tokens: int | None
    ) -> Plan[ClassificationRequestOutput]:
        """Makes a plan for `LLM.classify`."""
        if self._spec.classifier is None:
            raise UnsupportedTaskError(f"{self._name} has no classifier; {self.purpose}")
        texts = self._read_all(prompts, most=self._reader.most(truncate_prompt_tokens), pairs=True)
        files = self._files
        exclusive = files.exclusive and len(files.labels) > 1

        def finish(rows: Rows) -> list[ClassificationRequestOutput]:
            labels = (files.labels[int(row.argmax())] for row in rows)
            outputs = [
                ClassificationOutput(_probabilities(row, exclusive), row, label)
                for row, label in zip(rows, labels, strict=True)
            ]
            return _numbered(outputs, texts)

        return Plan('{"type": "scores"}', texts, [len(files.labels)] * len(texts), finish)

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, truncate_prompt_tokens: int | None
    ) -> Plan[ScoringRequestOutput]:
        """Makes a plan for `LLM.score`."""
        pairs = _checked_pairs(data_1, data_2)
        most = self._reader.most(truncate_prompt_tokens)
        judge = self._judge()
        if judge is not None:
            prompts = [text for first, second in pairs for text in judge.texts(first, [second], None, most)]
            return self._judged(judge, prompts, lambda scores: _scored(scores, prompts))
        if self._spec.classifier is not None:
            whole = self._read_pairs(pairs, "data_2", most)
            return Plan('{"type": "scores"}', whole, [1] * len(whole), lambda rows: _scored(_sigmoids(rows), whole))
        prefix = self._prefix(None)
        halves = [
            self._reader.read(f"{name}[{index}]", text, prefix=prefix, most=most, no_tokens=True)
            for index, pair in enumerate(pairs)
            for name, text in zip(("data_1", "data_2"), pair, strict=True)
        ]
        whole = [
            Text([*first.token_ids, *second.token_ids]) for first, second in zip(halves[::2], halves[1::2], strict=True)
        ]
        return self._embedded(halves, lambda rows: _scored(list(map(_cosine, rows[::2], rows[1::2])), whole))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None,
        instruction: str | None,
        truncate_prompt_tokens: int | None,
    ) -> Plan[RerankOutput]:
        """Makes a plan for `LLM.rerank`."""
        several = _checked_documents(query, documents)
        if top_n is not None:
            top_n = check_integer("top_n", top_n, 1, MAX_COUNT)
        most = self._reader.most(truncate_prompt_tokens)
        ranked = _ranked(several, top_n)
        judge = self._judge()
        if instruction is not None and (judge is None or not isinstance(cast("object", instruction), str)):
            requirement = "None, since this model takes no instruction" if judge is None else "a string"
            raise InvalidParameterError("instruction", instruction, requirement)
        if judge is not None:
            texts = judge.texts(query, several, instruction, most)
            return self._judged(judge, texts, lambda scores: ranked(scores, texts))
        if self._spec.classifier is not None:
            pairs = self._read_pairs([(query, document) for document in several], "documents", most)
            return Plan('{"type": "scores"}', pairs, [1] * len(pairs), lambda rows: ranked(_sigmoids(rows), pairs))
        return self._rerank_by_cosine(query, several, most, ranked)

    def _judge(self) -> Judge | None:
        return Judge.of(self._files.sentence, self._spec, self._reader, self._name)

    @staticmethod
    def _judged(judge: Judge, texts: list[Text], finish: Callable[[list[float]], list[T]]) -> Plan[T]:
        """Makes a plan that scores texts by the probability of "yes" against "no"."""
        task = json.dumps({"type": "logits", "tokens": list(judge.token_ids)})
        return Plan(task, texts, [2] * len(texts), lambda rows: finish([_sigmoid(row[0] - row[1]) for row in rows]))

    def _read_pairs(self, pairs: list[tuple[str, str]], field: str, most: int | None) -> list[Text]:
        """Reads pairs of texts for a cross-encoder.

        Raises UnsupportedTaskError for a classifier of several labels.
        """
        labels = 0 if self._spec.classifier is None else self._spec.classifier.labels
        if labels != 1:
            raise UnsupportedTaskError(
                f"{self._name} has {labels} labels; only a classifier with one label can score pairs"
            )
        return [self._reader.read_pair(f"{field}[{index}]", pair, most=most) for index, pair in enumerate(pairs)]

    def _embedded(
        self,
        texts: list[Text],
        finish: Callable[[Rows], list[T]],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> Plan[T]:
        """Makes a plan that computes one vector for each text."""
        task = {
            "type": "embedding",
            "pooling": self._files.sentence.pooling if pooling is None else pooling,
            "normalize": normalize,
            "dimensions": dimensions,
        }
        width = self._spec.embedding_size if dimensions is None else dimensions
        return _computed(task, texts, [width] * len(texts), width, finish)

    def _rerank_by_cosine(
        self, query: str, documents: list[str], most: int | None, ranked: Ranked
    ) -> Plan[RerankOutput]:
        """Ranks by cosine similarity, for models that compute embeddings."""
        prompts = self._files.sentence.prompts
        names = [name for name in DOCUMENT_PROMPTS if name in prompts]
        for_query = self._prefix("query" if "query" in prompts else None)
        for_document = self._prefix(names[0] if names else None)
        first = self._reader.read("query", query, prefix=for_query, most=most)
        texts = [first] if documents else []
        for index, document in enumerate(documents):
            where = f"documents[{index}]"
            texts.append(self._reader.read(where, document, prefix=for_document, most=most, no_tokens=True))
        return self._embedded(texts, lambda rows: ranked([(1 + _cosine(rows[0], row)) / 2 for row in rows[1:]], texts))

    @property
    def purpose(self) -> str:
        """Tasks that the model supports, for messages."""
        if self._spec.generates:
            return "it generates text"
        if self._spec.classifier is not None:
            return "it classifies" + (" and reranks" if self._spec.classifier.labels == 1 else "")
        return "it embeds texts"

    def check_generates(self, wanted: str) -> None:
        """Raises UnsupportedTaskError for a model that does not generate text; `wanted` names the output."""
        if not self._spec.generates:
            raise UnsupportedTaskError(f"{self._name} cannot produce {wanted}; {self.purpose}")

    def read(self, field: str, index: int, text: object) -> Text:
        """Reads the text at `index` of the list `field`, without a prompt before it.

        Raises PromptError, TokenizerError.
        """
        return self._reader.read(f"{field}[{index}]", text)

    def _prefix(self, prompt_name: object) -> str:
        """Returns the prompt to put before texts.

        Raises InvalidParameterError, UnsupportedModelError.
        """
        sentence = self._files.sentence
        name = sentence.default_prompt if prompt_name is None else prompt_name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in sentence.prompts:
            names = (
                f"one of {', '.join(sentence.prompts)}" if sentence.prompts else "None, since the model has no prompts"
            )
            raise InvalidParameterError("prompt_name", name, names)
        prefix = sentence.prompts[name]
        if prefix and not sentence.include_prompt:
            raise UnsupportedModelError(
                f"{self._files.path}: include_prompt is false, which is not supported; ferrule pools all tokens, "
                "including the tokens of the prompt"
            )
        return prefix

    def _read_all(
        self,
        given: object,
        *,
        prefix: str = "",
        most: int | None,
        pairs: bool = False,
        no_tokens: bool = False,
    ) -> list[Text]:
        """Reads one text or several; with `pairs`, a tuple is read as a pair of texts."""

        def read(where: str, given: object) -> Text:
            if pairs and isinstance(given, tuple):
                return self._reader.read_pair(where, cast("tuple[object, ...]", given), most=most)
            return self._reader.read(where, given, prefix=prefix, most=most, no_tokens=no_tokens)

        single = (str, bytes, bytearray, tuple) if pairs else (str, bytes, bytearray)
        if not isinstance(given, Sequence) or isinstance(given, single):
            return [read("prompts", cast("object", given))]
        return [read(f"prompts[{i}]", each) for i, each in enumerate(cast("Sequence[object]", given))]


def _computed(
    task: Mapping[str, object], texts: list[Text], numbers: list[int], width: int, finish: Callable[[Rows], list[T]]
) -> Plan[T]:
    """Makes a plan for texts, some of which may be empty. The result of an empty text is `width` zeros."""

    def finish_all(rows: Rows) -> list[T]:
        import numpy as np

        computed = iter(rows)
        return finish([next(computed) if text.token_ids else np.zeros(width, dtype=np.float32) for text in texts])

    present = [index for index, text in enumerate(texts) if text.token_ids]
    return Plan(json.dumps(task), [texts[i] for i in present], [numbers[i] for i in present], finish_all)


def _checked_pairs(data_1: object, data_2: object) -> list[tuple[str, str]]:
    """Returns the pairs to score: one text with each text of a list, or two lists of equal length pair by pair."""
    first, second = _checked_texts("data_1", data_1), _checked_texts("data_2", data_2)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidParameterError(
            "data_2", data_2, f"a list of {len(first)} texts, one for each text of data_1, unless data_1 is one text"
        )
    return list(zip(first, second, strict=True))


def _checked_texts(field: str, given: object) -> list[str]:
    several: list[object] = [given] if isinstance(given, str) else list(cast("Sequence[object]", given or []))
    for index, text in enumerate(several):
        if not isinstance(text, str):
            raise PromptError(f"{field}[{index}] must be a string, got {shown(text)}", field=f"{field}[{index}]")
    return cast("list[str]", several)


def _checked_documents(query: object, documents: object) -> list[str]:
    if not isinstance(query, str):
        raise PromptError(f"query must be a string, got {shown(query)}", field="query")
    if not query:
        raise PromptError("query must not be empty", field="query")
    if isinstance(documents, (str, bytes)) or not isinstance(documents, Sequence):
        raise PromptError(f"documents must be a list of strings, got {shown(documents)}", field="documents")
    return _checked_texts("documents", cast("Sequence[object]", documents))


def _ranked(documents: list[str], top_n: int | None) -> Ranked:
    """Returns a function that sorts documents by score and keeps the `top_n` best; equal scores keep their order."""

    def ranked(scores: list[float], texts: list[Text]) -> list[RerankOutput]:
        order = sorted(range(len(documents)), key=lambda index: -scores[index])
        tokens = sum(len(text.token_ids) for text in texts)
        return [RerankOutput(index, scores[index], documents[index], tokens) for index in order[:top_n]]

    return ranked


def _numbered(outputs: list[T], texts: list[Text]) -> list[PoolingRequestOutput[T]]:
    return [
        PoolingRequestOutput(str(index), output, text.token_ids)
        for index, (output, text) in enumerate(zip(outputs, texts, strict=True))
    ]


def _scored(scores: list[float], texts: list[Text]) -> list[ScoringRequestOutput]:
    return _numbered([ScoringOutput(score) for score in scores], texts)


def _cosine(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> float:
    """Returns the cosine similarity of two vectors of length 1."""
    return min(max(float((first.astype("float64") * second.astype("float64")).sum()), -1.0), 1.0)


def _sigmoids(rows: Rows) -> list[float]:
    return [_sigmoid(row[0]) for row in rows]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _probabilities(scores: npt.NDArray[np.float32], exclusive: bool) -> npt.NDArray[np.float32]:
    import numpy as np

    if not exclusive:
        return np.array([_sigmoid(float(score)) for score in scores], dtype=np.float32)
    weights = np.exp(scores.astype(np.float64) - scores.max())
    return (weights / weights.sum()).astype(np.float32)
