"""Prompts with images: the placeholder of each image is replaced by its text, and features belong to its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ferrule._vision.model import PreparedImage
from ferrule._vision.processors import ProcessedImage, Processor
from ferrule.errors import PromptError


class Features(NamedTuple):
    """Features of an image, in place of the embeddings of consecutive tokens."""

    first: int
    """Position of the first token."""
    tokens: int
    rows: bytes
    """float32 `[tokens, width]`."""


def expand(text: str, images: Sequence[ProcessedImage | PreparedImage], processor: Processor) -> str:
    """Returns a prompt in which each placeholder is replaced by the text of its image, in order.

    Raises PromptError if the numbers of placeholders and images differ.
    """
    first, *rest = text.split(processor.placeholder)
    if len(rest) != len(images):
        raise PromptError(
            f"the prompt must have one placeholder {processor.placeholder} for each image, "
            f"got {len(rest)} placeholders for {len(images)} images"
        )
    return "".join([first, *(image.text + after for image, after in zip(images, rest, strict=True))])


def placed(images: Sequence[PreparedImage], token_ids: Sequence[int], image_token_id: int) -> list[Features] | None:
    """Returns the features of images at the places of their tokens; None if the numbers of tokens differ."""
    places = [place for place, token in enumerate(token_ids) if token == image_token_id]
    if len(places) != sum(image.tokens for image in images):
        return None
    features: list[Features] = []
    for image in images:
        tokens, rows = image.tokens, image.features()
        own, places, width = places[:tokens], places[tokens:], len(rows) // tokens
        # Tokens between the tiles of an image divide its features.
        ends = (index for index in range(1, tokens) if own[index] != own[index - 1] + 1)
        for start, end in itertools.pairwise([0, *ends, tokens]):
            features.append(Features(own[start], end - start, rows[start * width : end * width]))
    return features
