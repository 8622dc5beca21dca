"""The image grid: every golden row, limits that always hold, extreme sizes (field case 45)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import VisionConfig
from rorqual.config.image_grid import MAX_SIDE, image_grid
from rorqual.errors import InputError

GRIDS = json.loads((Path(__file__).parents[1] / "goldens/fp32-vision/image_grid.json").read_text())

RELEASE = VisionConfig(
    num_hidden_layers=32,
    hidden_size=1024,
    num_attention_heads=16,
    intermediate_size=2816,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=1024,
    min_pixels=295936,
)


def config_named(name: str) -> VisionConfig:
    return replace(RELEASE, **GRIDS["configs"][name])


def test_all_golden_rows() -> None:
    assert len(GRIDS["rows"]) == 138
    for row in GRIDS["rows"]:
        grid = image_grid(row["width"], row["height"], config_named(row["config"]))
        got = (grid.rows, grid.cols, grid.best_height, grid.best_width, grid.tokens)
        want = tuple(row[key] for key in ("n_llm_h", "n_llm_w", "best_height", "best_width", "tokens"))
        assert got == want, row


def check(width: int, height: int, config: VisionConfig) -> None:
    grid = image_grid(width, height, config)
    patch, ratio = config.patch_size, config.downsample_ratio
    assert grid.rows >= 1 and grid.cols >= 1
    assert grid.tokens <= config.max_image_tokens
    assert (grid.best_height, grid.best_width) == (grid.patch_rows * patch, grid.patch_cols * patch)
    assert (grid.rows, grid.cols) == (-(-grid.patch_rows // ratio), -(-grid.patch_cols // ratio))
    assert grid.tokens == grid.features + grid.rows + 2 == len(grid.token_types())
    assert [grid.token_types().count(kind) for kind in range(4)] == [1, grid.features, grid.rows, 1]


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 10000), (10000, 1), (13, 13), (42882, 42), (42, 42882), (MAX_SIDE, 1), (1, MAX_SIDE)]
)
@pytest.mark.parametrize("name", list(GRIDS["configs"]))
def test_extreme_sizes_have_a_grid(size: tuple[int, int], name: str) -> None:
    check(*size, config_named(name))


SIDES = st.one_of(st.integers(1, 100), st.integers(1, 5000), st.integers(1, MAX_SIDE))


@settings(max_examples=200, deadline=None)
@given(
    width=SIDES,
    height=SIDES,
    tokens=st.one_of(st.integers(4, 40), st.integers(4, 1 << 20)),
    pixels=st.integers(1, 1 << 30),
    ratio=st.one_of(st.none(), st.floats(1e-6, 1e6)),
    patch=st.integers(1, 20),
    down=st.integers(1, 4),
)
def test_a_grid_is_never_empty_nor_above_the_limit(
    width: int, height: int, tokens: int, pixels: int, ratio: float | None, patch: int, down: int
) -> None:
    config = replace(
        RELEASE,
        max_image_tokens=tokens,
        min_pixels=pixels,
        max_wh_ratio=ratio,
        patch_size=patch,
        downsample_ratio=down,
    )
    check(width, height, config)


def test_sizes_cost_what_they_show() -> None:
    """Field case 45: two images of different size cost different tokens; 1008 x 1008 is 24 x 24 features."""
    assert image_grid(20, 16, RELEASE).tokens != image_grid(2500, 2000, RELEASE).tokens
    square = image_grid(1008, 1008, RELEASE)
    assert (square.rows, square.cols, square.features, square.tokens) == (24, 24, 576, 602)


def test_token_types_are_row_by_row() -> None:
    grid = image_grid(117, 75, replace(RELEASE, max_image_tokens=64, min_pixels=9000))
    assert grid.token_types() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (-1, 5), (MAX_SIDE + 1, 1), (1, 10**30)])
def test_impossible_sizes_are_refused_by_name(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=f"{size[0]} x {size[1]} pixels"):
        image_grid(*size, RELEASE)


def test_counting_positions_needs_no_torch() -> None:
    code = "import sys, rorqual.config.image_grid; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
