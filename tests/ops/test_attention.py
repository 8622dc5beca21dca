from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rorqual.formats.codec import fake_quantize
from rorqual.formats.spec import BF16, E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, NumberFormat
from rorqual.ops import cpu
from rorqual.ops.fast import attention as fast
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference import attention as plain
from rorqual.ops.reference.attention import attention_over

MakeRegion = Callable[..., tuple[PagedRegion, Tensor]]
Op = Callable[..., Tensor]


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
    rows: int,
    heads: int,
    channels: int,
    k: int,
    window: int,
    fmt: NumberFormat = E2M1_E4M3_16,
    floor: int = 0,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
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
    """SPEC 5 row by row, head by head, in fp64."""
    out = torch.zeros_like(case.q, dtype=torch.float64)
    for t, position in enumerate(case.positions.tolist()):
        low = max(case.floor, position - case.window + 1, case.base)
        keys = [case.held[low - case.base : position - case.base + 1]]
        if case.topk is not None:
            keys.append(case.main[case.topk[t][case.topk[t] >= 0]])
        key = torch.cat(keys).double()
        if not len(key):
            continue
        logits = case.scale * case.q[t].double() @ key.T
        top = logits.amax(1, keepdim=True)
        p = torch.exp(logits - top)
        below = p.sum(1, keepdim=True) + torch.exp(case.sink.double()[:, None] - top)
        out[t] = (p.to(torch.bfloat16).double() if native else p) @ key / below
    return out


def on_path(path: cpu.Path) -> Op:
    def attend(*args: object) -> Tensor:
        return fast.sparse_attention(*args, path=path)  # type: ignore[arg-type]

    return attend


EACH = pytest.mark.parametrize(
    "attend",
    [pytest.param(plain.sparse_attention, id="torch")]
    + [
        pytest.param(
            on_path(path),
            id=path,
            marks=pytest.mark.skipif(bool(cpu.missing(path)), reason=f"CPU lacks {cpu.missing(path)}"),
        )
        for path in ("vector", "plain")
    ],
)
NATIVE = pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
# (rows, heads, channels, top-k, window): middle and released widths, odd head counts, a head dim of the plain loops.
SHAPES = [(5, 8, 128, 24, 16), (2, 64, 512, 40, 20), (3, 20, 96, 7, 33), (4, 3, 32, 9, 1), (3, 2, 48, 6, 5)]


