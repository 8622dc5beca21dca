"""What an image costs: its patches in the tower, its features in the prompt."""

from __future__ import annotations

from collections.abc import Iterator

from rorqual.config import VisionConfig
from rorqual.config.image_grid import image_grid, positions
from rorqual.planner.figure import Figure


def figures(vision: VisionConfig) -> Iterator[Figure]:
    """From `max_image_tokens` to `vision_released_1302`. Patches, features, positions; from vision_config, SPEC 10.

    >>> from rorqual.config import presets
    >>> shown = {figure.id: figure.shown for figure in figures(presets.load("v4.1-flash").vision)}
    >>> shown["vision_patches_1008"], shown["vision_features_1008"], shown["vision_released_1302"]
    ('5,184', '576', '961')
    """
    for id, unit in (("max_image_tokens", "positions"), ("min_pixels", "pixels")):
        value = getattr(vision, id)
        yield Figure(
            id=id,
            value=value,
            shown=f"{value:,}",
            unit=unit,
            formula=f"vision_config.{id}",
            expression=f"{value:,}",
            provenance="config",
            note="Delimiters and newlines count." if id == "max_image_tokens" else "A smaller image is enlarged.",
        )
    yield _patches(vision)
    yield _features("vision_features_1008", 1008, 1008, vision)
    yield _features("vision_features_1344x756", 1344, 756, vision)
    yield _unlimited(vision)
    yield _features("vision_released_1302", 1302, 1302, vision)


def _patches(vision: VisionConfig) -> Figure:
    grid, patch = image_grid(1008, 1008, vision), vision.patch_size
    return Figure(
        id="vision_patches_1008",
        value=grid.patches,
        shown=f"{grid.patches:,}",
        unit="patches",
        formula=f"best_height / patch_size x best_width / patch_size, {_fit(1008, 1008)}",
        expression=f"({grid.best_height:,} / {patch}) x ({grid.best_width:,} / {patch})",
        provenance="derived",
        note="Inputs of the tower, all attending to all.",
    )


def _features(id: str, width: int, height: int, vision: VisionConfig) -> Figure:
    """Features of an image as the processor fits it."""
    grid, cell = image_grid(width, height, vision), vision.cell
    return Figure(
        id=id,
        value=grid.features,
        shown=f"{grid.features:,}",
        unit="features",
        formula="ceil(best_height / (patch_size x downsample_ratio)) x "
        f"ceil(best_width / (patch_size x downsample_ratio)), {_fit(width, height)}",
        expression=f"ceil({grid.best_height:,} / {cell}) x ceil({grid.best_width:,} / {cell})",
        provenance="derived",
        note=f"{grid.tokens:,} positions of the prompt with its delimiters and newlines.",
    )


def _unlimited(vision: VisionConfig) -> Figure:
    """By the formula alone, which the processor's cap may cut short."""
    side, cell = 1344, vision.cell
    cells = -(-side // cell)
    count, fitted = positions(cells, cells), image_grid(side, side, vision)
    cut = f"more than max_image_tokens, {vision.max_image_tokens:,}: the processor makes {fitted.features:,} features"
    return Figure(
        id="vision_features_1344",
        value=cells * cells,
        shown=f"{cells * cells:,}",
        unit="features",
        formula="ceil(H / (patch_size x downsample_ratio)) x ceil(W / (patch_size x downsample_ratio)), H = W = 1,344",
        expression=f"ceil({side:,} / {cell}) x ceil({side:,} / {cell})",
        provenance="derived",
        note=f"{count:,} positions, {cut}." if count > vision.max_image_tokens else f"{count:,} positions.",
    )


def _fit(width: int, height: int) -> str:
    return f"best = the size that {width:,} x {height:,} pixels are fitted to"
