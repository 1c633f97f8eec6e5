"""Texts cut into windows, as Hugging Face's guide to perplexity slides them.

https://huggingface.co/docs/transformers/perplexity: windows of a fixed length begin every `stride` tokens, and each
scores the tokens that the previous one did not. Every token is scored once, after at least `window - stride` tokens,
except in the first window. llama.cpp's windows do not overlap, and it scores the second half of each: `stride =
min_context = window / 2` costs the same, gives every token at least as much context, and scores twice as many.

Where the tokenizer begins a text with special tokens, each window begins with them, as llama.cpp's does: models that
were trained with a beginning-of-sequence token are lost without it. They take part of the window and are not scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from ferrule._evaluation.subject import Subject
from ferrule._text.prompt import check_token_ids
from ferrule._validation import check_integer, shown
from ferrule.errors import InvalidParameterError, PromptError

DEFAULT_WINDOW = 512
"""Default number of tokens per window, as in llama.cpp; a shorter context has shorter windows."""

TextOrTokens: TypeAlias = str | Sequence[int]
"""Token ids are taken as they are, without special tokens in front."""


@dataclass(frozen=True)
class Windowing:
    """Sizes of the windows of texts."""

    window: int
    """Tokens that a model reads at once, special tokens included."""
    stride: int
    """Tokens from the beginning of a window to that of the next."""
    min_context: int
    """Tokens of the text, in the window, that stand before each one that is scored, at the least."""

    @classmethod
    def of(cls, window: int | None, stride: int | None, min_context: int, max_model_len: int) -> Windowing:
        """Checks the numbers; without `window` it is 512 or the context, without `stride` half of the window.

        Raises InvalidParameterError.
        """
        window = min(DEFAULT_WINDOW, max_model_len) if window is None else window
        window = check_integer("window", window, 2, max_model_len)
        stride = check_integer("stride", window // 2 if stride is None else stride, 1, window - 1)
        return cls(window, stride, check_integer("min_context", min_context, 0, window - stride))


@dataclass(frozen=True)
class Window:
    """A stretch of a text that a model reads at once."""

    token_ids: list[int]
    first: int
    """The first token of these that is scored: at least 1, since nothing says how likely a first token is."""
    text: int
    """Index of the text."""
    position: int
    """Index of that token within the tokens of the text."""

    @property
    def targets(self) -> list[int]:
        """The tokens that are scored."""
        return self.token_ids[self.first :]


def read_texts(subject: Subject, texts: TextOrTokens | Sequence[TextOrTokens]) -> list[tuple[list[int], list[int]]]:
    """Returns for each text the special tokens at the beginning of its windows, and its own tokens.

    Raises PromptError, TokenizerError.
    """
    several = _several(texts)
    if not several:
        raise PromptError("texts must not be empty", field="texts")
    return [_read_text(subject, index, text) for index, text in enumerate(several)]


def cut(texts: Sequence[tuple[list[int], list[int]]], windowing: Windowing) -> Iterator[Window]:
    """The windows of all texts, in order; a text has none if no token of it has `min_context` others before it.

    Raises InvalidParameterError where special tokens leave no room.
    """
    for index, (prefix, tokens) in enumerate(texts):
        # A window and its stride are of the model's tokens; the special ones shorten both, so that contexts overlap.
        room = windowing.window - len(prefix)
        stride = min(windowing.stride, room - windowing.min_context)
        if stride < 1:
            requirement = f"more than {len(prefix)} (special tokens) + {windowing.min_context} (min_context)"
            raise InvalidParameterError("window", windowing.window, requirement)
        # Nothing stands before the first token of all where there is no special one.
        scored = max(windowing.min_context, 0 if prefix else 1)
        for begin in range(0, len(tokens), stride):
            end = min(begin + room, len(tokens))
            if scored < end:
                yield Window([*prefix, *tokens[begin:end]], len(prefix) + scored - begin, index, scored)
                scored = end
            if end == len(tokens):
                break


def _several(texts: object) -> list[object]:
    if isinstance(texts, (bytes, bytearray)) or not isinstance(texts, Sequence):
        raise PromptError(f"texts must be text, token ids, or a list of either, got {shown(texts)}", field="texts")
    if isinstance(texts, str):
        return [texts]
    several = list(cast("Sequence[object]", texts))
    return [several] if several and not isinstance(several[0], (str, Sequence)) else several


def _read_text(subject: Subject, index: int, text: object) -> tuple[list[int], list[int]]:
    try:
        if isinstance(text, str):
            ids = subject.tokenizer.encode(text, add_special_tokens=False)
            prefix = list(subject.tokenizer.first_ids)
        else:
            ids, prefix = text, []
        tokens = check_token_ids(ids, subject.vocab_size)
    except PromptError as error:
        raise PromptError(f"texts[{index}]: {error}", field=f"texts[{index}]") from None
    return prefix, tokens
