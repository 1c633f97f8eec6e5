"""Texts to embeddings, classes and ranks: what the engine is asked for, and what its numbers mean."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, cast

from ferrule._engine.encoding.judge import Judge
from ferrule._engine.encoding.texts import Text, TextInput, TextOrPair, TextReader, portions
from ferrule._params.sampling import MAX_COUNT
from ferrule._validation import check_whole, shown
from ferrule.errors import InvalidParameterError, PromptError, UnsupportedModelError, UnsupportedTaskError
from ferrule.outputs import ClassificationOutput, EmbeddingOutput, RerankOutput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ferrule._loading import ModelFiles

    Rows: TypeAlias = list[npt.NDArray[np.float32]]
    Ranked: TypeAlias = Callable[[list[float], list[Text]], list[RerankOutput]]
    """From the documents' scores and the texts that were read for them."""

T = TypeVar("T")

POOLINGS = ("cls", "mean", "last", "none")
"""`none` gives a hidden state for each token."""
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of the prompt for what is searched, in the order in which sentence-transformers looks for them."""


@dataclass(frozen=True)
class Plan(Generic[T]):
    """What the engine is asked for, and what is made of its answer."""

    task: str
    """JSON, as the native module reads it."""
    texts: list[Text]
    numbers: list[int]
    """Of each text in the answer."""
    finish: Callable[[Rows], list[T]]
    """From the numbers of each text to what the caller gets."""

    def slices(self, tokens: int, texts: int) -> Iterator[list[Text]]:
        """As `portions` has them."""
        return portions(self.texts, tokens, texts)

    def outputs(self, answers: Sequence[bytes | bytearray]) -> list[T]:
        """What the caller gets, from the answers to all portions."""
        import numpy as np

        numbers = np.frombuffer(b"".join(answers), dtype=np.float32)
        ends = np.cumsum(self.numbers)
        # Copies, so that who keeps one keeps no more than that.
        return self.finish([row.copy() for row in np.split(numbers, ends[:-1])] if self.texts else [])


class Encoding:
    """Plans for one model."""

    def __init__(self, files: ModelFiles, reader: TextReader, name: str) -> None:
        self._files = files
        self._spec = files.spec
        self._reader = reader
        self._name = name
        """Of the model, for messages."""

    def embed(
        self,
        prompts: TextInput | Sequence[TextInput],
        *,
        pooling: str | None,
        normalize: bool | None,
        dimensions: int | None,
        prompt_name: str | None,
        truncate_prompt_tokens: int | None,
    ) -> Plan[EmbeddingOutput]:
        """A plan for `LLM.embed`."""
        sentence, spec = self._files.sentence, self._spec
        if pooling is not None and pooling not in POOLINGS:
            raise InvalidParameterError(f"pooling is {shown(pooling)}; it must be one of {', '.join(POOLINGS)}")
        if normalize is not None and not isinstance(cast("object", normalize), bool):
            raise InvalidParameterError(f"normalize is {shown(normalize)}; it must be True, False or None")
        pooling = sentence.pooling if pooling is None else pooling
        pooled = pooling != "none"
        if dimensions is not None:
            if not pooled:
                raise InvalidParameterError(f"dimensions is {shown(dimensions)}; hidden states of tokens are not cut")
            dimensions = check_whole("dimensions", dimensions, 1, spec.embedding_size)
        if normalize is None:
            normalize = sentence.normalize and pooled
        prefix = self._prefix(prompt_name)
        most = self._reader.most(truncate_prompt_tokens)
        texts = self._read_all(prompts, prefix=prefix, most=most)
        if pooled:
            task = {"type": "embedding", "pooling": pooling, "normalize": normalize, "dimensions": dimensions}
            width = spec.embedding_size if dimensions is None else dimensions
            numbers = [width] * len(texts)
        else:
            task = {"type": "token_embeddings", "normalize": normalize}
            numbers = [len(text.token_ids) * spec.hidden_size for text in texts]

        def finish(rows: Rows) -> list[EmbeddingOutput]:
            shape = (-1,) if pooled else (-1, spec.hidden_size)
            return [EmbeddingOutput(row.reshape(shape), text.token_ids) for row, text in zip(rows, texts, strict=True)]

        return Plan(json.dumps(task), texts, numbers, finish)

    def classify(
        self, prompts: TextOrPair | Sequence[TextOrPair], *, truncate_prompt_tokens: int | None
    ) -> Plan[ClassificationOutput]:
        """A plan for `LLM.classify`."""
        if self._spec.classifier is None:
            raise UnsupportedTaskError(f"{self._name} has no classifier ({self.made_for})")
        texts = self._read_all(prompts, most=self._reader.most(truncate_prompt_tokens), pairs=True)
        files = self._files
        exclusive = files.exclusive and len(files.labels) > 1

        def finish(rows: Rows) -> list[ClassificationOutput]:
            outputs: list[ClassificationOutput] = []
            for row, text in zip(rows, texts, strict=True):
                best = files.labels[int(row.argmax())]
                outputs.append(ClassificationOutput(_probabilities(row, exclusive), row, best, text.token_ids))
            return outputs

        return Plan('{"type": "scores"}', texts, [len(files.labels)] * len(texts), finish)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None,
        instruction: str | None,
        truncate_prompt_tokens: int | None,
    ) -> Plan[RerankOutput]:
        """A plan for `LLM.rerank`."""
        several = _checked_documents(query, documents)
        if top_n is not None:
            top_n = check_whole("top_n", top_n, 1, MAX_COUNT)
        most = self._reader.most(truncate_prompt_tokens)
        ranked = _ranked(several, top_n)
        judge = Judge.of(self._files.sentence, self._spec, self._reader, self._name)
        if instruction is not None and (judge is None or not isinstance(cast("object", instruction), str)):
            limit = "None, as this model takes none" if judge is None else "a string"
            raise InvalidParameterError(f"instruction is {shown(instruction)}; it must be {limit}")
        if judge is not None:
            texts = judge.texts(query, several, instruction, most)
            yes_no = list(judge.token_ids)
            task = json.dumps({"type": "logits", "tokens": yes_no})
            numbers = [2] * len(texts)
            return Plan(task, texts, numbers, lambda rows: ranked([_sigmoid(row[0] - row[1]) for row in rows], texts))
        if self._spec.classifier is not None:
            labels = self._spec.classifier.labels
            if labels != 1:
                raise UnsupportedTaskError(f"{self._name} has {labels} labels; relevance is one of a single label")
            read = self._reader.read_pair
            pairs = [read(f"documents[{i}]", (query, document), most=most) for i, document in enumerate(several)]
            numbers = [1] * len(pairs)
            return Plan(
                '{"type": "scores"}', pairs, numbers, lambda rows: ranked([_sigmoid(row[0]) for row in rows], pairs)
            )
        return self._rerank_by_cosine(query, several, most, ranked)

    def _rerank_by_cosine(
        self, query: str, documents: list[str], most: int | None, ranked: Ranked
    ) -> Plan[RerankOutput]:
        """By the angle between embeddings, for models that were made to give those."""
        prompts = self._files.sentence.prompts
        names = [name for name in DOCUMENT_PROMPTS if name in prompts]
        for_query = self._prefix("query" if "query" in prompts else None)
        for_document = self._prefix(names[0] if names else None)
        asked = self._reader.read("query", query, prefix=for_query, most=most)
        texts = [asked] if documents else []
        for index, document in enumerate(documents):
            texts.append(self._reader.read(f"documents[{index}]", document, prefix=for_document, most=most))
        task = {
            "type": "embedding",
            "pooling": self._files.sentence.pooling,
            "normalize": True,
            "dimensions": None,
        }

        def finish(rows: Rows) -> list[RerankOutput]:
            vectors = [row.astype("float64") for row in rows]
            cosines = [min(max(float((vectors[0] * row).sum()), -1.0), 1.0) for row in vectors[1:]]
            return ranked([(1 + cosine) / 2 for cosine in cosines], texts)

        return Plan(json.dumps(task), texts, [self._spec.embedding_size] * len(texts), finish)

    @property
    def made_for(self) -> str:
        """What the model can be asked for, for messages."""
        if self._spec.generates:
            return "it is made to generate text"
        if self._spec.classifier is not None:
            return "it is made to classify" + (" and rerank" if self._spec.classifier.labels == 1 else "")
        return "it is made to embed texts"

    def check_generates(self, asked: str) -> None:
        """Raises UnsupportedTaskError for a model that does not."""
        if not self._spec.generates:
            raise UnsupportedTaskError(f"{self._name} gives no {asked}: {self.made_for}")

    def read(self, field: str, index: int, text: object) -> Text:
        """One of the texts of a `field`, with nothing in front.

        Raises PromptError, TokenizerError.
        """
        return self._read_one(f"{field}[{index}]", text, "", None, pairs=False)

    def _prefix(self, prompt_name: object) -> str:
        """What texts begin with.

        Raises InvalidParameterError, UnsupportedModelError.
        """
        sentence = self._files.sentence
        name = sentence.default_prompt if prompt_name is None else prompt_name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in sentence.prompts:
            known = f"one of {', '.join(sentence.prompts)}" if sentence.prompts else "None: the model has no prompts"
            raise InvalidParameterError(f"prompt_name is {shown(name)}; it must be {known}")
        prefix = sentence.prompts[name]
        if prefix and not sentence.include_prompt:
            raise UnsupportedModelError(
                f"{self._files.path}: include_prompt is false; ferrule pools all tokens, the prompt's too"
            )
        return prefix

    def _read_all(self, given: object, *, prefix: str = "", most: int | None, pairs: bool = False) -> list[Text]:
        """One text or several; where there may be pairs, a tuple is one of them."""
        single = (str, bytes, bytearray, tuple) if pairs else (str, bytes, bytearray)
        if not isinstance(given, Sequence) or isinstance(given, single):
            return [self._read_one("prompts", cast("object", given), prefix, most, pairs=pairs)]
        several = enumerate(cast("Sequence[object]", given))
        return [self._read_one(f"prompts[{i}]", each, prefix, most, pairs=pairs) for i, each in several]

    def _read_one(self, where: str, given: object, prefix: str, most: int | None, *, pairs: bool) -> Text:
        if pairs and isinstance(given, tuple):
            return self._reader.read_pair(where, cast("tuple[object, ...]", given), most=most)
        return self._reader.read(where, given, prefix=prefix, most=most)


def _checked_documents(query: object, documents: object) -> list[str]:
    if not isinstance(query, str):
        raise PromptError(f"query is {shown(query)}; it must be a string")
    if isinstance(documents, (str, bytes)) or not isinstance(documents, Sequence):
        raise PromptError(f"documents is {shown(documents)}; it must be a list of strings")
    several = list(cast("Sequence[object]", documents))
    for index, document in enumerate(several):
        if not isinstance(document, str):
            raise PromptError(f"documents[{index}] is {shown(document)}; it must be a string")
    return cast("list[str]", several)


def _ranked(documents: list[str], top_n: int | None) -> Ranked:
    """Puts the most relevant document first, the first of equals; the `top_n` best."""

    def ranked(scores: list[float], texts: list[Text]) -> list[RerankOutput]:
        order = sorted(range(len(documents)), key=lambda index: -scores[index])
        read = sum(len(text.token_ids) for text in texts)
        return [RerankOutput(index, scores[index], documents[index], read) for index in order[:top_n]]

    return ranked


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _probabilities(scores: npt.NDArray[np.float32], exclusive: bool) -> npt.NDArray[np.float32]:
    import numpy as np

    if not exclusive:
        return np.array([_sigmoid(float(score)) for score in scores], dtype=np.float32)
    weights = np.exp(scores.astype(np.float64) - scores.max())
    return (weights / weights.sum()).astype(np.float32)
