"""Images of prompts from all sources, and the errors of images that are malformed, too large or elsewhere."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pickle
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from ferrule import ImageError, MissingDependencyError
from ferrule._vision import images
from ferrule._vision.images import FORMATS, MAX_BYTES, MAX_PIXELS, read_image

FIELD = "messages[0].content[1].image_url.url"
PIXELS = np.random.default_rng(7).integers(0, 256, (5, 9, 3), np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """An image as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """A data URL in base64."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_header(width: int, height: int) -> bytes:
    """A PNG file that ends where its pixels should begin."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">II", zlib.crc32(header), 9) + b"IDAT"


def refused(given: object, *fragments: str) -> str:
    """Checks that an image is refused with an error that names the field, and returns its message."""
    with pytest.raises(ImageError) as caught:
        read_image(given, FIELD)
    message = str(caught.value)
    assert caught.value.field == FIELD
    assert message.startswith(FIELD)
    assert len(message) < 400
    for fragment in fragments:
        assert fragment in message
    return message


def test_every_source_gives_the_same_image(tmp_path: Path) -> None:
    png = encoded(Image.fromarray(PIXELS))
    file = tmp_path / "image.png"
    file.write_bytes(png)
    wrapped = base64.encodebytes(png).decode()
    sources: list[object] = [
        Image.fromarray(PIXELS),
        png,
        bytearray(png),
        memoryview(png),
        file,
        data_url(png),
        data_url(png, "image/jpeg"),
        f"DATA:image/*;charset=utf-8;base64,{wrapped}",
        PIXELS,
        np.asfortranarray(PIXELS),
        PIXELS[::-1][::-1],
    ]
    for source in sources:
        image = read_image(source, FIELD)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), PIXELS)


@pytest.mark.parametrize("kind", FORMATS)
def test_all_formats_are_read(kind: str) -> None:
    image = read_image(encoded(Image.fromarray(PIXELS), kind), FIELD)
    assert image.size == (9, 5)
    assert image.mode == "RGB"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation_is_read(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert read_image(data, FIELD).getpixel((1, 1)) == (255, 0, 0)


def test_transparent_pixels_become_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 255, 0))
    image.putpixel((1, 0), (0, 0, 255, 255))
    for source in (image, encoded(image)):
        read = read_image(source, FIELD)
        assert [read.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (0, 0, 255)]
    half = read_image(Image.new("LA", (1, 1), (0, 128)), FIELD).getpixel((0, 0))
    assert half == (127, 127, 127)


def test_transparent_palette_and_color_become_white() -> None:
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    read = read_image(encoded(palette, transparency=0), FIELD)
    assert [read.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (40, 50, 60)]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "I;16", "YCbCr", "F"])
def test_other_modes_are_converted(mode: str) -> None:
    assert read_image(Image.new(mode, (3, 2)), FIELD).mode == "RGB"


def test_encoded_images_are_rotated_as_their_exif_data_say() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the top of the image is at the right
    data = encoded(Image.fromarray(PIXELS), exif=exif)
    assert np.array_equal(np.asarray(read_image(data, FIELD)), np.rot90(PIXELS, -1))


@pytest.mark.parametrize(
    "url", ["http://host/a.png", "https://host/a.png", "file:///etc/passwd", "FILE:a.png", "ftp://host/a.png"]
)
def test_nothing_is_fetched(url: str) -> None:
    refused(url, repr(url), "images are not fetched: send a data URL")


@pytest.mark.parametrize(
    "url", ["", "image.png", "/etc/passwd", "data:text/plain;base64,aGk=", "data:image/png,%89PNG", "x" * 10**6]
)
def test_other_texts_are_refused(url: str) -> None:
    assert "fetched" not in refused(url, "must begin with data:image/...;base64,")


@pytest.mark.parametrize("text", ["aGk", "aG*k", "aGkö", "a", "====", "aGk=aGk=a"])
def test_malformed_base64_is_refused(text: str) -> None:
    refused(f"data:image/png;base64,{text}", "base64")


