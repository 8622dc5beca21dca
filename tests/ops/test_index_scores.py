from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rorqual.errors import ConfigError, FormatError
from rorqual.formats.codec import Packed, dequantize, fake_quantize, quantize
from rorqual.formats.spec import BF16, E2M1_E4M3_16, E2M1_E8M0_32, E2M1_UNSCALED, E4M3_E8M0_32, FP32, NumberFormat
from rorqual.ops import cpu
from rorqual.ops.fast import index_scores as fast
from rorqual.ops.fast.score_kernels import score_vector
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference import index_scores as plain
from rorqual.ops.reference.index_scores import scores_from_values
from rorqual.ops.reference.topk import topk_lowest

MakeRegion = Callable[..., tuple[PagedRegion, Tensor]]
INF = float("inf")
ALL_PATHS = [
    pytest.param(path, marks=pytest.mark.skipif(bool(cpu.missing(path)), reason=f"CPU lacks {cpu.missing(path)}"))
    for path in cpu.PATHS
]
ALL_FORMATS = [E2M1_E8M0_32, E2M1_E4M3_16, E2M1_UNSCALED, E4M3_E8M0_32, BF16, FP32]
# (index heads, index head dim): whole panels of sixteen heads, odd numbers of panels, heads that fill none.
SHAPES = [(32, 128), (16, 32), (48, 64), (4, 32), (20, 96)]


class Case(NamedTuple):
    q: Packed
    w: Tensor
    region: PagedRegion
    table: Tensor
    keys: Tensor

    def rows(self, rows: slice | Tensor) -> Case:
        return self._replace(q=Packed(self.q.codes[rows], self.q.scales[rows]), w=self.w[rows])


