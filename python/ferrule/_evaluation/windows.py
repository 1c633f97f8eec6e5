"""Sliding windows over texts, as in Hugging Face's guide (https://huggingface.co/docs/transformers/perplexity).

Windows of a fixed length begin every `stride` tokens, and each window scores the tokens that the previous one did not
score. So every token is scored once, with at least `window - stride` tokens of context except in the first window.
llama.cpp uses windows without overlap and scores the second half of each. `stride = min_context = window / 2` takes the
same time, gives every token at least as much context, and scores twice as many tokens.

If the tokenizer adds special tokens at the beginning of a text, each window begins with them, as in llama.cpp, because
models that were trained with a beginning-of-sequence token predict badly without it. These tokens count towards the
length of the window and are not scored.
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
"""Default length of a window in tokens, as in llama.cpp; it is reduced to the context length if that is shorter."""

TextOrTokens: TypeAlias = str | Sequence[int]
"""A text, or token ids, to which no special tokens are added."""


@dataclass(frozen=True)
class Windowing:
    """Sizes of the windows, in tokens."""

    window: int
    """Length of a window, special tokens included."""
    stride: int
    """Distance between the beginnings of adjacent windows."""
    min_context: int
    """Minimum number of tokens of the text that precede a scored token in its window."""

    @classmethod
    def of(cls, window: int | None, stride: int | None, min_context: int, max_model_len: int) -> Windowing:
        """Checks the sizes. The default window is 512 tokens or the context length, the default stride half a window.

        Raises InvalidParameterError.
        """
        window = min(DEFAULT_WINDOW, max_model_len) if window is None else window
        window = check_integer("window", window, 2, max_model_len)
        stride = check_integer("stride", window // 2 if stride is None else stride, 1, window - 1)
        return cls(window, stride, check_integer("min_context", min_context, 0, window - stride))


@dataclass(frozen=True)
class Window:
    """Part of a text that the model reads at once."""

    token_ids: list[int]
    first: int
    """Index in `token_ids` of the first scored token. It is at least 1, since no logits predict the first token."""
    text: int
    """Index of the text."""
    position: int
    """Index of the first scored token within the text."""

    @property
    def targets(self) -> list[int]:
        """Scored tokens."""
        return self.token_ids[self.first :]


def read_texts(subject: Subject, texts: TextOrTokens | Sequence[TextOrTokens]) -> list[tuple[list[int], list[int]]]:
    """Returns the special tokens at the beginning of the windows and the tokens of the text, for each text.

    Raises PromptError, TokenizerError.
    """
    several = _several(texts)
    if not several:
        raise PromptError("texts must not be empty", field="texts")
    return [_read_text(subject, index, text) for index, text in enumerate(several)]


def cut(texts: Sequence[tuple[list[int], list[int]]], windowing: Windowing) -> Iterator[Window]:
    """Yields the windows of all texts in order. A text without tokens to score has none.

    Raises InvalidParameterError if the special tokens leave no room in a window.
    """
    for index, (prefix, tokens) in enumerate(texts):
        # The window includes the special tokens, so the stride is shortened to keep `min_context` tokens of overlap.
        room = windowing.window - len(prefix)
        stride = min(windowing.stride, room - windowing.min_context)
        if stride < 1:
            requirement = f"more than {len(prefix)} (special tokens) + {windowing.min_context} (min_context)"
            raise InvalidParameterError("window", windowing.window, requirement)
        # Without special tokens, no logits predict the first token of the text.
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
