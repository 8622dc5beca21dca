"""Index scores in Triton have the bits of the plain op: FP4 dots are exact, and every other sum has one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rorqual.formats.codec import Packed, quantize
from rorqual.formats.spec import BF16, E2M1_E4M3_16, E2M1_E8M0_32, NumberFormat
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference import index_scores as plain
from tests.ops.on_triton import forbidden, on_device

from rorqual.ops.triton import index_scores as ours  # isort: skip

MakeRegion = Callable[..., tuple[PagedRegion, Tensor]]
INF = float("inf")
NATIVE = pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
# (index heads, index head dim): the release's, whole panels of sixteen, panels not full.
SHAPES = [(32, 128), (16, 32), (4, 32), (20, 96)]
PLAIN, PLAIN_AT = plain.index_scores, plain.index_scores_at
scores, scores_at = on_device(ours.index_scores), on_device(ours.index_scores_at)


@pytest.fixture(autouse=True)
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "index_scores", forbidden)
    monkeypatch.setattr(plain, "index_scores_at", forbidden)


class Case(NamedTuple):
    q: Packed
    w: Tensor
    region: PagedRegion
    table: Tensor

    def args(self, rows: slice | Tensor = slice(None)) -> tuple[Tensor, Tensor, Tensor, PagedRegion, Tensor]:
        return self.q.codes[rows], self.q.scales[rows], self.w[rows], self.region, self.table


def spread(*shape: int, seed: int) -> Tensor:
    """Normal values whose 32-blocks lie up to eight binades apart: the sums over blocks round."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator).unflatten(-1, (-1, 32))
    return (x * 2.0 ** torch.randint(-4, 4, x.shape[:-1], generator=generator)[..., None]).flatten(-2)


def make_case(
    make_region: MakeRegion, rows: int, groups: int, heads: int = 8, width: int = 64, fmt: NumberFormat = E2M1_E8M0_32
) -> Case:
    region, table = make_region(spread(groups, width, seed=1), fmt)
    w = torch.randn(rows, heads, generator=torch.Generator().manual_seed(2))
    return Case(quantize(spread(rows, heads, width, seed=3), fmt), w, region, table)


@NATIVE
@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_same_bits(make_region: MakeRegion, heads: int, width: int, native: bool) -> None:
    case = make_case(make_region, 6, 83, heads, width)
    visible = torch.tensor([-1, 0, 5, 70, 83, 200])
    found = scores(*case.args(), 5, 81, visible, native)
    assert torch.equal(found, PLAIN(*case.args(), 5, 81, visible, native))
    assert found.isfinite().sum() == 65 + 76 + 76
    index = torch.randint(-1, 83, (6, 70), generator=torch.Generator().manual_seed(5))
    assert torch.equal(scores_at(*case.args(), index, native), PLAIN_AT(*case.args(), index, native))


def test_native_rounds(make_region: MakeRegion) -> None:
    case, visible = make_case(make_region, 2, 30), torch.tensor([30, 30])
    assert not torch.equal(*(scores(*case.args(), 0, 30, visible, native) for native in (False, True)))


@NATIVE
def test_a_row_has_the_same_bits_alone_in_any_batch_and_in_any_tile(make_region: MakeRegion, native: bool) -> None:
    case, visible = make_case(make_region, 7, 90), torch.arange(7) * 20
    whole = scores(*case.args(), 0, 90, visible, native)
    for rows in (slice(4, 5), slice(1, 3), torch.tensor([6, 2, 3])):
        assert torch.equal(scores(*case.args(rows), 0, 90, visible[rows], native), whole[rows])
    tiles = [scores(*case.args(), first, last, visible, native) for first, last in ((0, 9), (9, 75), (75, 90))]
    assert torch.equal(torch.cat(tiles, 1), whole)
    index = torch.randint(0, 90, (7, 5), generator=torch.Generator().manual_seed(6))
    at = scores_at(*case.args(), index, native)
    seen = index < visible[:, None]
    assert torch.equal(at[seen], whole.gather(1, index)[seen]) and seen.any()


