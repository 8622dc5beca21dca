"""Gathered attention in Triton against SPEC 5 in fp64, and against the plain op.

Tolerances are those of the fp32 sums: keys decode exactly. In native, bf16(p) may fall to the other side where p is
near a midpoint: 2^-8 of one p in S.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rorqual.formats.codec import fake_quantize
from rorqual.formats.spec import BF16, E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, NumberFormat
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.attention import sparse_attention as plain
from tests.ops.on_triton import forbidden, on_device

from rorqual.ops.triton import attention as ours  # isort: skip

MakeRegion = Callable[..., tuple[PagedRegion, Tensor]]
NATIVE = pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
# (rows, heads, channels, top-k, window): middle and released widths, odd head counts, a head dim of no power of two.
SHAPES = [(3, 8, 128, 24, 16), (1, 64, 512, 20, 9), (2, 20, 96, 7, 33), (3, 3, 32, 9, 1), (2, 2, 48, 6, 5)]
attend = on_device(ours.sparse_attention)


@pytest.fixture(autouse=True)
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "plain_sparse_attention", forbidden)


class Case(NamedTuple):
    """Rows at positions first..first + T - 1 whose window keys are held from `base` on."""

    q: Tensor
    positions: Tensor
    held: Tensor
    base: int
    floor: int
    window: int
    region: PagedRegion | None
    table: Tensor | None
    topk: Tensor | None
    sink: Tensor
    scale: float
    main: Tensor

    def args(self, rows: slice | Tensor = slice(None)) -> tuple[object, ...]:
        topk = None if self.topk is None else self.topk[rows]
        return (self.q[rows], self.positions[rows], *self[2:8], topk, self.sink, self.scale)


def make_case(
    make_region: MakeRegion,
    rows: int = 2,
    heads: int = 8,
    channels: int = 64,
    k: int = 6,
    window: int = 8,
    fmt: NumberFormat = E2M1_E4M3_16,
    floor: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(rows + channels)
    groups, first = 3 * k + 5, window + 9
    main = torch.randn(groups, channels, generator=generator)
    region, table = make_region(main, fmt)
    topk = torch.stack([torch.randperm(groups, generator=generator)[:k].sort().values for _ in range(rows)])
    topk[torch.rand(rows, k, generator=generator) < 0.2] = -1
    return Case(
        q=torch.randn(rows, heads, channels, generator=generator) * 1.5,
        positions=torch.arange(first, first + rows),
        held=torch.randn(rows + window + 4, channels, generator=generator),
        base=5,
        floor=floor,
        window=window,
        region=region,
        table=table,
        topk=topk,
        sink=torch.randn(heads, generator=generator),
        scale=channels**-0.5,
        main=fake_quantize(main, fmt),
    )


def formula(case: Case, native: bool) -> Tensor:
    """SPEC 5 row by row, in fp64."""
    out = torch.zeros_like(case.q, dtype=torch.float64)
    for t, position in enumerate(case.positions.tolist()):
        low = max(case.floor, position - case.window + 1, case.base)
        keys = [case.held[low - case.base : position - case.base + 1]]
        if case.topk is not None:
            keys.append(case.main[case.topk[t][case.topk[t] != -1]])
        key = torch.cat(keys).double()
        logits = case.scale * case.q[t].double() @ key.T
        top = logits.amax(1, keepdim=True)
        p = torch.exp(logits - top)
        below = p.sum(1, keepdim=True) + torch.exp(case.sink.double()[:, None] - top)
        out[t] = (p.to(torch.bfloat16).double() if native else p) @ key / below
    return out


@NATIVE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_formula(make_region: MakeRegion, shape: tuple[int, ...], native: bool) -> None:
    case = make_case(make_region, *shape, floor=11)
    found, tolerance = attend(*case.args(), native), 2e-3 if native else 3e-6
    assert torch.allclose(found.double(), formula(case, native), rtol=tolerance, atol=tolerance)
    assert (found - plain(*case.args(), native)).norm() <= 1e-6 * found.norm() * (100 if native else 1)


@pytest.mark.parametrize("fmt", [E2M1_E4M3_16, E2M1_E8M0_32], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("scale", [1e-3, 2e3])
def test_formats_over_their_range(make_region: MakeRegion, fmt: NumberFormat, scale: float) -> None:
    # Groups alone, and one of them: o = k p / (p + exp(sink - l)), a decoded key.
    main = scale * torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    region, table = make_region(main, fmt)
    topk = torch.tensor([[17], [39]])
    q, sink = torch.zeros(2, 2, 64), torch.tensor([0.0, -torch.inf])
    out = attend(q, torch.tensor([0, 0]), torch.empty(0, 64), 0, 0, 4, region, table, topk, sink, 1.0, False)
    keys = fake_quantize(main, fmt)[[17, 39]]
    assert torch.equal(out, torch.stack((keys / 2, keys), 1))


@NATIVE
def test_a_row_has_the_same_bits_alone_and_in_any_batch(make_region: MakeRegion, native: bool) -> None:
    case = make_case(make_region, 6, 20, 32, 20, 7, floor=11)
    whole = attend(*case.args(), native)
    for rows in (slice(4, 5), slice(0, 2), torch.tensor([5, 1, 3])):
        assert torch.equal(attend(*case.args(rows), native), whole[rows])


def test_what_surrounds_a_window_does_not_matter(make_region: MakeRegion) -> None:
    # Keys that the row does not see may be poison.
    case = make_case(make_region, 1)
    alone = attend(*case.args(), False)
    held = torch.full((60, 64), float("nan"))
    low = int(case.positions[0]) - case.window + 1 - case.base
    held[low + 30 : low + 38] = case.held[low : low + 8]
    assert torch.equal(attend(*case._replace(held=held, base=case.base - 30).args(), False), alone)


@pytest.mark.parametrize(("floor", "seen"), [(0, [4, 5, 6, 7]), (9, [6, 7]), (11, [])])
def test_window_has_exactly_w_keys_and_none_of_the_future(floor: int, seen: list[int]) -> None:
    q, at, sink = torch.zeros(1, 1, 32), torch.tensor([10]), torch.full((1,), -1e9)
    out = attend(q, at, torch.eye(12, 32), 3, floor, 4, None, None, None, sink, 1.0, False)
    expected = torch.zeros(32)
    expected[seen] = 1 / max(len(seen), 1)
    assert torch.equal(out[0, 0], expected)


def test_keys_outside_what_is_held_are_masked() -> None:
    q, sink = torch.zeros(3, 1, 32), torch.full((1,), -1e9)
    out = attend(q, torch.tensor([4, 6, 9]), torch.eye(3, 32), 5, 0, 4, None, None, None, sink, 1.0, False)
    assert out[:, 0, :4].tolist() == [[0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0]]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # to infinity, rightly
@pytest.mark.parametrize("sink", [0.0, -1e9, -float("inf"), 1e9])
def test_empty_set_gives_zeros(make_region: MakeRegion, sink: float) -> None:
    case = make_case(make_region, floor=1000)._replace(sink=torch.full((8,), sink))
    assert case.topk is not None
    case.topk[:1] = -1
    out = attend(*case.args(), False)
    assert torch.equal(out[0], torch.zeros(8, 64))
    assert not out.isnan().any() and (sink > 0 or out[1].abs().max() > 0)


def test_shapes_of_nothing(make_region: MakeRegion) -> None:
    case = make_case(make_region)
    assert attend(*case.args(slice(0, 0)), False).shape == (0, 8, 64)
    none = case._replace(held=torch.empty(0, 64), topk=torch.empty(2, 0, dtype=torch.int64))
    assert torch.equal(attend(*none.args(), False), torch.zeros(2, 8, 64))


def test_absent_groups_read_nothing(make_region: MakeRegion) -> None:
    case = make_case(make_region)
    expected = attend(*case._replace(region=None, table=None, topk=None).args(), False)
    assert case.topk is not None and case.region is not None
    case.topk[:] = -1
    case.region.pool.fill_(255)
    assert torch.equal(attend(*case.args(), False), expected) and expected.isfinite().all()


def test_poison_that_is_seen_stays_visible(make_region: MakeRegion) -> None:
    case = make_case(make_region)
    assert case.topk is not None and case.region is not None
    case.topk[0], case.topk[1, 0] = -1, 3
    case.region.pool.fill_(255)
    out = attend(*case.args(), False)
    assert out[1].isnan().all() and out[0].isfinite().all()


def test_what_the_kernel_may_not_follow_is_an_error(make_region: MakeRegion) -> None:
    case = make_case(make_region)
    assert case.topk is not None and case.table is not None and case.region is not None
    for index in (1000, -2):
        wrong = case.topk.clone()
        wrong[1, 3] = index
        with pytest.raises(IndexError, match="block table"):
            attend(*case._replace(topk=wrong).args(), False)
    case.topk[:] = torch.tensor([0, 3, 9, 10, -1, -1])
    case.table[1] = len(case.region.pool)
    with pytest.raises(IndexError, match="the pool"):
        attend(*case.args(), False)


@NATIVE
def test_equal_logits_average_exactly(make_region: MakeRegion, native: bool) -> None:
    # q = 0 makes every p 1, and small-integer keys every sum exact: one division is left.
    keys = torch.randint(-6, 7, (40, 64), generator=torch.Generator().manual_seed(0)).float()
    values = fake_quantize(keys, E2M1_E8M0_32)
    region, table = make_region(values, E2M1_E8M0_32)
    topk, q, sink = torch.tensor([[0, 3, 9, 39, -1]]), torch.zeros(1, 16, 64), torch.zeros(16)
    out = attend(q, torch.tensor([7]), values[:8], 0, 0, 4, region, table, topk, sink, 0.125, native)
    expected = (values[4:8].sum(0) + values[[0, 3, 9, 39]].sum(0)) / torch.tensor(9.0)
    assert torch.equal(out[0], expected.expand(16, 64))


def test_native_numerator_takes_rounded_p_under_the_last_maximum() -> None:
    # The largest logit comes last, in the second step of slots: p must be rounded under it, not rescaled to it.
    held, q = torch.zeros(20, 32), torch.zeros(1, 1, 32)
    held[0, 0], held[19, 1] = 1.0, 1.0
    q[0, 0, 1], q[0, 0, 0] = 0.7, -0.3
    out = attend(q, torch.tensor([19]), held, 0, 18, 20, None, None, None, torch.tensor([0.5]), 1.0, True)[0, 0]
    assert out[:2].tolist() == pytest.approx([0.0, 1 / (1 + math.exp(-0.7) + math.exp(-0.2))], rel=1e-6)
    out = attend(q, torch.tensor([19]), held, 0, 0, 20, None, None, None, torch.tensor([0.5]), 1.0, True)[0, 0]
    below = 1 + math.exp(-1) + 18 * math.exp(-0.7) + math.exp(-0.2)
    rounded = torch.tensor(math.exp(-1)).to(torch.bfloat16).item()
    assert rounded != pytest.approx(math.exp(-1), rel=1e-3)
    assert out[:2].tolist() == pytest.approx([rounded / below, 1 / below], rel=1e-6)


@pytest.mark.parametrize("fmt", [E4M3_E8M0_32, BF16], ids=lambda fmt: fmt.name)
def test_other_formats_take_the_plain_op(
    make_region: MakeRegion, fmt: NumberFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(make_region, fmt=fmt)
    with pytest.raises(AssertionError, match="plain op served"):
        attend(*case.args(), False)
    monkeypatch.setattr(ours, "plain_sparse_attention", plain)
    assert torch.allclose(attend(*case.args(), False), plain(*case.args(), False), atol=3e-6)


def test_gradients_are_refused(make_region: MakeRegion) -> None:
    case = make_case(make_region, 1)
    case.q.requires_grad_()
    with pytest.raises(AssertionError, match="no gradient"):
        attend(*case.args(), False)
    with torch.no_grad():
        assert attend(*case.args(), False).isfinite().all()
