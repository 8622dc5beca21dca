"""The tower against the goldens, its memory, its bf16 rounding, and where an image's embeddings go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from rorqual.config import VisionConfig
from rorqual.config.image_grid import FEATURE, ImageGrid
from rorqual.errors import InputError
from rorqual.model.vision import tower as tower_module
from rorqual.model.vision.image import ImageInput, image_patches, image_token_types, load_image
from rorqual.model.vision.tower import (
    VisionTower,
    full_attention,
    merge_image_embeddings,
    rotate_halves,
    rotation_angles,
)

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = ["fp32-vision", "fp32-vision-pad"]


class DictScope:
    """Weights from a mapping; remembers what was taken."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.taken: list[str] = []

    def param(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        self.taken.append(name)
        return self.tensors[name].to(dtype, copy=True)


def vision_config(case: str) -> VisionConfig:
    values = json.loads((GOLDENS / case / "config.json").read_text())["vision_config"]
    return VisionConfig(**{key: value for key, value in values.items() if key != "model_type"})


def scope_of(case: str) -> DictScope:
    return DictScope(load_file(GOLDENS / case / "model.safetensors"))


def tower_of(case: str, dtype: torch.dtype = torch.float32) -> VisionTower:
    scope = scope_of(case)
    hidden = scope.tensors["embed.weight"].shape[1]
    return VisionTower(vision_config(case), hidden, scope, dtype)


def image_of(case: str) -> ImageInput:
    return image_patches(load_image(GOLDENS / case / "image_0.png"), vision_config(case))


def run(tower: VisionTower, image: ImageInput) -> tuple[Tensor, dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}

    def tap(name: str, value: Tensor) -> Tensor:
        seen[name] = value
        return value

    return tower(image, tap), seen


@pytest.mark.parametrize("case", CASES)
def test_fp32_goldens(case: str) -> None:
    want = load_file(GOLDENS / case / "expected.safetensors")
    image = image_of(case)
    span, seen = run(tower_of(case), image)
    for name in ("vit_out", "aligner_out"):
        torch.testing.assert_close(seen[name], want[f"image.0.{name}"], rtol=1e-4, atol=1e-4)
    start = int(want["image.0.grid"][0])
    torch.testing.assert_close(span, want["embed_out"][start : start + image.grid.tokens], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_golden_tolerance_is_not_generous(case: str) -> None:
    """fp32 against fp32 agrees far below the tolerance: a wrong eps, angle or GELU would show here first."""
    want = load_file(GOLDENS / case / "expected.safetensors")
    _, seen = run(tower_of(case), image_of(case))
    for name in ("vit_out", "aligner_out"):
        torch.testing.assert_close(seen[name], want[f"image.0.{name}"], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("case", CASES)
def test_merged_embeddings_equal_the_golden(case: str) -> None:
    """Text rows and the three delimiters exactly, features within the tower's tolerance, in one chunk or many."""
    want = load_file(GOLDENS / case / "expected.safetensors")
    weights = scope_of(case).tensors
    ids, types = want["input_ids"][0], want["token_types"][0]
    text = weights["embed.weight"].float()[ids]
    span = tower_of(case)(image_of(case))
    merged = merge_image_embeddings(text, types >= 0, span)
    exact = types != FEATURE
    assert torch.equal(merged[exact], want["embed_out"][exact])
    torch.testing.assert_close(merged, want["embed_out"], rtol=1e-4, atol=1e-4)
    for size in (1, 3, 8):
        pieces, used = [], 0
        for embed, is_image in zip(text.split(size), (types >= 0).split(size), strict=True):
            count = int(is_image.sum())
            pieces.append(merge_image_embeddings(embed, is_image, span[used : used + count]))
            used += count
        assert torch.equal(torch.cat(pieces), merged)


def test_merging_refuses_another_number_of_features_and_keeps_its_input() -> None:
    embed, is_image = torch.zeros(4, 2), torch.tensor([False, True, True, False])
    assert merge_image_embeddings(embed, is_image, torch.ones(2, 2)).sum() == 4
    assert embed.sum() == 0
    for count in (1, 3):
        with pytest.raises(InputError, match=f"has 2 image positions here, its images fill {count}"):
            merge_image_embeddings(embed, is_image, torch.ones(count, 2))


def test_every_vision_tensor_is_taken_once_and_keeps_its_name() -> None:
    scope = scope_of("fp32-vision")
    tower = VisionTower(vision_config("fp32-vision"), 64, scope, torch.float32)
    mine = sorted(n for n in scope.tensors if n.startswith(("vision.", "aligner.", "image_")))
    assert sorted(scope.taken) == mine == sorted(tower.state_dict())
    assert not any(p.requires_grad for p in tower.parameters())


def test_a_tap_can_inject() -> None:
    tower, image = tower_of("fp32-vision"), image_of("fp32-vision")
    given = torch.full((image.grid.features, 64), 3.0)
    span = tower(image, lambda name, value: given if name == "aligner_out" else value)
    types = image_token_types(image.grid)
    assert (span[types == FEATURE] == 3).all()
    assert torch.equal(span[0], tower.image_start) and torch.equal(span[-1], tower.image_end)


@pytest.mark.parametrize("case", CASES)
def test_bf16_is_rounded_everywhere_and_near_fp32(case: str) -> None:
    image = image_of(case)
    precise, rounded = run(tower_of(case), image), run(tower_of(case, torch.bfloat16), image)
    for name, value in rounded[1].items():
        assert value.dtype == torch.bfloat16
        error = (value.float() - precise[1][name]).norm() / precise[1][name].norm()
        assert 1e-4 < error < 0.02, (name, float(error))
    assert rounded[0].dtype == torch.bfloat16
    tower = tower_of(case, torch.bfloat16)
    assert tower.vision.norm.weight.dtype == torch.float32


def test_a_bf16_linear_rounds_once() -> None:
    """Product and bias in fp32, then one rounding: not a rounded product plus a bias."""
    scope = scope_of("fp32-vision")
    linear = tower_of("fp32-vision", torch.bfloat16).aligner.w2
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight, bias = (scope.tensors[f"aligner.w2.{part}"].double() for part in ("weight", "bias"))
    exact = F.linear(x.double(), weight, bias)
    got = linear(x)
    spacing = 2.0 ** (exact.abs().log2().floor() - 7)
    assert ((got.double() - exact).abs() <= spacing / 2 * 1.001).all()


@pytest.mark.parametrize("budget", [1, 100, 2 * 37 * 5, 10**9])
def test_attention_tiles_give_the_whole(budget: int) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, 37, 8, generator=generator) for _ in range(3))
    probabilities = torch.softmax(q.double() @ k.double().transpose(1, 2) / 8**0.5, dim=-1)
    want = probabilities @ v.double()
    torch.testing.assert_close(full_attention(q, k, v, budget).double(), want, rtol=1e-5, atol=1e-5)


def test_attention_never_holds_the_score_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release's largest image: 5,184 patches, 16 heads. No call may span more scores than the budget."""
    heads, patches, width = 16, 5184, 4
    spans: list[int] = []

    def spy(scores: Tensor, dim: int) -> Tensor:
        spans.append(scores.numel())
        return scores

    monkeypatch.setattr(tower_module.torch, "softmax", spy)
    x = torch.zeros(heads, patches, width)
    assert full_attention(x, x, x).shape == x.shape
    assert max(spans) <= tower_module.SCORE_BUDGET < heads * patches**2 / 20
    assert sum(spans) == heads * patches**2


def grid_of(patch_rows: int, patch_cols: int) -> ImageGrid:
    rows, cols = -(-patch_rows // 3), -(-patch_cols // 3)
    return ImageGrid(
        best_height=patch_rows * 14,
        best_width=patch_cols * 14,
        patch_rows=patch_rows,
        patch_cols=patch_cols,
        rows=rows,
        cols=cols,
    )


def test_rotation_depends_on_the_two_offsets_only() -> None:
    """q . k after the rotation is a function of (row difference, column difference), and of both."""
    grid = grid_of(4, 5)
    cos, sin = rotation_angles(grid, 16, 100.0)
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 1, 16, generator=generator).expand(1, 20, 16) for _ in range(2))
    products = (rotate_halves(q, cos, sin)[0] @ rotate_halves(k, cos, sin)[0].T).view(4, 5, 4, 5)
    torch.testing.assert_close(products[0, 0, 2, 3], products[1, 1, 3, 4])
    torch.testing.assert_close(products[2, 3, 0, 0], products[3, 4, 1, 1])
    assert (products[0, 0, 2, 3] - products[0, 0, 3, 2]).abs() > 1e-3
    assert torch.equal(rotate_halves(q, cos, sin)[0, 0], q[0, 0])


