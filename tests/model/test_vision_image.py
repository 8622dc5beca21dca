"""From a file to patches: the goldens bit for bit, and what happens to every odd kind of file (field case 45)."""

from __future__ import annotations

import io
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from rorqual.config import VisionConfig
from rorqual.config.image_grid import image_grid
from rorqual.errors import InputError
from rorqual.model.vision.image import (
    MAX_PIXELS,
    image_patches,
    image_token_ids,
    image_token_types,
    load_image,
)

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = ["fp32-vision", "fp32-vision-pad"]


def vision_config(case: str) -> VisionConfig:
    values = json.loads((GOLDENS / case / "config.json").read_text())["vision_config"]
    return VisionConfig(**{key: value for key, value in values.items() if key != "model_type"})


CONFIG = vision_config("fp32-vision")
NOISE = np.random.default_rng(1).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(source: bytes | Image.Image) -> np.ndarray:
    image = load_image(source)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("case", CASES)
def test_golden_patches_bit_for_bit(case: str) -> None:
    want = load_file(GOLDENS / case / "expected.safetensors")
    path = GOLDENS / case / "image_0.png"
    for source in (path, str(path), path.read_bytes(), Image.open(path)):
        image = image_patches(load_image(source), vision_config(case))
        assert torch.equal(image.patches, want["image.0.patches"])
    grid = image.grid
    start, *shape = want["image.0.grid"].tolist()
    assert [grid.patch_rows, grid.patch_cols, grid.rows, grid.cols] == shape
    types = want["token_types"][0, start : start + grid.tokens]
    assert torch.equal(image_token_types(grid), types)
    assert torch.equal(image_token_ids(grid, 510), want["input_ids"][0, start : start + grid.tokens])
    assert (want["token_types"][0] >= 0).sum() == grid.tokens


def test_small_images_are_centred_on_grey() -> None:
    """A white 10 x 40 bar in the middle of a wider grid: grey at both sides, white inside, -1..1 in bf16."""
    config = replace(CONFIG, min_pixels=1, max_wh_ratio=None)
    image = image_patches(Image.new("RGB", (10, 40), "white"), config)
    assert image.grid.best_width == 14 and image.grid.best_height == 42
    grey = torch.tensor((127 / 255 - 0.5) / 0.5).to(torch.bfloat16)
    row = image.patches[1, :, 7]  # the middle patch, one pixel row: [3, 14]
    assert torch.equal(row[:, [0, -1]], grey.expand(3, 2))
    assert (row[:, 2:-2] == 1).all()


