"""Takes images out of conversations before their values are copied and counted as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ferrule._text.chat.render import Message
from ferrule._text.chat.values import fields_of
from ferrule._validation import shown
from ferrule.errors import ImageError

IMAGE_PART = "image"
"""Type of an image part for templates, which has no other field."""
IMAGE_PARTS = ("image_url", "input_image", "image_pil", IMAGE_PART)
"""Types of image parts: OpenAI's two APIs, vLLM, and transformers."""
SOURCES = ("image", "url", "path", "base64")
"""Fields of a part of transformers, one of which holds the image."""


@dataclass(frozen=True)
class ImageSource:
    """An image of a conversation as the caller gave it. It may stand in the content of a message like a part."""

    value: object
    """A PIL image, the bytes of a file, a path, an array, or a data URL; checked when the image is read."""
    field: str
    """Name of the field in error messages."""


def take_images(messages: Sequence[Message], *, supported: bool) -> tuple[Sequence[Message], list[ImageSource]]:
    """Returns the messages with `{"type": "image"}` for each image, and the images in the order of the messages.

    Values of other types are left for `adapt_messages`, which checks them.

    Raises ImageError for an image without a source, and for any image if the model does not support images.
    """
    given = cast("object", messages)  # may be of another type in an untyped program
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        return messages, []
    sources: list[ImageSource] = []
    taken = [_without_images(message, f"messages[{index}]", sources) for index, message in enumerate(messages)]
    if sources and not supported:
        field = sources[0].field
        raise ImageError(f"{field} must not be an image: the model reads text only", field=field)
    return taken, sources


def data_url(encoded: str) -> str:
    """Returns the data URL of an image in base64; its format is found by its content."""
    return f"data:image/*;base64,{encoded}"


def _without_images(message: Message, where: str, sources: list[ImageSource]) -> Message:
    """Returns a message with its images replaced, which are appended to `sources`."""
    fields = fields_of(message)
    content: object = None if fields is None else fields.get("content")
    if not isinstance(content, list):
        return message
    before = len(sources)
    parts: list[object] = []
    for index, part in enumerate(cast("list[object]", content)):
        source = _source(part, f"{where}.content[{index}]")
        if source is not None:
            sources.append(source)
        parts.append(part if source is None else {"type": IMAGE_PART})
    return message if len(sources) == before else {**cast("Message", fields), "content": parts}


def _source(part: object, where: str) -> ImageSource | None:
    """Returns the image of a part; None for other parts."""
    if isinstance(part, ImageSource):
        return part
    fields = fields_of(part)
    kind = None if fields is None else fields.get("type")
    if fields is None or kind not in IMAGE_PARTS:
        return None
    names = SOURCES if kind == IMAGE_PART else ("image_pil",) if kind == "image_pil" else ("image_url",)
    given = [name for name in names if fields.get(name) is not None]
    if len(given) != 1:
        limit = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
        found = " and ".join(given) or "none"
        raise ImageError(f"{where} must have {limit} beside the type {shown(kind)}, got {found}", field=where)
    value, field = fields[given[0]], f"{where}.{given[0]}"
    match given[0]:
        case "image_url" if (url := fields_of(value)) is not None:
            return ImageSource(url.get("url"), f"{field}.url")
        case "base64" if isinstance(value, str):
            return ImageSource(data_url(value), field)
        case _:
            return ImageSource(value, field)