def test_pages_that_no_row_sees_are_not_read(make_region: MakeRegion) -> None:
    case, visible = make_case(make_region, 3, 60), torch.tensor([9, 20, 24])
    whole = scores(*case.args(), 0, 24, visible, False)
    case.region.pool[case.table[3:]] = 255
    longer = scores(*case._replace(table=case.table[:3]).args(), 0, 60, visible, False)
    assert torch.equal(longer[:, :24], whole) and (longer[:, 24:] == -INF).all()


def test_poison_shows_where_it_is_seen_and_only_there(make_region: MakeRegion) -> None:
    case = make_case(make_region, 2, 60)
    case.region.pool[case.table[2]] = 255
    found = scores(*case.args(), 0, 60, torch.tensor([16, 60]), False)
    assert found.isnan().nonzero().tolist() == [[1, group] for group in range(16, 24)]
    at = scores_at(*case.args(), torch.tensor([[-1, 16], [17, 0]]), True)
    assert at.isnan().tolist() == [[False, True], [True, False]] and at[0, 0] == -INF


def test_shapes_of_nothing(make_region: MakeRegion) -> None:
    case = make_case(make_region, 2, 20)
    assert scores(*case.args(), 5, 5, torch.tensor([9, 9]), False).shape == (2, 0)
    assert (scores(*case.args(), 0, 20, torch.tensor([0, -1]), False) == -INF).all()
    assert scores_at(*case.args(), torch.empty(2, 0, dtype=torch.int64), False).shape == (2, 0)
    assert (scores_at(*case.args(), torch.full((2, 3), -1), False) == -INF).all()
    no_rows = torch.empty(0, dtype=torch.int64)
    assert scores(*case.args(no_rows), 0, 20, no_rows, False).shape == (0, 20)


def test_what_a_kernel_may_not_follow_is_an_error(make_region: MakeRegion) -> None:
    case, all_visible = make_case(make_region, 1, 20), torch.tensor([30])
    with pytest.raises(IndexError, match="block table"):
        scores(*case.args(), 0, 30, all_visible, False)
    for index in (24, -2):
        with pytest.raises(IndexError, match="block table"):
            scores_at(*case.args(), torch.tensor([[index]]), False)
    case.table[1] = len(case.region.pool)
    assert scores(*case.args(), 0, 8, all_visible, False).isfinite().all()
    with pytest.raises(IndexError, match="the pool"):
        scores(*case.args(), 0, 9, all_visible, False)
    with pytest.raises(IndexError, match="the pool"):
        scores_at(*case.args(), torch.tensor([[9]]), False)


@pytest.mark.parametrize("fmt", [E2M1_E4M3_16, BF16], ids=lambda fmt: fmt.name)
def test_other_formats_take_the_plain_op(
    make_region: MakeRegion, fmt: NumberFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, visible = make_case(make_region, 2, 20, fmt=fmt), torch.tensor([20, 9])
    with pytest.raises(AssertionError, match="plain op served"):
        scores(*case.args(), 0, 20, visible, False)
    monkeypatch.setattr(plain, "index_scores_at", PLAIN_AT)
    found, index = scores_at(*case.args(), torch.tensor([[3, -1], [0, 19]]), False), torch.tensor([[3, -1], [0, 19]])
    assert torch.allclose(found, PLAIN_AT(*case.args(), index, False))


def test_gradients_are_refused(make_region: MakeRegion) -> None:
    case = make_case(make_region, 1, 9)
    case.w.requires_grad_()
    with pytest.raises(AssertionError, match="no gradient"):
        scores(*case.args(), 0, 9, torch.tensor([9]), False)
    with torch.no_grad():
        assert scores(*case.args(), 0, 9, torch.tensor([9]), False).isfinite().all()
