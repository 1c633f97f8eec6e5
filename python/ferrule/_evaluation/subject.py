"""Interface that evaluation needs from a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ferrule._text.tokenizer import Tokenizer
from ferrule.errors import InvalidParameterError


@dataclass(frozen=True)
class Subject:
    """A model to evaluate, or its reference."""

    name: str
    """Name of the model in messages."""
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    """Maximum length of a sequence in tokens."""
    logits: Callable[[list[int], int], npt.NDArray[np.float32]]
    """Returns the logits after each token from index `first` on: float32 `[tokens - first, vocab_size]`."""

    def check_same_vocabulary(self, reference: Subject) -> None:
        """Raises InvalidParameterError if the vocabularies differ, since the distributions are then not comparable."""
        if self.vocab_size != reference.vocab_size:
            requirement = (
                f"a model with the vocabulary of {self.name}: {self.vocab_size} tokens, not {reference.vocab_size}"
            )
            raise InvalidParameterError("reference", reference.name, requirement)
        # Without a tokenizer, models are compared by token ids.
        if self.tokenizer.available and reference.tokenizer.available:
            ours, theirs = self.tokenizer.vocabulary(), reference.tokenizer.vocabulary()
            different = sorted(ours.items() ^ theirs.items(), key=lambda entry: entry[1])
            if different:
                token, token_id = different[0]
                requirement = f"a model with the vocabulary of {self.name}: token {token_id} is {token!r} in one"
                raise InvalidParameterError("reference", reference.name, requirement)
