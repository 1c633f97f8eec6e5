"""Reads the images of prompts into RGB.

Callers are not trusted: nothing is fetched, only formats of web pages and BMP are decoded, and sizes are checked before
decoding. Pillow is part of the extra `vision`.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ferrule._validation import shown
from ferrule.errors import ImageError, MissingDependencyError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats under Pillow's names; of an animation, the first frame is read."""
MAX_BYTES = 32 << 20
"""Maximum size of an encoded image, in bytes."""
MAX_PIXELS = 1 << 25
"""Maximum number of pixels of an image."""

_DATA_URL = re.compile(r"data:image/[^;,]*(?:;[^;,]*)*;base64,", re.IGNORECASE)
_FETCHED = re.compile(r"(?:https?|ftp|file):", re.IGNORECASE)
_WHITESPACE = re.compile(r"[ \t\r\n]")


def read_image(given: object, field: str) -> Image:
    """Returns an image in mode RGB; transparent pixels are composited onto white.

    `given` is a PIL image, the bytes of a PNG, JPEG, WebP, GIF or BMP file, the path of such a file, a data URL with
    one in base64, or a uint8 array [height, width, 3]. The EXIF orientation of a file is applied. `field` names the
    image in error messages.

    Raises ImageError, and MissingDependencyError without Pillow.
    """
    pillow = _pillow()
    if isinstance(given, pillow.Image):
        return _rgb(cast("Image", given), field, "image")
    if isinstance(given, str):
        return _decoded(_from_data_url(given, field), field)
    if isinstance(given, os.PathLike):
        return _decoded(_from_file(cast("os.PathLike[str]", given), field), field)
    if isinstance(given, (bytes, bytearray, memoryview)):
        return _decoded(cast("bytes | bytearray | memoryview[int]", given), field)
    return _from_array(given, field)


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise MissingDependencyError("images require Pillow: pip install 'ferrule[vision]'") from error
    return PIL.Image


def _from_data_url(url: str, field: str) -> bytes:
    opening = _DATA_URL.match(url)
    if opening is None:
        advice = "; images are not fetched: send a data URL" if _FETCHED.match(url) else ""
        found = shown(url[:128])
        raise ImageError(f"{field} must begin with data:image/...;base64, got {found}{advice}", field=field)
    # Four characters encode three bytes; the slack is for line breaks.
    if len(url) - opening.end() > MAX_BYTES * 3 // 2:
        raise _too_long(f"more than {MAX_BYTES}", field)
    try:
        return base64.b64decode(_WHITESPACE.sub("", url[opening.end() :]), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{field} is not valid base64: {error}", field=field) from None


def _from_file(given: os.PathLike[str], field: str) -> bytes:
    path = Path(os.fsdecode(given))
    found = repr(str(path)[-200:])
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
        with path.open("rb") if regular else io.BytesIO() as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"{field} must be a readable file, got {found}: {reason}", field=field) from error
    if not regular:
        raise ImageError(f"{field} must be a regular file, got {found}", field=field)
    return data


def _from_array(given: object, field: str) -> Image:
    import numpy as np

    if not isinstance(given, np.ndarray):
        kinds = "a PIL image, encoded bytes, a path, a data URL or a uint8 array [height, width, 3]"
        raise ImageError(f"{field} must be {kinds}, got a value of type {type(given).__name__}", field=field)
    array = cast("np.ndarray[Any, np.dtype[Any]]", given)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        found = f"{array.dtype} {list(array.shape)}"
        raise ImageError(f"{field} must be a uint8 array [height, width, 3], got {found}", field=field)
    _check_size(array.shape[1], array.shape[0], field)
    return _pillow().fromarray(np.ascontiguousarray(array))


def _decoded(data: bytes | bytearray | memoryview[int], field: str) -> Image:
    length = data.nbytes if isinstance(data, memoryview) else len(data)
    if length > MAX_BYTES:
        raise _too_long("more" if length == MAX_BYTES + 1 else str(length), field)
    if not length:
        raise ImageError(f"{field} must have at least 1 byte, got 0", field=field)
    pillow = _pillow()
    from PIL import UnidentifiedImageError
    from PIL.ImageOps import exif_transpose

    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise ImageError(f"{field} must have at most {MAX_PIXELS} pixels, got many more", field=field) from None
    except UnidentifiedImageError:
        found = f"{length} bytes that begin with {bytes(data[:8])!r}"
        raise ImageError(f"{field} must be a PNG, JPEG, WebP, GIF or BMP file, got {found}", field=field) from None
    except Exception as error:  # Pillow raises errors of many types for malformed headers
        raise _malformed("file", error, field) from error
    return _rgb(image, field, f"{image.format} file", exif_transpose)


def _rgb(image: Image, field: str, name: str, upright: Callable[[Image], Image] | None = None) -> Image:
    """Decodes an image, and composites it onto white if it is transparent."""
    _check_size(*image.size, field)
    pillow = _pillow()
    try:
        image.load()
        image = image if upright is None else upright(image)
        if "A" not in image.getbands() and image.info.get("transparency") is None:
            return image.convert("RGB")
        image = image.convert("RGBA")
        return pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image).convert("RGB")
    except Exception as error:  # Pillow raises errors of many types for malformed data
        raise _malformed(name, error, field) from error


def _check_size(width: int, height: int, field: str) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"{field} must have at least 1 x 1 pixels, got {width} x {height}", field=field)
    if width * height > MAX_PIXELS:
        raise ImageError(f"{field} must have at most {MAX_PIXELS} pixels, got {width} x {height}", field=field)


def _too_long(found: str, field: str) -> ImageError:
    return ImageError(f"{field} must have at most {MAX_BYTES} bytes, got {found}", field=field)


def _malformed(name: str, error: Exception, field: str) -> ImageError:
    return ImageError(f"{field} is a malformed {name}: {str(error)[:200] or type(error).__name__}", field=field)