def test_patches_are_row_major_and_channel_first() -> None:
    """An image of exactly its grid's size is cut, not resampled."""
    size = (42, 28)
    config = replace(CONFIG, min_pixels=1)
    values = np.random.default_rng(2).integers(0, 256, (28, 42, 3), dtype=np.uint8)
    patches = image_patches(Image.fromarray(values), config).patches
    assert (size[1] // 14 * (size[0] // 14), 3, 14, 14) == tuple(patches.shape)
    block = torch.from_numpy(values[14:28, 14:28].astype(np.float32)).permute(2, 0, 1)
    assert torch.equal(patches[1 * 3 + 1], ((block / 255 - 0.5) / 0.5).to(torch.bfloat16))


@pytest.mark.parametrize("size", [(1, 1), (1, 10000), (10000, 1), (13, 13), (42882, 42)])
def test_extreme_shapes_give_the_counted_patches(size: tuple[int, int]) -> None:
    """Field case 45 in the release's limits."""
    config = replace(CONFIG, max_image_tokens=1024, min_pixels=295936)
    image = image_patches(Image.new("RGB", size, "red"), config)
    assert image.grid == image_grid(*size, config)
    assert image.patches.shape == (image.grid.patches, 3, 14, 14)
    assert image_token_types(image.grid).numel() == image.grid.tokens <= 1024


def test_an_image_too_thin_for_its_grid_is_refused() -> None:
    config = replace(CONFIG, max_image_tokens=1024, min_pixels=295936)
    with pytest.raises(InputError, match="100000 x 1 pixels: too long and thin"):
        image_patches(Image.new("RGB", (100_000, 1)), config)


def test_the_hash_names_the_content() -> None:
    """Field case 16: two images of one size differ; the same pixels in another file format do not."""
    first, other = Image.fromarray(NOISE), Image.fromarray(NOISE[::-1].copy())
    digest = image_patches(first, CONFIG).sha256
    assert digest != image_patches(other, CONFIG).sha256
    assert digest == image_patches(load_image(encoded(first, "BMP")), CONFIG).sha256
    assert len(digest) == 64
    turned = [image_patches(Image.new("RGB", size), replace(CONFIG, min_pixels=1)) for size in ((14, 28), (28, 14))]
    assert torch.equal(turned[0].patches, turned[1].patches)
    assert turned[0].sha256 != turned[1].sha256


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_keep_every_pixel(kind: str) -> None:
    assert np.array_equal(pixels(encoded(Image.fromarray(NOISE), kind)), NOISE)


def test_lossless_webp_keeps_every_pixel() -> None:
    assert np.array_equal(pixels(encoded(Image.fromarray(NOISE), "WEBP", lossless=True)), NOISE)


def test_palette_grey_and_bilevel() -> None:
    palette = Image.fromarray(NOISE).quantize(16)
    want = np.asarray(palette.convert("RGB"))
    assert np.array_equal(pixels(encoded(palette, "PNG")), want)
    assert np.array_equal(pixels(encoded(palette, "GIF")), want)
    grey = NOISE[:, :, 0]
    assert np.array_equal(pixels(encoded(Image.fromarray(grey), "PNG")), np.repeat(grey[:, :, None], 3, axis=2))
    bilevel = Image.fromarray(grey).convert("1")
    assert set(pixels(encoded(bilevel, "PNG")).flatten().tolist()) == {0, 255}


def test_transparency_is_dropped_and_the_stored_colours_stay() -> None:
    alpha = np.concatenate([NOISE, np.zeros_like(NOISE[:, :, :1])], axis=2)
    assert np.array_equal(pixels(encoded(Image.fromarray(alpha), "PNG")), NOISE)


def png(width: int, height: int, depth: int, colour: int, raw: bytes) -> bytes:
    """A PNG of given raw scanlines (filter bytes included)."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_sixteen_bit_grey_and_rgb_keep_their_high_byte() -> None:
    """A plain conversion clips 16-bit grey at 255: nearly all white."""
    grey = np.array([[0, 255, 256, 0x1234, 0x80FF, 65535]], dtype=np.uint16)
    want = (grey >> 8).astype(np.uint8)
    assert np.array_equal(pixels(encoded(Image.fromarray(grey), "PNG"))[:, :, 1], want)
    assert np.array_equal(pixels(encoded(Image.fromarray(grey), "TIFF"))[:, :, 2], want)
    assert np.array_equal(pixels(Image.fromarray(grey))[:, :, 0], want)
    line = b"\0" + np.stack([grey[0], grey[0][::-1], grey[0]], axis=1).astype(">u2").tobytes()
    got = pixels(png(6, 1, 16, 2, line))
    assert np.array_equal(got[0], np.stack([want[0], want[0][::-1], want[0]], axis=1))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_becomes_the_colour_it_prints(kind: str) -> None:
    cyan, black = Image.new("CMYK", (16, 16), (255, 0, 0, 0)), Image.new("CMYK", (16, 16), (0, 0, 0, 255))
    for image, colour in ((cyan, (0, 255, 255)), (black, (0, 0, 0))):
        assert np.abs(pixels(encoded(image, kind)).astype(int) - np.array(colour)).max() <= 3


@pytest.mark.parametrize("mode", ["I", "F"])
def test_32_bit_channels_are_refused(mode: str) -> None:
    with pytest.raises(InputError, match=f"mode {mode} "):
        load_image(encoded(Image.new(mode, (4, 4), 7), "TIFF"))
    with pytest.raises(InputError, match=f"mode {mode} "):
        load_image(Image.new(mode, (4, 4), 7))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animations_and_multi_page_files_are_refused(kind: str) -> None:
    frames = [Image.fromarray(NOISE), Image.fromarray(255 - NOISE)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    with pytest.raises(InputError, match="2 frames"):
        load_image(data)


def test_a_single_frame_gif_is_a_picture() -> None:
    palette = Image.fromarray(NOISE).quantize(8)
    assert pixels(encoded(palette, "GIF", save_all=True)).shape == NOISE.shape


def test_a_multi_picture_jpeg_is_its_main_picture() -> None:
    main, preview = Image.new("RGB", (32, 32), (200, 30, 30)), Image.new("RGB", (32, 32), (30, 30, 200))
    got = pixels(encoded(main, "MPO", save_all=True, append_images=[preview]))
    assert np.abs(got.astype(int) - np.array((200, 30, 30))).max() <= 3


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_every_truncation_is_an_input_error_or_the_right_pixels(kind: str) -> None:
    image = Image.fromarray(NOISE)
    data = encoded(image, kind)
    whole = pixels(data)
    for end in range(0, len(data), max(1, len(data) // 40)):
        try:
            got = pixels(data[:end])
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert np.array_equal(got, whole), end
    with pytest.raises(InputError):
        load_image(data[: len(data) // 2])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_flipped_bytes_never_escape_as_another_error(kind: str) -> None:
    data = bytearray(encoded(Image.fromarray(NOISE), kind))
    random = np.random.default_rng(7)
    for _ in range(60):
        damaged = bytearray(data)
        for place in random.integers(0, min(len(data), 200), 3):
            damaged[place] = random.integers(0, 256)
        try:
            assert load_image(bytes(damaged)).mode == "RGB"
        except InputError as error:
            assert str(error).startswith("image")


@pytest.mark.parametrize(
    "data", [b"", b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"<svg/>"]
)
def test_what_is_no_supported_image_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="not a readable PNG"):
        load_image(data)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.png"):
        load_image(tmp_path / "nothing.png")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9000, 12000, 20000, 2**31 - 1])
def test_decompression_bombs_are_refused_before_decoding(side: int) -> None:
    """A few bytes that claim `side` x `side` pixels: no scanline is there to be decoded."""
    assert side * side > MAX_PIXELS
    with pytest.raises(InputError, match="pixels"):
        load_image(png(side, side, 8, 2, b""))


def test_an_open_image_above_the_limit_is_refused() -> None:
    wide = Image.new("1", (MAX_PIXELS // 1024 + 1, 1024))
    with pytest.raises(InputError, match="pixels"):
        load_image(wide)


def test_the_callers_image_is_not_handed_back() -> None:
    mine = Image.fromarray(NOISE)
    loaded = load_image(mine)
    loaded.putpixel((0, 0), (1, 2, 3))
    assert np.array_equal(np.asarray(mine), NOISE)
