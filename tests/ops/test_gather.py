from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rorqual.formats.codec import fake_quantize
from rorqual.formats.spec import BF16, E2M1_E4M3_16, E2M1_E8M0_32, E2M1_UNSCALED, E4M3_E8M0_32, FP32, NumberFormat
from rorqual.ops import cpu
from rorqual.ops.fast import gather as fast
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.gather import gather_rows

MakeRegion = Callable[..., tuple[PagedRegion, Tensor]]
FORMATS = [E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, BF16, FP32, E2M1_UNSCALED]
ALL_PATHS = [
    pytest.param(path, marks=pytest.mark.skipif(bool(cpu.missing(path)), reason=f"CPU lacks {cpu.missing(path)}"))
    for path in cpu.PATHS
]


def values(groups: int, width: int) -> Tensor:
    """Several binades, exact zeros of both signs, and values beyond each format's range."""
    x = (
        torch.randn(groups, width, generator=torch.Generator().manual_seed(0))
        * 2.0 ** torch.arange(groups).remainder(9).sub(4)[:, None]
    )
    x[0] = 0.0
    x[1] = -0.0
    x[2, ::7] = 3000.0
    return x


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("width", [32, 96])
def test_gathers_the_fake_quantised_rows(make_region: MakeRegion, fmt: NumberFormat, width: int) -> None:
    x = values(21, width)
    region, table = make_region(x, fmt)
    index = torch.tensor([[20, 0, -1, 1], [2, 2, 7, 8]])
    expected = fake_quantize(x, fmt)[index.clamp_min(0)]
    expected[0, 2] = 0.0
    assert same_bits(gather_rows(region, table, index), expected)


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("width", [32, 96, 512])
def test_twins_give_the_same_bits(make_region: MakeRegion, fmt: NumberFormat, width: int, path: cpu.Path) -> None:
    region, table = make_region(values(300, width), fmt, entries=7)
    index = torch.randint(-1, 300, (3, 90), generator=torch.Generator().manual_seed(1))
    assert same_bits(fast.gather_rows(region, table, index, path=path), gather_rows(region, table, index))


@pytest.mark.parametrize("path", ALL_PATHS)
def test_width_that_is_no_multiple_of_a_block(make_region: MakeRegion, path: cpu.Path) -> None:
    region, table = make_region(values(20, 48), E2M1_E4M3_16)
    index = torch.arange(20)
    assert same_bits(fast.gather_rows(region, table, index, path=path), gather_rows(region, table, index))


@pytest.mark.parametrize("gather", [gather_rows, fast.gather_rows], ids=["plain", "fast"])
def test_absent_rows_are_zeros_though_every_page_is_poisoned(
    make_region: MakeRegion, gather: Callable[..., Tensor]
) -> None:
    region, table = make_region(values(20, 64), E2M1_E4M3_16)
    region.pool.fill_(255)
    assert same_bits(gather(region, table, torch.full((5,), -1)), torch.zeros(5, 64))
    assert gather(region, table, torch.tensor([3])).isnan().all()


@pytest.mark.parametrize("gather", [gather_rows, fast.gather_rows], ids=["plain", "fast"])
def test_shapes_of_nothing(make_region: MakeRegion, gather: Callable[..., Tensor]) -> None:
    region, table = make_region(values(20, 64), E2M1_E4M3_16)
    assert gather(region, table, torch.empty(4, 0, dtype=torch.int64)).shape == (4, 0, 64)
    assert gather(region, table[:0], torch.full((2,), -1)).shape == (2, 64)


@pytest.mark.parametrize("gather", [gather_rows, fast.gather_rows], ids=["plain", "fast"])
@pytest.mark.parametrize("index", [-2, 24, 1 << 40])
def test_index_outside_the_block_table_is_an_error(
    make_region: MakeRegion, gather: Callable[..., Tensor], index: int
) -> None:
    region, table = make_region(values(20, 64), E2M1_E4M3_16)
    with pytest.raises(IndexError, match="block table"):
        gather(region, table, torch.tensor([0, index]))


def test_page_outside_the_pool_is_an_error(make_region: MakeRegion) -> None:
    region, table = make_region(values(20, 64), E2M1_E4M3_16)
    table[1] = region.pool.shape[0]
    with pytest.raises(IndexError, match="pool"):
        fast.gather_rows(region, table, torch.tensor([8]))
    # A page that no index needs may be anything, as in a table that is longer than its sequence.
    assert fast.gather_rows(region, table, torch.tensor([7])).isfinite().all()


def test_index_may_be_a_view(make_region: MakeRegion) -> None:
    region, table = make_region(values(20, 64), E2M1_E4M3_16)
    index = torch.arange(20).view(4, 5).T[::2]
    assert same_bits(fast.gather_rows(region, table, index), gather_rows(region, table, index))
