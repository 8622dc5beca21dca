"""Pixel-unshuffle: fewer positions for an image."""

from __future__ import annotations

from rorqual.config import ModelConfig
from rorqual.config.image_grid import image_grid
from rorqual.layout import KVLayout
from rorqual.planner.explain.technique import Technique
from rorqual.planner.explain.text import exact, saving
from rorqual.planner.figure import Figure

SIDE = 1_008
"""Pixels of a side of the square image that savings are shown for: 24 cells of the release."""


def _pixel_unshuffle(config: ModelConfig) -> tuple[Figure, ...]:
    vision = config.vision
    assert vision is not None  # `used` has been asked
    grid, layout = image_grid(SIDE, SIDE, vision), KVLayout(config)
    positions = f"{grid.patch_rows} x {grid.patch_cols} - {grid.rows} x {grid.cols}"
    figures = [
        saving(
            "unshuffle_positions",
            grid.patches - grid.features,
            f"positions an image of {SIDE:,} x {SIDE:,}",
            formula="patches - features",
            expression=positions,
            against="a position for every patch of the same grid",
            note="Delimiters and newlines are left out.",
        )
    ]
    if layout.sources:
        figures.append(
            saving(
                "unshuffle_bytes",
                (grid.patches - grid.features) * layout.bytes_per_token,
                f"B an image of {SIDE:,} x {SIDE:,}",
                formula="(patches - features) x global KV a token",
                expression=f"({positions}) x {exact(layout.bytes_per_token)}",
                against="a position for every patch of the same grid",
            )
        )
    return tuple(figures)


PIXEL_UNSHUFFLE = Technique(
    id="pixel-unshuffle",
    aliases=("unshuffle",),
    name="pixel-unshuffle",
    factor="number of entries",
    moves="A square of r x r neighbouring patches becomes one position of the language model: r x r times fewer.",
    approximation="The rearrangement loses nothing; the projection after it narrows r x r patch vectors to one of the "
    "language model's width. A grid that r does not divide is padded with zeros at the right and at the bottom.",
    expressiveness="Detail finer than a cell has to share one vector, so small print suffers first.",
    training="The aligner that maps a cell to the language model is learned.",
    used=lambda config: config.vision is not None and config.vision.downsample_ratio > 1,
    count=_pixel_unshuffle,
)
