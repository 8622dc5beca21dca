"""From a file to the tower's input: decode, fit to the grid, normalise, cut into patches (SPEC section 10).

Whatever a caller hands in ends as RGB pixels or as one InputError. Decisions the architecture leaves open:

* animations and multi-page files are refused (which frame was meant?); a camera's multi-picture JPEG is its main one;
* transparency is dropped, the stored colours stay; orientation tags are not applied;
* 16-bit channels keep their high byte, as the decoders themselves do for 16-bit RGB; wider or float ones are refused.

Shapes: P patches (row-major over the grid), patch p x p, T positions of the image span.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from rorqual.config import VisionConfig
from rorqual.config.image_grid import ImageGrid, image_grid
from rorqual.errors import InputError

# Formats that decode in process from untrusted bytes; the others of Pillow start programs or are obscure.
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")

# 64 megapixels decode to 192 MiB. The model never sees more than about 1.6 megapixels of them.
MAX_PIXELS = 64 * 1024 * 1024

PAD_COLOUR = (127, 127, 127)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageInput:
    """One image, ready for the tower.

    patches: bf16 [P, 3, p, p], values in [-1, 1]. sha256: hex digest of the grid and these values, the image's content
    in the keys of a prefix index: equal if and only if the tower is given the same input.
    """

    grid: ImageGrid
    patches: Tensor
    sha256: str


def load_image(source: str | Path | bytes | Image.Image) -> Image.Image:
    """The RGB pixels of a file, of a file's bytes, or of an image already open.

    Raises InputError: unreadable, truncated, of an unsupported format or mode, animated, or above MAX_PIXELS (checked
    before any pixel is decoded).
    """
    if isinstance(source, Image.Image):
        return _decode(source)
    # Read first: a decoder that fails on a path may leave the file open.
    data = source if isinstance(source, bytes) else _read(Path(source))
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # decoders raise nearly anything on hostile bytes
        raise InputError(f"image: not a readable {', '.join(FORMATS)} file ({_reason(error)})") from error
    with image:
        return _decode(image)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"image {path}: {error.strerror or error}") from error


def _decode(image: Image.Image) -> Image.Image:
    """Checked pixels of an opened image, as a new RGB image."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise InputError(f"image of {width} x {height} pixels: more than {MAX_PIXELS} in all")
    if width < 1 or height < 1:
        raise InputError(f"image of {width} x {height} pixels: each side must be at least 1")
    try:
        frames = int(getattr(image, "n_frames", 1))
        if frames > 1 and image.format != "MPO":
            raise InputError(f"image: an animation or multi-page file ({frames} frames); give one frame")
        image.load()
        return _to_rgb(image)
    except InputError:
        raise
    except Exception as error:  # decoders raise nearly anything on hostile bytes
        raise InputError(f"image: damaged or truncated {image.format or 'image'} data ({_reason(error)})") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB. Pillow's own conversion of wider channels clips at 255 instead of scaling."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(values.astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise InputError(f"image: mode {image.mode} (32 bits a channel) is not supported; give 8 or 16 bits")
    return image.convert("RGB")


def _reason(error: Exception) -> str:
    """One line of whatever a decoder raised."""
    text = " ".join(str(error).split())
    return type(error).__name__ if not text or "<_io." in text else text


def image_patches(image: Image.Image, config: VisionConfig) -> ImageInput:
    """Fit an RGB image into its grid and cut it into patches.

    The aspect is kept: bicubic, centred on grey. Raises InputError when an extreme aspect leaves a side of no pixel.
    """
    assert image.mode == "RGB", image.mode
    grid = image_grid(image.width, image.height, config)
    width, height = grid.best_width, grid.best_height
    # What the short side becomes. Pillow makes of 0 an error or, in newer versions, an all-grey image.
    if min(round(image.height / image.width * width), round(image.width / image.height * height)) < 1:
        raise InputError(
            f"image of {image.width} x {image.height} pixels: too long and thin to be seen in {width} x {height}"
        )
    fitted = ImageOps.pad(image, (width, height), color=PAD_COLOUR)
    patches = _cut(fitted, grid, config.patch_size)
    return ImageInput(grid=grid, patches=patches, sha256=_digest(patches, grid))


def _cut(image: Image.Image, grid: ImageGrid, patch: int) -> Tensor:
    """Patches [P, 3, p, p] of the fitted image: (x / 255 - 0.5) / 0.5 in fp32, rounded once to bf16 in both modes."""
    pixels_HWC = torch.from_numpy(np.array(image, dtype=np.float32))
    values_HWC = ((pixels_HWC / 255 - 0.5) / 0.5).to(torch.bfloat16)
    cut = values_HWC.view(grid.patch_rows, patch, grid.patch_cols, patch, 3)
    return cut.permute(0, 2, 4, 1, 3).reshape(grid.patches, 3, patch, patch)


def _digest(patches: Tensor, grid: ImageGrid) -> str:
    """SHA-256 over the grid's shape and the patches' bytes."""
    digest = hashlib.sha256(f"{grid.patch_rows}x{grid.patch_cols}:".encode())
    digest.update(patches.view(torch.uint16).numpy().tobytes())
    return digest.hexdigest()


def image_token_ids(grid: ImageGrid, image_token_id: int) -> Tensor:
    """Token ids [T] of an image span, int64: the image token throughout, delimiters included."""
    return torch.full((grid.tokens,), image_token_id, dtype=torch.int64)


def image_token_types(grid: ImageGrid) -> Tensor:
    """Kinds [T] of an image span's positions, int64: 0 start, 1 feature, 2 newline, 3 end."""
    return torch.tensor(grid.token_types(), dtype=torch.int64)
