"""How large an image is shown to the model and how many positions it takes (SPEC section 10). No torch.

A patch is p x p pixels, a cell r x r patches: one feature of the language model. An image of rows x cols cells takes
1 + rows * (cols + 1) + 1 positions: start, each row's features and a newline, end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rorqual.config.parts import VisionConfig
from rorqual.errors import InputError

# No image format holds a longer side; far beyond it the arithmetic below would no longer be exact.
MAX_SIDE = 2**31 - 1

# `token_types`: what each position of an image is. Every position outside an image is TEXT.
TEXT, START, FEATURE, NEWLINE, END = -1, 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageGrid:
    """An image as the model sees it.

    best_height, best_width: pixels after fitting, multiples of the patch. patch_rows, patch_cols: its patches.
    rows, cols: its cells; the last row and column may be partly padding.
    """

    best_height: int
    best_width: int
    patch_rows: int
    patch_cols: int
    rows: int
    cols: int

    @property
    def patches(self) -> int:
        """Inputs of the tower."""
        return self.patch_rows * self.patch_cols

    @property
    def features(self) -> int:
        """Outputs of the aligner."""
        return self.rows * self.cols

    @property
    def tokens(self) -> int:
        """Positions in the prompt, delimiters included."""
        return positions(self.rows, self.cols)

    def token_types(self) -> list[int]:
        """START, then FEATURE x cols and NEWLINE for each row, then END: `tokens` entries."""
        return [START, *([FEATURE] * self.cols + [NEWLINE]) * self.rows, END]


def positions(rows: int, cols: int) -> int:
    """Positions of an image of rows x cols cells."""
    return rows * (cols + 1) + 2


def image_grid(width: int, height: int, config: VisionConfig) -> ImageGrid:
    """The grid of an image of width x height pixels; never more than `max_image_tokens` positions.

    Small images are enlarged to `min_pixels`, large ones shrunk until they fit. Worked example, release: 1008 x 1008
    is 72 x 72 patches, 24 x 24 cells, 602 positions.

    Raises InputError for a side outside 1..2^31 - 1.
    """
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise InputError(f"image of {width} x {height} pixels: each side must be in 1..{MAX_SIDE}")
    w, h = _enlarged(width, height, config)
    patch, cell = config.patch_size, config.cell
    best_w, best_h = math.ceil(w / patch) * patch, math.ceil(h / patch) * patch
    if positions(math.ceil(best_h / cell), math.ceil(best_w / cell)) > config.max_image_tokens:
        best_w, best_h = _shrunk(w, h, patch, cell, config.max_image_tokens)
    return ImageGrid(
        best_height=best_h,
        best_width=best_w,
        patch_rows=best_h // patch,
        patch_cols=best_w // patch,
        rows=math.ceil(best_h / cell),
        cols=math.ceil(best_w / cell),
    )


def _enlarged(width: int, height: int, config: VisionConfig) -> tuple[float, float]:
    """Width and height after the aspect limit and the minimum number of pixels."""
    w: float = width
    h: float = height
    if config.max_wh_ratio is not None and w > config.max_wh_ratio * h:
        w = config.max_wh_ratio * h
    if w * h < config.min_pixels:
        factor = math.sqrt(config.min_pixels / (w * h))
        w, h = max(1, int(w * factor)), max(1, int(h * factor))
    return w, h


def _shrunk(w: float, h: float, patch: int, cell: int, limit: int) -> tuple[int, int]:
    """The largest (width, height) of about this aspect whose positions stay within `limit`.

    `cols` solves rows * (cols + 1) + 2 = limit with rows = cols * h / w. When one of the two would be below one cell,
    the image becomes a single column or row of as many cells as fit.
    """
    aspect = h / w
    cols = math.sqrt((limit - 2) / aspect + 1 / 4) - 1 / 2
    rows = cols * aspect
    if cols < 1:
        return cell, (limit - 2) // 2 * cell
    if rows < 1:
        return (limit - 3) * cell, cell
    factor = min(math.floor(cols) * cell / w, math.floor(rows) * cell / h)
    # With a cell of one or two patches the short side can round down to nothing; one patch still fits.
    return max(1, math.floor(w * factor / patch)) * patch, max(1, math.floor(h * factor / patch)) * patch
