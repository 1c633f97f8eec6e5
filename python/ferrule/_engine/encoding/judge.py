"""Rerankers that are decoders and answer "yes" or "no", such as Qwen3-Reranker (Zhang et al. 2025).

The prompt, from Qwen3-Reranker's model card, contains the instruction, the query and the document. The relevance of the
document is the softmax over the logits of "yes" and "no" as the next token.
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
"""Default instruction."""

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MARKS = ("<|im_start|>", "<|im_end|>", "yes", "no")
"""Tokens that the vocabulary must have for the prompt to work."""


@dataclass(frozen=True)
class Judge:
    """A reranker that answers "yes" or "no"."""

    reader: TextReader
    token_ids: tuple[int, int]
    """Token ids of "yes" and "no"."""

    @classmethod
    def of(cls, sentence: SentenceFiles, spec: ModelSpec, reader: TextReader, name: str) -> Self | None:
        """Makes the reranker of a model; None if the model has no lm_head, computes embeddings, or lacks the tokens.

        Raises UnsupportedTaskError for a reranker that answers with other tokens.
        """
        *marks, yes, no = (reader.tokenizer.token_id(mark) for mark in MARKS)
        known = None not in marks and yes is not None and no is not None
        if not spec.generates or sentence.embeds:
            return None
        if sentence.judged_by is not None and (not known or sentence.judged_by != (yes, no)):
            raise UnsupportedTaskError(
                f"{name} reranks by the tokens {sentence.judged_by}; supported are rerankers that answer yes or no, "
                f"{(yes, no)}"
            )
        return cls(reader, (yes, no)) if known and yes is not None and no is not None else None

    def texts(self, query: str, documents: Sequence[str], instruction: str | None, most: int | None) -> list[Text]:
        """Returns a prompt for each document. Documents are truncated so that a prompt has at most `most` tokens.

        Raises PromptError, TokenizerError.
        """
        encode, reader = self.reader.tokenizer.encode, self.reader
        before, after = (encode(part, add_special_tokens=False) for part in (BEFORE, AFTER))
        room = None if most is None else most - len(before) - len(after)
        if room is not None and room < 1:
            fixed = len(before) + len(after)
            raise PromptError(
                f"truncate_prompt_tokens must be more than the {fixed} tokens of the prompt, got {most}",
                field="truncate_prompt_tokens",
            )
        texts: list[Text] = []
        for index, document in enumerate(documents):
            asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
            ids = [*before, *encode(asked, add_special_tokens=False)[:room], *after]
            texts.append(reader.read(f"documents[{index}]", {"prompt_token_ids": ids}))
        return texts
