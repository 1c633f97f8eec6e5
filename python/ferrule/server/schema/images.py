"""Images in requests: data URLs and base64. The reader of images checks them, and refuses other URLs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, cast

from pydantic import Discriminator, Tag

from ferrule._text.chat import ImageSource
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.unions import str_or_object

IMAGE_TYPES = ("image_url", "input_image")


class ImageUrl(RequestModel):
    """URL of an image."""

    url: str
    detail: str | None = None
    """Accepted without effect: the model's configuration sets the resolution."""


class ImagePart(RequestModel):
    """Image part of a message."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[ImageUrl, Tag("<object>")], Discriminator(str_or_object)
    ]

    def source(self, where: str) -> ImageSource:
        """Returns the image, which is the part at `where` of the request."""
        if isinstance(self.image_url, str):
            return ImageSource(self.image_url, f"{where}.image_url")
        return ImageSource(self.image_url.url, f"{where}.image_url.url")


def part_kind(part: object) -> str:
    """Returns the tag of a part of a message: `<image>` or `<text>`."""
    is_mapping = isinstance(part, Mapping)
    kind: object = cast("Mapping[str, object]", part).get("type") if is_mapping else getattr(part, "type", None)
    return "<image>" if kind in IMAGE_TYPES else "<text>"
