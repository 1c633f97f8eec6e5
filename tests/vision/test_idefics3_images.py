"""Images of Idefics3 and SmolVLM: pixels, texts and positions of transformers 5.23, and sizes of any image."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from ferrule import ConfigError, ModelNotFoundError, PromptError
from ferrule._vision.images import read_image
from ferrule._vision.processors import PROCESSORS, ProcessedImage
from ferrule._vision.processors.idefics3 import (
    Idefics3Processor,
    read_idefics3,
    resized_to_edge,
    resized_to_tiles,
)
from ferrule._vision.prompt import expand

GOLDEN = Path(__file__).parents[1] / "golden" / "vision"
CASES = ("smolvlm", "idefics3")
SMOLVLM = Idefics3Processor(
    image_token_id=49190,
    patch=16,
    block=4,
    table=32,
    tile=512,
    longest_edge=2048,
    splits=True,
    resample=1,
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
    rescale=1 / 255,
)
"""SmolVLM-256M-Instruct."""
SIDES = st.integers(1, 8000)


def processed(case: str) -> list[ProcessedImage]:
    """The two images of a golden case."""
    processor = PROCESSORS[case](GOLDEN / case)
    return [processor.process(read_image(GOLDEN / case / f"image{index}.png", "image")) for index in (0, 1)]


def tiles_of(image: ProcessedImage, patch: int, block: int) -> NDArray[np.float32]:
    """Pixels [tiles, 3, side, side], put together from the patches one by one."""
    side = math.isqrt(image.patches.shape[1])
    blocks = side // block
    tiles = np.zeros((len(image.patches), 3, side * patch, side * patch), np.float32)
    for index in range(side * side):
        row_of_blocks, column_of_blocks = divmod(index // block**2, blocks)
        row_in_block, column_in_block = divmod(index % block**2, block)
        top = (row_of_blocks * block + row_in_block) * patch
        left = (column_of_blocks * block + column_in_block) * patch
        values = image.patches[:, index].reshape(-1, 3, patch, patch)
        tiles[:, :, top : top + patch, left : left + patch] = values
    return tiles


def reference_tiles(width: int, height: int, longest: int, tile: int) -> tuple[int, int]:
    """Rows and columns of tiles as transformers computes them; zeros for an image that is not split."""
    size = [height, width]
    long, short = (1, 0) if width >= height else (0, 1)
    for maximum, only_shrinks in ((longest, False), (4096, True)):
        ratio = size[1] / size[0]
        if only_shrinks and size[long] <= maximum:
            continue
        size[long] = maximum
        size[short] = int(maximum / ratio) if long == 1 else int(maximum * ratio)
        if not only_shrinks and size[short] % 2 == 1:
            size[short] += 1
        size = [max(side, 1) for side in size]
        long, short = (1, 0) if size[1] >= size[0] else (0, 1)
    ratio = size[1] / size[0]
    size[long] = math.ceil(size[long] / tile) * tile
    size[short] = math.ceil((int(size[1] / ratio) if long == 1 else int(size[0] * ratio)) / tile) * tile
    rows, columns = size[0] // tile, size[1] // tile
    return (rows, columns) if rows > 1 or columns > 1 else (0, 0)


def changed(tmp_path: Path, changes: dict[str, dict[str, Any]], case: str = "smolvlm") -> Path:
    """A directory with the files of a golden case; values replace fields at dotted paths."""
    for name in ("config.json", "processor_config.json", "preprocessor_config.json"):
        values = json.loads((GOLDEN / case / name).read_text())
        for path, value in changes.get(name, {}).items():
            *parents, field = path.split(".")
            holder = values
            for parent in parents:
                holder = holder[parent]
            holder[field] = value
        (tmp_path / name).write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_those_of_transformers(case: str) -> None:
    """Pillow's Lanczos filter and torchvision's differ by up to two levels of 255 in single pixels."""
    golden = np.load(GOLDEN / case / "golden.npz")["pixel_values"][0]
    found = np.concatenate([tiles_of(image, 8, 2) for image in processed(case)])
    real = golden[np.any(golden != 0, axis=(1, 2, 3))]
    assert found.shape == real.shape
    levels = np.abs(found - real) * 127.5
    assert levels.max() < 2.01
    assert levels.mean() < 0.15


@pytest.mark.parametrize("case", CASES)
def test_prompt_is_that_of_transformers(case: str) -> None:
    golden = np.load(GOLDEN / case / "golden.npz")
    processor, images = PROCESSORS[case](GOLDEN / case), processed(case)
    text = expand(str(golden["prompt"]), images, processor)
    tokenizer = Tokenizer.from_file(str(GOLDEN / case / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == golden["input_ids"].tolist()
    assert ids.count(processor.image_token_id) == sum(image.tokens for image in images)
    assert len(golden["image_features"]) == sum(image.tokens for image in images)


@pytest.mark.parametrize("case", CASES)
def test_positions_follow_the_patches(case: str) -> None:
    image = processed(case)[0]
    assert image.positions.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert image.positions.dtype == np.uint32
    assert image.patches.dtype == np.float32
    assert image.patches.flags.c_contiguous


@pytest.mark.parametrize(("side", "table"), [(4, 4), (26, 26), (32, 32), (64, 64), (16, 32), (32, 16), (6, 4)])
def test_positions_scale_to_the_table(side: int, table: int) -> None:
    processor = replace(SMOLVLM, patch=2, block=1, tile=2 * side, table=table, longest_edge=2 * side, splits=False)
    positions = processor.process(Image.new("RGB", (3, 3))).positions.reshape(side, side)
    rows = [index * table // side for index in range(side)]
    assert positions.tolist() == [[row * table + column for column in rows] for row in rows]


def test_a_rounded_fraction_gets_the_previous_position() -> None:
    """In float32, 5 * (1 / 25) is below 5 / 25."""
    processor = replace(SMOLVLM, patch=1, block=1, tile=25, table=25, longest_edge=25, splits=False)
    positions = processor.process(Image.new("RGB", (1, 1))).positions
    assert positions[:8].tolist() == [0, 1, 2, 3, 4, 4, 6, 7]


@pytest.mark.parametrize(
    ("size", "tiles"),
    [
        ((1, 1), (4, 4)),
        ((1, 5000), (4, 1)),
        ((3000, 10), (1, 4)),
        ((512, 512), (4, 4)),
        ((2048, 1024), (2, 4)),
        ((2048, 1025), (3, 4)),
        ((2048, 1), (1, 4)),
        ((640, 480), (3, 4)),
    ],
)
def test_tiles_of_smolvlm(size: tuple[int, int], tiles: tuple[int, int]) -> None:
    rows, columns = tiles
    image = SMOLVLM.process(Image.new("RGB", size, "white"))
    assert image.patches.shape == (rows * columns + 1, 1024, 768)
    assert image.tokens == image.text.count("<image>") == 64 * (rows * columns + 1)
    assert f"<row_{rows}_col_{columns}>" in image.text
    assert f"<row_{rows + 1}_" not in image.text
    assert image.text.endswith(
        "\n\n<fake_token_around_image><global-img>" + "<image>" * 64 + "<fake_token_around_image>"
    )
    assert np.all(image.patches == 1)


@given(
    width=SIDES, height=SIDES, longest=st.sampled_from([364, 512, 1456, 2048, 5000]), tile=st.sampled_from([364, 512])
)
@example(width=1, height=8000, longest=2058, tile=98)
@settings(deadline=None)
def test_sizes_are_those_of_transformers(width: int, height: int, longest: int, tile: int) -> None:
    resized = resized_to_edge(width, height, longest)
    assert min(resized) >= 1
    assert max(resized) == min(longest, 4096)
    full = resized_to_tiles(*resized, tile)
    assert min(full) >= tile
    rows, columns = reference_tiles(width, height, longest, tile)
    if rows or columns:
        # transformers fails on an image whose short side is rounded to 0; here it is one tile wide.
        assert full == (max(columns, 1) * tile, max(rows, 1) * tile)
    else:
        assert full == (tile, tile)


@given(width=st.integers(1, 300), height=st.integers(1, 300), splits=st.booleans())
@settings(deadline=None, max_examples=50)
def test_text_and_patches_of_any_image_agree(width: int, height: int, splits: bool) -> None:
    processor = replace(SMOLVLM, patch=4, block=2, tile=16, table=4, longest_edge=64, splits=splits)
    image = processor.process(Image.new("RGB", (width, height), "black"))
    rows, columns = reference_tiles(width, height, 64, 16) if splits else (0, 0)
    assert len(image.patches) == max(rows, 1) * max(columns, 1) + 1 if rows or columns else len(image.patches) == 1
    assert image.tokens == image.text.count("<image>") == 4 * len(image.patches)
    assert image.text.count("<fake_token_around_image>") == len(image.patches) + 1
    assert np.all(image.patches == -1)


def test_files_of_transformers_4_are_read(tmp_path: Path) -> None:
    expected = read_idefics3(GOLDEN / "smolvlm")
    directory = changed(tmp_path, {})
    (directory / "processor_config.json").write_text('{"image_seq_len": 4, "processor_class": "Idefics3Processor"}')
    assert read_idefics3(directory) == expected
    (directory / "processor_config.json").unlink()
    assert read_idefics3(directory) == expected
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"preprocessor_config\.json"):
        read_idefics3(directory)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {"image_size": 364, "patch_size": 14}}')
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert read_idefics3(tmp_path) == Idefics3Processor(
        image_token_id=128257,
        patch=14,
        block=2,
        table=26,
        tile=364,
        longest_edge=1456,
        splits=True,
        resample=1,
        mean=(0.5, 0.5, 0.5),
        deviation=(0.5, 0.5, 0.5),
        rescale=1 / 255,
    )


@pytest.mark.parametrize(
    ("file", "path", "value", "message"),
    [
        ("config.json", "vision_config.num_channels", 1, "vision_config.num_channels must be 3, got 1"),
        ("config.json", "vision_config.patch_size", [8, 8], "vision_config.patch_size must be an integer"),
        ("config.json", "vision_config.image_size", 4, "vision_config.image_size must be an integer from 8"),
        ("config.json", "scale_factor", 0, "scale_factor must be an integer from 1"),
        ("config.json", "image_token_id", "<image>", "image_token_id must be an integer"),
        ("processor_config.json", "image_seq_len", 169, "image_seq_len must be 4, the number of image tokens"),
        ("processor_config.json", "image_processor.do_resize", False, "image_processor.do_resize must be true"),
        ("processor_config.json", "image_processor.do_normalize", False, "image_processor.do_normalize must be true"),
        ("processor_config.json", "image_processor.resample", 0, "image_processor.resample must be 1 (Lanczos)"),
        ("processor_config.json", "image_processor.image_std", [0.5], "image_std must be a list of 3 numbers"),
        ("processor_config.json", "image_processor.image_std", [0.5, 0.5, 0], "image_std must be a list of finite"),
        ("processor_config.json", "image_processor.rescale_factor", 0, "rescale_factor must be a finite number"),
        ("processor_config.json", "image_processor.size", {"height": 64, "width": 64}, "size.longest_edge must be"),
        (
            "processor_config.json",
            "image_processor.max_image_size.longest_edge",
            40,
            "a multiple of patch_size * scale",
        ),
        (
            "processor_config.json",
            "image_processor.image_processor_type",
            "CLIPImageProcessor",
            "image_processor_type must be one of Idefics3ImageProcessor, SmolVLMImageProcessor, got",
        ),
    ],
)
def test_other_configurations_are_refused(tmp_path: Path, file: str, path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_idefics3(changed(tmp_path, {file: {path: value}}))
    assert file in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "count"), [("no image", 1), ("<image>", 0), ("<image> and <image>", 1)])
def test_each_placeholder_needs_an_image(text: str, count: int) -> None:
    images = processed("smolvlm")[:count]
    found = f"got {text.count('<image>')} placeholders for {count} images"
    with pytest.raises(PromptError, match=found):
        expand(text, images, read_idefics3(GOLDEN / "smolvlm"))


def test_a_text_without_images_stays() -> None:
    assert expand("How are you?", [], read_idefics3(GOLDEN / "smolvlm")) == "How are you?"
