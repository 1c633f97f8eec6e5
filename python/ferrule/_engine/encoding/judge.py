"""Decoders that say yes or no to a document: Qwen3-Reranker (Zhang et al. 2025) and models that were made like it.

The query, the document and an instruction stand in one prompt. How relevant the document is, is the probability of
`yes` for the next token, where `no` is the only other choice. The prompt is that of the model card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ferrule._engine.encoding.texts import Text, TextReader
from ferrule._loading.sentence_files import SentenceFiles
from ferrule.archs.spec import ModelSpec
from ferrule.errors import PromptError, UnsupportedTaskError

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Where the caller gives none."""

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MARKS = ("<|im_start|>", "<|im_end|>", "yes", "no")
"""Tokens that a model must know for the prompt to mean anything."""


@dataclass(frozen=True)
class Judge:
    """A model that says yes or no."""

    reader: TextReader
    token_ids: tuple[int, int]
    """Of yes and no."""

    @classmethod
    def of(cls, sentence: SentenceFiles, spec: ModelSpec, reader: TextReader, name: str) -> Self | None:
        """None for a model that is none: one without a head, or for embeddings, or that does not know the tokens.

        Raises UnsupportedTaskError for a judge whose files ask for other answers.
        """
        *marks, yes, no = (reader.tokenizer.token_id(mark) for mark in MARKS)
        known = None not in marks and yes is not None and no is not None
        if not spec.generates or sentence.embeds:
            return None
        if sentence.judged_by is not None and (not known or sentence.judged_by != (yes, no)):
            raise UnsupportedTaskError(
                f"{name} is judged by the tokens {sentence.judged_by}; ferrule knows the prompt of those that say "
                f"yes or no, {(yes, no)}"
            )
        return cls(reader, (yes, no)) if known and yes is not None and no is not None else None

    def texts(self, query: str, documents: Sequence[str], instruction: str | None, most: int | None) -> list[Text]:
        """A prompt for each document; `most` cuts documents, so that so many tokens remain.

        Raises PromptError, TokenizerError.
        """
        encode, reader = self.reader.tokenizer.encode, self.reader
        before, after = (encode(part, add_special_tokens=False) for part in (BEFORE, AFTER))
        room = None if most is None else most - len(before) - len(after)
        if room is not None and room < 1:
            raise PromptError(f"{most} tokens hold no document beside {len(before) + len(after)} of the prompt")
        texts: list[Text] = []
        for index, document in enumerate(documents):
            if not document or not query:
                raise PromptError(f"{f'documents[{index}]' if query else 'query'} is empty")
            asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
            ids = [*before, *encode(asked, add_special_tokens=False)[:room], *after]
            texts.append(reader.read(f"documents[{index}]", {"prompt_token_ids": ids}))
        return texts