@pytest.mark.parametrize("data", [b"", "data:image/png;base64,"])
def test_empty_data_are_refused(data: object) -> None:
    refused(data, "at least 1 byte, got 0")


@pytest.mark.parametrize(
    "data", [b"hello", b"%PDF-1.7", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x89PNG", b"\x00" * 100]
)
def test_unknown_formats_are_refused(data: bytes) -> None:
    refused(data, "PNG, JPEG, WebP, GIF or BMP", f"{len(data)} bytes", repr(data[:8]))


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "TGA", "PCX"])
def test_other_formats_of_pillow_are_refused(kind: str) -> None:
    refused(encoded(Image.fromarray(PIXELS), kind), "PNG, JPEG, WebP, GIF or BMP")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_truncated_file_is_refused(kind: str) -> None:
    """Formats with bytes after the pixels may be readable without them; no other error is allowed."""
    data = encoded(Image.fromarray(PIXELS), kind)
    refused(data[: len(data) // 2])
    for length in range(len(data)):
        with contextlib.suppress(ImageError):
            read_image(data[:length], FIELD)


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_raise_no_other_error(kind: str) -> None:
    data = encoded(Image.fromarray(PIXELS), kind)
    random = np.random.default_rng(11)
    for _ in range(300):
        damaged = bytearray(data)
        for index in random.integers(0, len(data), 3):
            damaged[index] = int(random.integers(0, 256))
        with contextlib.suppress(ImageError):
            assert read_image(damaged, FIELD).mode == "RGB"


def test_size_is_limited_before_decoding() -> None:
    refused(png_header(1 << 13, (1 << 12) + 1), str(MAX_PIXELS), "8192 x 4097")
    refused(png_header(1 << 30, 1 << 30), str(MAX_PIXELS))
    refused(png_header(10_000, 10_000), str(MAX_PIXELS))
    refused(png_header(1 << 13, 1 << 12), "malformed PNG file")
    refused(np.broadcast_to(np.uint8(0), (MAX_PIXELS + 1, 1, 3)), f"1 x {MAX_PIXELS + 1}")


def test_length_is_limited(tmp_path: Path) -> None:
    long = tmp_path / "long"
    with long.open("wb") as file:
        file.truncate(MAX_BYTES * 100)
    limit = f"at most {MAX_BYTES} bytes"
    refused(long, limit)
    refused(bytes(MAX_BYTES + 2), limit, str(MAX_BYTES + 2))
    refused("data:image/png;base64," + "A" * (2 * MAX_BYTES), limit)
    refused(memoryview(bytes(MAX_BYTES + 8)).cast("Q"), limit, str(MAX_BYTES + 8))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_sides_of_zero_are_refused(size: tuple[int, int]) -> None:
    found = f"{size[0]} x {size[1]}"
    refused(np.zeros((size[1], size[0], 3), np.uint8), found)
    refused(Image.new("RGB", size), found)


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 4), np.uint8), np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3))],
)
def test_other_arrays_are_refused(array: NDArray[Any]) -> None:
    refused(array, "uint8 array [height, width, 3]", str(list(array.shape)))


@pytest.mark.parametrize("given", [None, 5, [1, 2], {"url": "x"}, object()])
def test_other_types_are_refused(given: object) -> None:
    refused(given, "a PIL image", f"got a value of type {type(given).__name__}")


def test_files_that_are_not_regular_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused(pipe, "regular file")
    refused(tmp_path, "regular file")
    refused(tmp_path / "missing.png", "missing.png", "No such file")
    refused(Path("a\0b"), "must be a readable file")


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(ImageError("image must be a file", field=FIELD)))
    assert (str(error), error.field) == ("image must be a file", FIELD)


def test_pillow_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"ferrule\[vision\]"):
        images.read_image(b"", FIELD)
