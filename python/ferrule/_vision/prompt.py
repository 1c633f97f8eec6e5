"""Prompts with images: the placeholder of each image is replaced by the text of the image."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule._vision.processors import ProcessedImage, Processor
from ferrule.errors import PromptError


def expand(text: str, images: Sequence[ProcessedImage], processor: Processor) -> str:
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