def spread(*shape: int, seed: int) -> Tensor:
    """Normal values whose 32-blocks lie up to fourteen binades apart, so that sums over blocks do round."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    binades = torch.randint(-7, 7, (*shape[:-1], shape[-1] // 32), generator=generator)
    return (x.unflatten(-1, (-1, 32)) * 2.0 ** binades[..., None]).flatten(-2)


def make_case(
    make_region: MakeRegion, rows: int, groups: int, heads: int = 32, width: int = 128, fmt: NumberFormat = E2M1_E8M0_32
) -> Case:
    keys = spread(groups, width, seed=1)
    region, table = make_region(keys, fmt, entries=8)
    w = torch.randn(rows, heads, generator=torch.Generator().manual_seed(2))
    return Case(quantize(spread(rows, heads, width, seed=3), fmt), w, region, table, fake_quantize(keys, fmt))


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: fmt.name)
def test_plain_is_the_formula(make_region: MakeRegion, fmt: NumberFormat) -> None:
    case = make_case(make_region, 5, 77, fmt=fmt)
    q, k = dequantize(*case.q, fmt).double(), case.keys.double()
    terms = (case.w.double()[..., None] * torch.einsum("rhd,gd->rhg", q, k).relu()).movedim(1, 0)
    scores = plain.index_scores(*case.q, case.w, case.region, case.table, 3, 70, torch.full((5,), 99), False)
    error = (scores - terms.sum(0)[:, 3:70]).abs()
    assert (error <= 1e-6 * terms.abs().sum(0)[:, 3:70]).all()


def test_plain_native_rounds_where_the_spec_says(make_region: MakeRegion) -> None:
    # Scale bytes of one value: every fp32 sum is exact, so only the three bf16 roundings are left.
    generator = torch.Generator().manual_seed(0)
    levels = torch.tensor([-6.0, -3.0, -1.5, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 6.0])
    k = levels[torch.randint(10, (40, 64), generator=generator)]
    q = levels[torch.randint(10, (3, 16, 64), generator=generator)]
    k[:, ::32], q[..., ::32] = 6.0, 6.0
    w = torch.randint(-9, 9, (3, 16), generator=generator).float() / 8 + 2.0**-9
    region, table = make_region(k, E2M1_E8M0_32)
    dots = bf16(torch.einsum("rhd,gd->rhg", q.double(), k.double())).relu()
    expected = bf16(bf16(dots * bf16(w.double())[..., None]).sum(1))
    visible = torch.full((3,), 40)
    scores = plain.index_scores(*quantize(q, E2M1_E8M0_32), w, region, table, 0, 40, visible, True)
    assert torch.equal(scores.double(), expected)
    assert not torch.equal(
        scores, plain.index_scores(*quantize(q, E2M1_E8M0_32), w, region, table, 0, 40, visible, False)
    )


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_twins_give_the_same_bits(
    make_region: MakeRegion, heads: int, width: int, native: bool, path: cpu.Path
) -> None:
    case = make_case(make_region, 70, 203, heads, width)
    visible = torch.randint(-1, 250, (70,), generator=torch.Generator().manual_seed(4))
    args = (*case.q, case.w, case.region, case.table)
    expected = plain.index_scores(*args, 5, 201, visible, native)
    assert torch.equal(fast.index_scores(*args, 5, 201, visible, native, path=path), expected)
    index = torch.randint(-1, 203, (70, 61), generator=torch.Generator().manual_seed(5))
    expected = plain.index_scores_at(*args, index, native)
    assert torch.equal(fast.index_scores_at(*args, index, native, path=path), expected)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_twins_choose_the_same_groups(make_region: MakeRegion, path: cpu.Path) -> None:
    case = make_case(make_region, 4, 900)
    args = (*case.q, case.w, case.region, case.table, 0, 900, torch.tensor([900, 512, 100, 3]), False)
    ours = topk_lowest(fast.index_scores(*args, path=path), 64)
    assert torch.equal(ours, topk_lowest(plain.index_scores(*args), 64))
    assert ours[3].tolist() == [0, 1, 2] + [-1] * 61


def ops_by_name() -> list[object]:
    """(index_scores, index_scores_at) of the twin and of every path."""
    found: list[object] = [pytest.param(plain.index_scores, plain.index_scores_at, id="torch")]
    for path in cpu.PATHS:
        lacks = cpu.missing(path)

        def scores(*args: object, path: cpu.Path = path) -> Tensor:
            return fast.index_scores(*args, path=path)  # type: ignore[arg-type]

        def scores_at(*args: object, path: cpu.Path = path) -> Tensor:
            return fast.index_scores_at(*args, path=path)  # type: ignore[arg-type]

        marks = pytest.mark.skipif(bool(lacks), reason=f"CPU lacks {lacks}")
        found.append(pytest.param(scores, scores_at, id=path, marks=marks))
    return found


EACH = pytest.mark.parametrize(("scores", "scores_at"), ops_by_name())
Op = Callable[..., Tensor]


@EACH
@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_in_any_tile(
    make_region: MakeRegion, scores: Op, scores_at: Op, native: bool
) -> None:
    case = make_case(make_region, 32, 131)
    visible = torch.arange(32) * 5
    whole = scores(*case.q, case.w, case.region, case.table, 0, 131, visible, native)
    for rows in (slice(7, 8), slice(0, 3), slice(5, 31), torch.tensor([30, 2, 17])):
        part = case.rows(rows)
        alone = scores(*part.q, part.w, case.region, case.table, 0, 131, visible[rows], native)
        assert torch.equal(alone, whole[rows])
    bounds = [0, 1, 8, 47, 48, 49, 100, 131]
    tiles = [
        scores(*case.q, case.w, case.region, case.table, first, last, visible, native)
        for first, last in itertools.pairwise(bounds)
    ]
    assert torch.equal(torch.cat(tiles, 1), whole)


@EACH
@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
def test_scores_at_given_groups_are_the_same_bits(
    make_region: MakeRegion, scores: Op, scores_at: Op, native: bool
) -> None:
    case = make_case(make_region, 9, 131)
    args = (*case.q, case.w, case.region, case.table)
    whole = scores(*args, 0, 131, torch.full((9,), 131), native)
    index = torch.randint(-1, 131, (9, 200), generator=torch.Generator().manual_seed(6))
    expected = whole.gather(1, index.clamp_min(0)).masked_fill(index < 0, -INF)
    assert torch.equal(scores_at(*args, index, native), expected)
    part = case.rows(slice(4, 5))
    assert torch.equal(
        scores_at(*part.q, part.w, case.region, case.table, index[4:5, 3:50], native), expected[4:5, 3:50]
    )


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
def test_every_format_keeps_its_rows_bits(make_region: MakeRegion, fmt: NumberFormat, native: bool) -> None:
    case = make_case(make_region, 12, 90, fmt=fmt)
    args = (case.region, case.table)
    whole = fast.index_scores(*case.q, case.w, *args, 0, 90, torch.full((12,), 90), native)
    part = case.rows(slice(5, 6))
    alone = fast.index_scores(*part.q, part.w, *args, 40, 71, torch.full((1,), 90), native)
    assert torch.equal(alone, whole[5:6, 40:71])
    at = fast.index_scores_at(*part.q, part.w, *args, torch.tensor([[70, 3, -1]]), native)
    assert torch.equal(at, torch.stack([whole[5, 70], whole[5, 3], torch.tensor(-INF)])[None])


@EACH
def test_future_groups_never_win_though_their_scores_are_largest(
    make_region: MakeRegion, scores: Op, scores_at: Op
) -> None:
    keys = torch.ones(100, 32) * torch.arange(1, 101)[:, None]
    region, table = make_region(keys, E2M1_E8M0_32)
    q = quantize(torch.ones(4, 16, 32), E2M1_E8M0_32)
    visible = torch.tensor([0, 1, 37, 100])
    found = scores(*q, torch.ones(4, 16), region, table, 0, 100, visible, False)
    assert found[2, 36] == found[2][:37].max() and (found[2, 37:] == -INF).all()
    top = topk_lowest(found, 5)
    assert (top < visible[:, None]).all() and top[0].tolist() == [-1] * 5 and (top[3] >= 0).all()


@EACH
def test_pages_that_no_row_sees_are_not_read(make_region: MakeRegion, scores: Op, scores_at: Op) -> None:
    case = make_case(make_region, 3, 60)
    visible = torch.tensor([9, 20, 24])
    whole = scores(*case.q, case.w, case.region, case.table, 0, 24, visible, False)
    case.region.pool[case.table[3:]] = 255
    assert torch.equal(scores(*case.q, case.w, case.region, case.table, 0, 24, visible, False), whole)
    # The block table may end where the visible groups do.
    longer = scores(*case.q, case.w, case.region, case.table[:3], 0, 60, visible, False)
    assert torch.equal(longer[:, :24], whole) and (longer[:, 24:] == -INF).all()


@EACH
def test_poison_that_a_row_sees_stays_visible(make_region: MakeRegion, scores: Op, scores_at: Op) -> None:
    case = make_case(make_region, 2, 60)
    case.region.pool[case.table[2]] = 255
    args = (*case.q, case.w, case.region, case.table)
    found = scores(*args, 0, 60, torch.tensor([16, 60]), False)
    assert found[1, 16:24].isnan().all() and found[1, :16].isfinite().all() and not found[0].isnan().any()
    assert scores_at(*args, torch.tensor([[-1, 16], [17, 0]]), True).isnan().tolist() == [[False, True], [True, False]]
    with pytest.raises(FormatError):
        topk_lowest(found, 4)


@EACH
def test_shapes_of_nothing(make_region: MakeRegion, scores: Op, scores_at: Op) -> None:
    case = make_case(make_region, 2, 20)
    args = (*case.q, case.w, case.region, case.table)
    assert scores(*args, 5, 5, torch.tensor([9, 9]), False).shape == (2, 0)
    assert (scores(*args, 0, 20, torch.tensor([0, 0]), False) == -INF).all()
    assert scores_at(*args, torch.empty(2, 0, dtype=torch.int64), False).shape == (2, 0)
    assert (scores_at(*args, torch.full((2, 3), -1), False) == -INF).all()
    none = case.rows(slice(0, 0))
    assert scores(
        *none.q, none.w, case.region, case.table, 0, 20, torch.tensor([], dtype=torch.int64), False
    ).shape == (0, 20)


@EACH
def test_visible_groups_outside_the_block_table_are_an_error(
    make_region: MakeRegion, scores: Op, scores_at: Op
) -> None:
    case = make_case(make_region, 1, 20)
    args = (*case.q, case.w, case.region, case.table)
    with pytest.raises(IndexError, match="block table"):
        scores(*args, 0, 30, torch.tensor([30]), False)
    with pytest.raises(IndexError, match="block table"):
        scores_at(*args, torch.tensor([[24]]), False)


def test_values_and_packed_bytes_give_the_same_bits(make_region: MakeRegion) -> None:
    case = make_case(make_region, 6, 50)
    q = dequantize(*case.q, E2M1_E8M0_32)
    packed = fast.index_scores(*case.q, case.w, case.region, case.table, 0, 50, torch.full((6,), 50), False)
    assert torch.equal(scores_from_values(q, case.w, case.keys, False), packed)


@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
def test_score_core_is_differentiable(native: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, w, k = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((3, 5, 64), (3, 5), (7, 64)))
    upstream = torch.randn(3, 7, generator=generator)
    ours = torch.autograd.grad((scores_from_values(q, w, k, native) * upstream).sum(), (q, w, k))
    formula = (w[..., None] * torch.einsum("rhd,gd->rhg", q, k).relu()).sum(1)
    expected = torch.autograd.grad((formula * upstream).sum(), (q, w, k))
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() <= (0.05 if native else 1e-5) * b.abs().max()


def test_unknown_and_unavailable_paths_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="must be one of vnni, vector, plain"):
        cpu.check_path("sse")  # type: ignore[arg-type]
    assert cpu.check_path("plain") == "plain"
    assert cpu.best_path() == next(path for path in cpu.PATHS if not cpu.missing(path))


def level_case(make_region: MakeRegion, heads: int, width: int) -> Case:
    """Scales of a key's blocks, and of a head's, mostly lie within three binades; of every third key they do not."""
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int) -> Tensor:
        x = torch.randn(*shape, width // 32, 32, generator=generator)
        return (x * 2.0 ** torch.randint(0, 4, (*shape, width // 32, 1), generator=generator)).flatten(-2)

    keys = values(203)
    keys[::3, :32] *= 2.0**-5
    region, table = make_region(keys, E2M1_E8M0_32, entries=8)
    w = torch.randn(9, heads, generator=generator)
    w[:, ::5] = 0
    return Case(quantize(values(9, heads), E2M1_E8M0_32), w, region, table, fake_quantize(keys, E2M1_E8M0_32))


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
@pytest.mark.parametrize(("heads", "width"), [(32, 128), (64, 128), (16, 128), (40, 128), (32, 256), (32, 64)])
def test_keys_whose_blocks_have_scales_close_together(
    make_region: MakeRegion, heads: int, width: int, native: bool, path: cpu.Path
) -> None:
    case = level_case(make_region, heads, width)
    visible = torch.tensor([203, 203, 203, 1, 0, 48, 100, 150, 203])
    args = (*case.q, case.w, case.region, case.table)
    expected = plain.index_scores(*args, 0, 203, visible, native)
    assert torch.equal(fast.index_scores(*args, 0, 203, visible, native, path=path), expected)
    index = torch.randint(-1, 203, (9, 100), generator=torch.Generator().manual_seed(5))
    expected = plain.index_scores_at(*args, index, native)
    assert torch.equal(fast.index_scores_at(*args, index, native, path=path), expected)


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
def test_scales_and_weights_at_the_edges_of_fp32(make_region: MakeRegion, native: bool, path: cpu.Path) -> None:
    # One key or one head is out of the common range; every score must still be the twin's, infinities included.
    case = level_case(make_region, 32, 128)
    _, scales = case.region.views()
    flat = scales.flatten(0, 1)
    flat[7], flat[11], flat[13] = 127 - 60, 127 + 60, 254
    case.w[1, 3], case.w[2, 4], case.w[3, 5], case.w[4, 6] = 1e-30, 1e30, INF, 1e-38
    case.q.scales[5, 2], case.q.scales[6, 2] = 127 - 70, 127 + 70
    args = (*case.q, case.w, case.region, case.table, 0, 203, torch.full((9,), 203), native)
    assert_close(fast.index_scores(*args, path=path), plain.index_scores(*args), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(bool(cpu.missing("vector")), reason="CPU lacks vectors")
@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
def test_fp32_vectors_give_the_same_bits(
    make_region: MakeRegion, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the path `vector` runs where there are no products of bytes.
    monkeypatch.setattr(fast, "KERNELS", {"vector": score_vector})
    case = make_case(make_region, 70, 203, 48, 64)
    args = (*case.q, case.w, case.region, case.table, 5, 201, torch.arange(70) * 4, native)
    assert torch.equal(fast.index_scores(*args, path="vector"), plain.index_scores(*args))
