"""Images of Idefics3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): square tiles, and the whole image as one more.

An image is resized so that its longest edge has a given length. With splitting, it is then resized to multiples of the
tile's side, and cut into tiles; the whole image, resized to one tile, follows them. Sizes are computed with the float
arithmetic of transformers 5.23, since a rounding error could change the number of tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ferrule._vision.processors.processor import ProcessedImage
from ferrule.archs.config import Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

IMAGE, FAKE, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
MAX_SIDE = 4096
"""Maximum side of a resized image, in pixels."""
RESAMPLING = (1, 2, 3)
"""Supported filters under Pillow's numbers: Lanczos, bilinear, bicubic."""
NAMES = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
SUFFIXES = ("", "Fast", "Pil")
"""Suffixes of the names of processors that differ in the library that resizes."""


@dataclass(frozen=True)
class Idefics3Processor:
    """Sizes, in pixels, and normalization of a model's images."""

    image_token_id: int
    patch: int
    """Side of a patch."""
    block: int
    """Side of the square of patches whose hidden states are joined to one token."""
    table: int
    """Side of the tower's table of positions, in patches."""
    tile: int
    """Side of a tile."""
    longest_edge: int
    """Longest edge of an image before it is split."""
    splits: bool
    """Whether images are split into tiles."""
    resample: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    rescale: float
    """Factor of the pixels before normalization."""

    @property
    def placeholder(self) -> str:
        """Text of an image in a rendered conversation."""
        return IMAGE

    @property
    def tile_tokens(self) -> int:
        """Number of image tokens of a tile."""
        return (self.tile // self.patch // self.block) ** 2

    def process(self, image: Image) -> ProcessedImage:
        """Prepares an image in mode RGB."""
        import numpy as np

        tiles, rows, columns = self._tiles(image)
        patches = np.stack([self._patches(tile) for tile in tiles])
        text = self._text(rows, columns)
        return ProcessedImage(text, patches, self._positions(), len(tiles) * self.tile_tokens)

    def _tiles(self, image: Image) -> tuple[list[Image], int, int]:
        """Returns the tiles, and the number of their rows and columns; without rows the image is one tile."""
        side = self.tile
        image = image.resize(resized_to_edge(*image.size, self.longest_edge), self.resample)
        rows = columns = 0
        tiles: list[Image] = []
        if self.splits:
            width, height = resized_to_tiles(*image.size, side)
            image = image.resize((width, height), self.resample)
            if width > side or height > side:
                rows, columns = height // side, width // side
                corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
                tiles = [image.crop((left, top, left + side, top + side)) for left, top in corners]
        return [*tiles, image.resize((side, side), self.resample)], rows, columns

    def _patches(self, tile: Image) -> NDArray[np.float32]:
        """Returns the normalized patches of a tile [patches, 3 * patch * patch], block by block."""
        import numpy as np

        blocks = self.tile // self.patch // self.block
        # [row of blocks, row in block, row in patch, column of blocks, column in block, column in patch, channel]
        pixels = np.asarray(tile).reshape(blocks, self.block, self.patch, blocks, self.block, self.patch, 3)
        patches = pixels.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, self.patch * self.patch).astype(np.float32)
        scale = np.float32(1 / self.rescale)
        patches -= (np.array(self.mean, np.float32) * scale)[:, None]
        patches /= (np.array(self.deviation, np.float32) * scale)[:, None]
        return patches.reshape(len(patches), -1)

    def _positions(self) -> NDArray[np.uint32]:
        """Returns the rows of the position table for the patches of a tile [patches], block by block."""
        import numpy as np

        side = self.tile // self.patch
        blocks = side // self.block
        steps = _buckets(side, self.table)
        positions = (steps[:, None] * self.table + steps).reshape(blocks, self.block, blocks, self.block)
        return positions.transpose(0, 2, 1, 3).reshape(-1).astype(np.uint32)

    def _text(self, rows: int, columns: int) -> str:
        tokens = IMAGE * self.tile_tokens
        lines = [
            "".join(f"{FAKE}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        whole = f"{FAKE}{GLOBAL}{tokens}{FAKE}"
        return "".join([*lines, "\n", whole]) if lines else whole


def read_idefics3(directory: Path) -> Idefics3Processor:
    """Reads the processor of a model's directory.

    Raises ConfigError, ModelFileError; ModelNotFoundError if a file is missing.
    """
    model = Config.read(directory / "config.json")
    tower = model.inner("vision_config")
    tower.require(num_channels=3)
    processor = Config.read_optional(directory / "processor_config.json")
    # Files of transformers 4 have the image processor in a separate file.
    own = "image_processor" in processor
    images = processor.inner("image_processor") if own else Config.read(directory / "preprocessor_config.json")
    images.require(do_resize=True, do_rescale=True, do_normalize=True, do_convert_rgb=True)
    names = [name + suffix for name in NAMES for suffix in SUFFIXES]
    if images.text("image_processor_type", default=names[0]) not in names:
        raise images.unsupported("image_processor_type", f"one of {', '.join(NAMES)}")
    patch, block = tower.integer("patch_size", default=32, high=MAX_SIDE), model.integer("scale_factor", default=2)
    tiles = images.inner("max_image_size")
    tile = tiles.integer("longest_edge", default=364, high=MAX_SIDE)
    if tile % (patch * block):
        raise tiles.error("longest_edge", f"a multiple of patch_size * scale_factor ({patch * block})")
    edges = images.inner("size")
    read = Idefics3Processor(
        image_token_id=model.integer("image_token_id", default=128257, low=0),
        patch=patch,
        block=block,
        table=tower.integer("image_size", default=224, low=patch, high=MAX_SIDE) // patch,
        tile=tile,
        longest_edge=edges.integer("longest_edge", default=None if edges.values else 4 * 364),
        splits=images.flag("do_image_splitting", default=True),
        resample=_resampling(images),
        mean=_channels(images, "image_mean"),
        deviation=_channels(images, "image_std"),
        rescale=images.number("rescale_factor", default=1 / 255),
    )
    if processor.integer("image_seq_len", default=read.tile_tokens) != read.tile_tokens:
        raise processor.error("image_seq_len", f"{read.tile_tokens}, the number of image tokens of a tile")
    return read


def resized_to_edge(width: int, height: int, longest: int) -> tuple[int, int]:
    """Returns the width and height with a longest edge of `longest` pixels; the other side is rounded up to be even."""
    aspect = width / height
    if width >= height:
        width, height = longest, _even(int(longest / aspect))
    else:
        width, height = _even(int(longest * aspect)), longest
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / aspect)
    elif height > width and height > MAX_SIDE:
        width, height = int(MAX_SIDE * aspect), MAX_SIDE
    return max(width, 1), max(height, 1)


def resized_to_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """Returns the width and height as multiples of the side of a tile."""
    aspect = width / height
    if width >= height:
        width = _multiple(width, tile)
        return width, _multiple(int(width / aspect), tile)
    height = _multiple(height, tile)
    return _multiple(int(height * aspect), tile), height


def _even(side: int) -> int:
    return side + side % 2


def _multiple(side: int, tile: int) -> int:
    return max(math.ceil(side / tile), 1) * tile


def _buckets(side: int, table: int) -> NDArray[np.int64]:
    """Returns for each of `side` patches the row of a table with `table` rows, in float32 as transformers computes it.

    A patch that is an exact fraction can get the previous row, because its product is rounded.
    """
    import numpy as np

    step = 1 / table
    bounds = np.array([step + step * row for row in range(math.ceil((1 - step) / step))], np.float32)
    fractions = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    return np.searchsorted(bounds, np.minimum(fractions, np.float32(1 - 1e-6)), side="right")


def _resampling(images: Config) -> int:
    resample = images.integer("resample", default=1, low=0)
    if resample not in RESAMPLING:
        raise images.unsupported("resample", "1 (Lanczos), 2 (bilinear) or 3 (bicubic)")
    return resample


def _channels(images: Config, field: str) -> tuple[float, ...]:
    values = images.numbers(field) if field in images else (0.5, 0.5, 0.5)
    if len(values) != 3:
        raise images.error(field, "a list of 3 numbers above 0")
    return values