@pytest.mark.parametrize("shape", [(3, 3), (6, 9), (5, 7), (1, 1), (1, 8), (4, 3)])
def test_cells_are_ordered_channel_row_column_with_zeros_at_the_end(shape: tuple[int, int]) -> None:
    grid = grid_of(*shape)
    values = torch.randn(grid.patches, 4, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(1, 4, grid.rows * 3, grid.cols * 3)
    padded[0, :, : shape[0], : shape[1]] = values.T.view(4, *shape)
    want = F.unfold(padded, kernel_size=3, stride=3)[0].T
    cells = tower_of("fp32-vision").aligner._cells(values, grid)
    assert torch.equal(cells, want)


@pytest.mark.parametrize("size", [(1, 1), (1, 10000), (10000, 1), (13, 13), (42882, 42), (300, 200)])
def test_counted_tokens_equal_produced_embeddings(size: tuple[int, int]) -> None:
    """Field case 45, up to the last embedding."""
    case = "fp32-vision"
    tower = tower_of(case)
    config = replace(vision_config(case), max_image_tokens=512)  # room for a side of 10,000 to keep two pixels across
    image = image_patches(Image.new("RGB", size, (40, 90, 200)), config)
    span, seen = run(tower, image)
    assert span.shape == (image.grid.tokens, 64)
    assert seen["aligner_out"].shape[0] == image.grid.features
    assert torch.isfinite(span).all()


def test_two_images_do_not_see_each_other() -> None:
    """An image's embeddings are a function of that image alone: encoded before or after another."""
    case = "fp32-vision"
    tower, mine = tower_of(case), image_of(case)
    first = tower(mine)
    tower(image_patches(Image.new("RGB", (90, 60), "black"), vision_config(case)))
    assert torch.equal(tower(mine), first)