@EACH
@NATIVE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_formula(make_region: MakeRegion, attend: Op, shape: tuple[int, ...], native: bool) -> None:
    case = make_case(make_region, *shape, floor=11)
    # bf16(p) may fall to the other side where p is near a midpoint: 2^-8 of one p in S.
    tolerance = 2e-3 if native else 3e-6
    assert torch.allclose(attend(*case.args(), native).double(), formula(case, native), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("path", ["vector", "plain"])
@NATIVE
@pytest.mark.parametrize("fmt", [E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, BF16], ids=lambda fmt: fmt.name)
def test_twins_agree(make_region: MakeRegion, fmt: NumberFormat, path: cpu.Path, native: bool) -> None:
    if cpu.missing(path):
        pytest.skip(f"CPU lacks {cpu.missing(path)}")
    case = make_case(make_region, 6, 16, 64, 30, 12, fmt=fmt)
    ours, twin = on_path(path)(*case.args(), native), plain.sparse_attention(*case.args(), native)
    assert (ours - twin).norm() <= 1e-6 * twin.norm() * (100 if native else 1)


@EACH
@NATIVE
@pytest.mark.parametrize("shape", [(32, 8, 128, 24, 16), (32, 20, 32, 5, 7)], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    make_region: MakeRegion, attend: Op, shape: tuple[int, ...], native: bool
) -> None:
    case = make_case(make_region, *shape, floor=11)
    whole = attend(*case.args(), native)
    for rows in (slice(9, 10), slice(0, 2), slice(3, 30), torch.tensor([31, 4, 18])):
        assert torch.equal(attend(*case.args(rows), native), whole[rows])


@EACH
def test_what_surrounds_a_window_does_not_matter(make_region: MakeRegion, attend: Op) -> None:
    # A chunk holds other keys beside the row's own; keys that the row does not see may be poison.
    case = make_case(make_region, 1, 8, 64, 6, 8)
    alone = attend(*case.args(), False)
    held = torch.full((60, 64), float("nan"))
    low = int(case.positions[0]) - case.window + 1
    held[low + 30 - case.base : low + 38 - case.base] = case.held[low - case.base : low - case.base + 8]
    moved = case._replace(held=held, base=case.base - 30)
    assert torch.equal(attend(*moved.args(), False), alone)


@EACH
def test_window_has_exactly_w_keys_and_none_of_the_future(attend: Op) -> None:
    held = torch.eye(12, 32)
    for floor, seen in ((0, [4, 5, 6, 7]), (6, [6, 7]), (8, [])):
        q, at = torch.zeros(1, 1, 32), torch.tensor([10])
        out = attend(q, at, held, 3, floor + 3, 4, None, None, None, torch.full((1,), -1e9), 1.0, False)
        expected = torch.zeros(32)
        expected[seen] = 1 / max(len(seen), 1)
        assert torch.equal(out[0, 0], expected)


@EACH
def test_keys_outside_what_is_held_are_masked(attend: Op) -> None:
    held = torch.eye(3, 32)
    q, sink = torch.zeros(3, 1, 32), torch.full((1,), -1e9)
    out = attend(q, torch.tensor([4, 6, 9]), held, 5, 0, 4, None, None, None, sink, 1.0, False)
    assert out[0].abs().max() == 0
    assert out[1, 0, :4].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert out[2, 0, :4].tolist() == [0.0, 1 / 2, 1 / 2, 0.0]


@EACH
@pytest.mark.parametrize("sink", [0.0, -1e9, -float("inf"), 1e9])
def test_empty_set_gives_zeros(make_region: MakeRegion, attend: Op, sink: float) -> None:
    case = make_case(make_region, 3, 8, 64, 6, 8, floor=1000)
    case.topk[:2] = -1
    case = case._replace(sink=torch.full((8,), sink))
    out = attend(*case.args(), False)
    assert torch.equal(out[:2], torch.zeros(2, 8, 64))
    assert not out.isnan().any() and (sink > 0 or out[2].abs().max() > 0)


@EACH
def test_shapes_of_nothing(make_region: MakeRegion, attend: Op) -> None:
    case = make_case(make_region, 2, 8, 64, 6, 8)
    assert attend(*case.args(slice(0, 0)), False).shape == (0, 8, 64)
    none_held = case._replace(held=torch.empty(0, 64), topk=torch.empty(2, 0, dtype=torch.int64))
    assert torch.equal(attend(*none_held.args(), False), torch.zeros(2, 8, 64))
    only_groups = case._replace(held=torch.empty(0, 64))
    assert torch.allclose(attend(*only_groups.args(), False).double(), formula(only_groups, False), atol=3e-6)


@EACH
def test_absent_groups_read_nothing(make_region: MakeRegion, attend: Op) -> None:
    case = make_case(make_region, 2, 8, 64, 6, 8)
    window_only = case._replace(region=None, table=None, topk=None)
    expected = attend(*window_only.args(), False)
    case.topk[:] = -1
    case.region.pool.fill_(255)
    assert torch.equal(attend(*case.args(), False), expected)


@EACH
def test_groups_outside_the_block_table_are_an_error(make_region: MakeRegion, attend: Op) -> None:
    case = make_case(make_region, 2, 8, 64, 6, 8)
    case.topk[1, 3] = 1000
    with pytest.raises(IndexError, match="block table"):
        attend(*case.args(), False)


@EACH
def test_poison_that_is_seen_stays_visible(make_region: MakeRegion, attend: Op) -> None:
    case = make_case(make_region, 2, 8, 64, 6, 8)
    case.topk[0], case.topk[1, 0] = -1, 3
    case.region.pool.fill_(255)
    out = attend(*case.args(), False)
    assert out[1].isnan().all() and out[0].isfinite().all()


@EACH
@pytest.mark.parametrize("gap", [1, 3, 40])
def test_poison_stays_with_the_rows_that_see_it(make_region: MakeRegion, attend: Op, gap: int) -> None:
    # Neighbours may share the work on keys of which one of them sees more than the other.
    case = make_case(make_region, 33, 8, 64, 6, 12)
    held = torch.randn(33 * gap + 30, 64, generator=torch.Generator().manual_seed(5))
    case = case._replace(positions=20 + gap * torch.arange(33), held=held)
    clean = attend(*case.args(), False)
    for at in (30, 31, 50):
        held = case.held.clone()
        held[at - case.base] = float("nan")
        out = attend(*case._replace(held=held).args(), False)
        sees = (case.positions >= at) & (case.positions < at + 12)
        assert out[sees].isnan().all() and torch.equal(out[~sees], clean[~sees])
    topk = case.topk.clone()
    topk[7] = -1
    topk[8, 2:] = -1
    some = attend(*case._replace(topk=topk).args(), False)
    others = torch.ones(33, dtype=torch.bool)
    others[7:9] = False
    assert torch.equal(some[others], clean[others])
    for t in (7, 8):
        assert torch.equal(some[t : t + 1], attend(*case._replace(topk=topk).args(slice(t, t + 1)), False))


@EACH
@NATIVE
def test_equal_logits_average_exactly(make_region: MakeRegion, attend: Op, native: bool) -> None:
    # q = 0 makes every p 1, and small-integer keys every sum exact: one division is left.
    keys = torch.randint(-6, 7, (40, 64), generator=torch.Generator().manual_seed(0)).float()
    region, table = make_region(fake_quantize(keys, E2M1_E8M0_32), E2M1_E8M0_32)
    values = fake_quantize(keys, E2M1_E8M0_32)
    topk = torch.tensor([[0, 3, 9, 39, -1]])
    q, sink = torch.zeros(1, 16, 64), torch.zeros(16)
    out = attend(q, torch.tensor([7]), values[:8], 0, 0, 4, region, table, topk, sink, 0.125, native)
    expected = (values[4:8].sum(0) + values[[0, 3, 9, 39]].sum(0)) / torch.tensor(9.0)
    assert torch.equal(out[0], expected.expand(16, 64))


@EACH
def test_native_numerator_takes_rounded_p_and_the_denominator_does_not(attend: Op) -> None:
    held = torch.zeros(2, 32)
    held[0, 0], held[1, 1] = 1.0, 1.0
    q = torch.zeros(1, 1, 32)
    q[0, 0, 1] = -1.0  # logits 0 and -1
    out = attend(q, torch.tensor([1]), held, 0, 0, 2, None, None, None, torch.tensor([0.5]), 1.0, True)[0, 0]
    below = 1 + math.exp(-1) + math.exp(0.5)
    rounded = torch.tensor(math.exp(-1)).to(torch.bfloat16).item()
    assert rounded != pytest.approx(math.exp(-1), rel=1e-3)
    assert out[:2].tolist() == pytest.approx([1 / below, rounded / below], rel=1e-6)


@EACH
def test_large_logits_and_sinks_stay_finite(attend: Op) -> None:
    held = torch.eye(2, 32)
    q = torch.zeros(1, 3, 32)
    q[0, :, 0] = 1e4
    sink = torch.tensor([2e4, 1e4, -1e4])
    out = attend(q, torch.tensor([1]), held, 0, 0, 2, None, None, None, sink, 1.0, False)[0]
    assert out[:, 0].tolist() == [0.0, 0.5, 1.0] and out[:, 1:].abs().max() == 0
    # Logits far below the sink: exp(sink - max) overflows, and the row is rightly nothing.
    out = attend(-q, torch.tensor([0]), held[:1], 0, 0, 1, None, None, None, sink * 0, 1.0, False)[0]
    assert out.abs().max() == 0


@pytest.mark.parametrize("path", ["vector", "plain"])
def test_exp_over_its_whole_range(path: cpu.Path) -> None:
    if cpu.missing(path):
        pytest.skip(f"CPU lacks {cpu.missing(path)}")
    # One key, no sink to speak of but exp(sink - l): o = 1 / (1 + e^x) for x from -100 to 88.
    x = torch.linspace(-100, 88, 4001)
    q, held = torch.zeros(1, 4001, 32), torch.ones(1, 32)
    out = fast.sparse_attention(q, torch.tensor([0]), held, 0, 0, 1, None, None, None, x, 1.0, False, path=path)
    expected = 1 / (1 + torch.exp(x.double()))
    assert ((out[0, :, 0] - expected).abs() <= 4e-7 * expected).all()


def test_core_is_differentiable_and_batched_like_the_rows(make_region: MakeRegion) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, sink = (
        torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((4, 3, 8), (4, 6, 8), (3,))
    )
    valid = torch.rand(4, 6, generator=generator) < 0.7
    valid[3] = False
    out = attention_over(q, k, valid, sink, 0.3, False)
    with torch.no_grad():
        rows = attention_over(q, k, valid, sink, 0.3, False)
    assert torch.allclose(out, rows, atol=1e-6)
    logits = (0.3 * q @ k.transpose(1, 2)).masked_fill(~valid[:, None], -float("inf"))
    joint = torch.softmax(torch.cat([logits, sink[None, :, None].expand(4, -1, 1)], 2), 2)[..., :6]
    upstream = torch.randn(4, 3, 8, generator=generator)
    ours = torch.autograd.grad((out * upstream).sum(), (q, k, sink))
    expected = torch.autograd.grad((joint @ k * upstream).sum(), (q, k, sink))
    for a, b in zip(ours, expected, strict=True):
        assert a.isfinite().all() and torch.allclose(a, b, atol=1e-5)


def test_gathered_keys_are_bounded(make_region: MakeRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(make_region, 12, 8, 64, 6, 8)
    whole = plain.sparse_attention(*case.args(), False)
    seen = []
    real = plain.attention_over

    def spy(q: Tensor, k: Tensor, *rest: object) -> Tensor:
        seen.append(k.numel() * 4)
        return real(q, k, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(plain, "attention_over", spy)
    monkeypatch.setattr(plain, "TILE_BYTES", 4 * 14 * 64 * 5)
    assert torch.equal(plain.sparse_attention(*case.args(), False), whole)
    assert len(seen) == 3 and max(seen) <= 4 * 14 * 64 * 5


def test_fast_op_refuses_gradients(make_region: MakeRegion) -> None:
    case = make_case(make_region, 1, 8, 64, 6, 8)
    case.q.requires_grad_()
    with pytest.raises(AssertionError, match="no gradient"):
        fast.sparse_attention(*case.args(), False)
    with torch.no_grad():
        fast.sparse_attention(*case.args(), False)
