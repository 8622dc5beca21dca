"""Routed experts: twins, the order of sums, the rounding points of the release, rows whose bits are their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.formats.codec import fake_quantize
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import DenseWeight, Weight, quantize_weight
from rorqual.ops import cpu
from rorqual.ops.fast import experts as fast
from rorqual.ops.fast import linear as fast_linear
from rorqual.ops.reference import experts as plain

PATHS = [
    pytest.param(path, marks=pytest.mark.skipif(bool(cpu.missing(path)), reason=f"this CPU has no {path} path"))
    for path in ("vector", "plain")
]
KINDS = ("fp32", "bf16", "fp8", "fp4")
COUNT, WIDTH, INNER, SLOTS = 6, 64, 96, 3
Experts = Callable[..., Tensor]


@dataclass(frozen=True)
class Layer:
    w1: Sequence[Weight]
    w2: Sequence[Weight]
    w3: Sequence[Weight]

    def run(self, op: Experts, rows: Rows, short_rows: int, native: bool, limit: float = 1.0) -> Tensor:
        return op(rows.x, rows.index, rows.weight, self.w1, self.w2, self.w3, limit, short_rows, native)


@dataclass(frozen=True)
class Rows:
    x: Tensor
    index: Tensor
    weight: Tensor

    def __getitem__(self, rows: slice | Tensor) -> Rows:
        return Rows(self.x[rows], self.index[rows], self.weight[rows])


def make_layer(kind: str, count: int = COUNT, width: int = WIDTH, inner: int = INNER) -> Layer:
    generator = torch.Generator().manual_seed(0)

    def weight(n: int, k: int) -> Weight:
        w = torch.randn(n, k, generator=generator) * (2 / k**0.5)
        if kind in ("fp32", "bf16"):
            return DenseWeight(w.to(torch.float32 if kind == "fp32" else torch.bfloat16))
        return quantize_weight(w, "fp8" if kind == "fp8" else "fp4")

    shapes = ((inner, width), (width, inner), (inner, width))
    return Layer(*([weight(*shape) for _ in range(count)] for shape in shapes))


def make_rows(t: int, seed: int = 1, count: int = COUNT, slots: int = SLOTS) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(t, count, generator=generator).argsort(dim=1)[:, :slots]
    return Rows(
        torch.randn(t, WIDTH, generator=generator).to(torch.bfloat16), index, torch.rand(t, slots, generator=generator)
    )


@pytest.fixture(params=["plain op", *PATHS])
def op(request: pytest.FixtureRequest) -> Experts:
    return plain.experts if request.param == "plain op" else partial(fast.experts, path=request.param)


def _exact(layer: Layer, rows: Rows, limit: float) -> Tensor:
    """SPEC 7 in fp64, one pair at a time."""
    values = [[w.expand().double() for w in expert] for expert in zip(layer.w1, layer.w2, layer.w3, strict=True)]
    y = torch.zeros(rows.x.shape, dtype=torch.float64)
    for t in range(rows.x.shape[0]):
        for slot, expert in enumerate(rows.index[t].tolist()):
            w1, w2, w3 = values[expert]
            gate, up = w1 @ rows.x[t].double(), w3 @ rows.x[t].double()
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            y[t] += w2 @ (gate * torch.sigmoid(gate) * up * rows.weight[t, slot].double())
    return y


def _native(layer: Layer, rows: Rows, limit: float, quantised: bool) -> Tensor:
    """The same with the rounding points of SPEC 3; sums in fp64, rounded to bf16 where the release rounds."""

    values = [[w.expand().double() for w in expert] for expert in zip(layer.w1, layer.w2, layer.w3, strict=True)]

    def product(weight: Tensor, x: Tensor) -> Tensor:
        x = fake_quantize(x.float(), E4M3_E8M0_32) if quantised else x
        return (weight @ x.double()).to(torch.bfloat16).float()

    y = torch.zeros(rows.x.shape)
    for t in range(rows.x.shape[0]):
        for slot, expert in enumerate(rows.index[t].tolist()):
            w1, w2, w3 = values[expert]
            gate, up = product(w1, rows.x[t]), product(w3, rows.x[t])
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = (gate * torch.sigmoid(gate) * up * rows.weight[t, slot]).to(torch.bfloat16)
            y[t] += product(w2, hidden)
    return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_value(op: Experts, kind: str, limit: float) -> None:
    layer = make_layer(kind)
    for t, short_rows in ((0, 0), (1, 1), (9, 9), (30, 4), (fast_linear.GEMM_ROWS * 2 + 20, 2)):
        rows = make_rows(t)
        y = layer.run(op, rows, short_rows, False, limit)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), _exact(layer, rows, limit), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_native_rounding_points(op: Experts, kind: str) -> None:
    layer, rows = make_layer(kind), make_rows(40)
    for short_rows in (0, 40):
        y = layer.run(op, rows, short_rows, True, 0.7)
        expected = _native(layer, rows, 0.7, kind in ("fp8", "fp4"))
        # A sum that lands on the other side of a bf16 tie moves one rounding; missing a rounding point moves them all.
        assert (y == expected).float().mean() > 0.97
        torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("native", [False, True])
def test_a_row_has_the_same_bits_in_any_company(op: Experts, kind: str, native: bool) -> None:
    layer, rows = make_layer(kind), make_rows(32)
    alone = torch.cat([layer.run(op, rows[slice(t, t + 1)], 1, native) for t in range(32)])
    for t in (2, 3, 5, 6, 7, 16, 31, 32):
        assert torch.equal(layer.run(op, rows[slice(0, t)], t, native), alone[:t]), t
    order = torch.randperm(32, generator=torch.Generator().manual_seed(2))
    assert torch.equal(layer.run(op, rows[order], 32, native), alone[order])
    for tail in (1, fast_linear.GEMM_ROWS * 3):
        more = make_rows(tail, seed=3)
        both = Rows(*(torch.cat(pair) for pair in zip(_fields(rows[slice(0, 9)]), _fields(more), strict=True)))
        assert torch.equal(layer.run(op, both, 9, native)[:9], alone[:9]), tail


def _fields(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    return rows.x, rows.index, rows.weight


def test_slots_are_added_in_the_order_they_stand_in(op: Experts) -> None:
    # Three experts that give a, b, -a at one channel: (a + b) - a loses b, (a - a) + b does not.
    identity = DenseWeight(torch.eye(WIDTH))
    layer = Layer(
        [identity] * 3, [DenseWeight(torch.eye(WIDTH) * scale) for scale in (2.0**26, 1.0, -(2.0**26))], [identity] * 3
    )
    one = torch.zeros(2 * fast_linear.GEMM_ROWS, WIDTH)
    one[:, 0] = 1.0
    for order, lost in (([0, 1, 2], True), ([0, 2, 1], False)):
        index = torch.tensor(order).expand(one.shape[0], 3).contiguous()
        for short_rows in (0, 5, one.shape[0]):
            y = layer.run(op, Rows(one, index, torch.ones(one.shape[0], 3)), short_rows, False, 0.0)
            assert ((y[:, 0] == 0.0) == lost).all()


def test_one_expert_for_all_rows(op: Experts) -> None:
    layer = make_layer("fp8", count=1)
    for t in (3, fast_linear.GEMM_ROWS + 1):
        rows = make_rows(t, count=1, slots=1)
        y = layer.run(op, rows, 1, False)
        torch.testing.assert_close(y.double(), _exact(layer, rows, 1.0), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("short_rows", [0, 3, 80])
def test_a_shared_expert_is_one_more_for_every_row(op: Experts, kind: str, native: bool, short_rows: int) -> None:
    """To the bit, whatever its kind and shape: it is added after the chosen ones."""
    layer, other, rows = make_layer(kind), make_layer("fp8", count=1, inner=64), make_rows(80)
    shared = other.w1[0], other.w2[0], other.w3[0]
    weights = layer.w1, layer.w2, layer.w3
    found = op(rows.x, rows.index, rows.weight, *weights, 1.0, short_rows, native, shared)
    every = Rows(rows.x, torch.zeros(80, 1, dtype=torch.int64), torch.ones(80, 1))
    expected = layer.run(op, rows, short_rows, native) + other.run(op, every, short_rows, native)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_do_not_change_short_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = make_layer(kind), make_rows(50)
    whole = layer.run(fast.experts, rows, 20, True)
    monkeypatch.setattr(fast, "PASS_BYTES", 40_000)
    monkeypatch.setattr(fast, "BATCH_BYTES", 5 * 12 * INNER)
    cuts = list(fast._passes(50, 20, 10_000))
    assert [cut.stop - cut.start for cut, _ in cuts] == [4] * 5 + [4] * 7 + [2] and cuts[4] == (slice(16, 20), True)
    cut = layer.run(fast.experts, rows, 20, True)
    assert torch.equal(cut[:20], whole[:20])
    torch.testing.assert_close(cut, whole, rtol=0.02, atol=0.02)


def test_batches_of_experts() -> None:
    first = np.array([0, 2, 5, 12, 13])
    pairs = fast._Sorted(np.array([1, 3, 4, 8, 9]), first, np.append(first[1:], 15))
    cuts = [(batch.experts.tolist(), int(batch.first[0]), int(batch.last[-1])) for batch in pairs.batches(5)]
    assert cuts == [([1, 3], 0, 5), ([4], 5, 12), ([8, 9], 12, 15)]


@pytest.mark.parametrize("path", PATHS)
def test_bits_do_not_depend_on_threads(path: cpu.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = make_layer("fp4"), make_rows(24)
    op = partial(fast.experts, path=path)
    whole = layer.run(op, rows, 24, True)
    for module in (fast, fast_linear):
        monkeypatch.setattr(module, "parts_of", lambda products: 5)
    assert torch.equal(layer.run(op, rows, 24, True), whole)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp4"])
def test_few_rows_and_many_rows_of_an_expert_agree(kind: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = make_layer(kind), make_rows(61)
    monkeypatch.setattr(fast, "PANEL_ROWS", 1000)
    by_rows = layer.run(fast.experts, rows, 0, native)
    used: list[int] = []
    multiply = fast.multiply_panels
    monkeypatch.setattr(fast, "multiply_panels", lambda *args: (used.append(len(args[3])), multiply(*args)))
    monkeypatch.setattr(fast, "PANEL_ROWS", 30)
    # A last bit of a gate may move a bf16 or an FP8 code of a hidden value.
    tolerance = 0.05 if native else 1e-5
    torch.testing.assert_close(layer.run(fast.experts, rows, 0, native), by_rows, rtol=tolerance, atol=tolerance)
    if fast_linear.has_vectors(None):
        counts = np.bincount(rows.index.flatten().numpy(), minlength=COUNT)
        assert 0 < int((counts >= 30).sum()) < COUNT
        assert set(used) == {int((counts >= 30).sum())}


@pytest.mark.parametrize("index", [-1, COUNT])
def test_experts_that_do_not_exist(op: Experts, index: int) -> None:
    layer, rows = make_layer("fp32"), make_rows(4)
    rows.index[2, 1] = index
    for short_rows in (0, 4):
        with pytest.raises(AssertionError, match="out of range"):
            layer.run(op, rows, short_rows, False)


def test_gate_that_overflows_is_an_error_where_it_would_be_quantised(op: Experts) -> None:
    layer, rows = make_layer("fp8"), make_rows(3)
    rows.x[1] = 3e38
    with pytest.raises(FormatError, match="finite"):
        layer.run(op, rows, 3, True, 0.0)


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = ((INNER, WIDTH), (WIDTH, INNER), (INNER, WIDTH))
    tensors = [[torch.randn(shape, generator=generator) / 8 for _ in range(3)] for shape in shapes]
    leaves = [t.requires_grad_() for group in tensors for t in group]
    layer = Layer(*(list(map(DenseWeight, group)) for group in tensors))
    rows = make_rows(10, count=3, slots=2)
    x, weight = rows.x.float().requires_grad_(), rows.weight.requires_grad_()
    got = [
        torch.autograd.grad(
            layer.run(plain.experts, Rows(x, rows.index, weight), short_rows, False).square().sum(),
            [x, weight, *leaves],
        )
        for short_rows in (0, 4)
    ]
    y = torch.zeros(10, WIDTH)
    for slot in range(2):
        for expert in range(3):
            chosen = (rows.index[:, slot] == expert).float() * weight[:, slot]
            gate = (x @ tensors[0][expert].T).clamp(max=1.0)
            hidden = torch.nn.functional.silu(gate) * (x @ tensors[2][expert].T).clamp(-1.0, 1.0)
            y = y + (hidden * chosen[:, None]) @ tensors[1][expert].T
    expected = torch.autograd.grad(y.square().sum(), [x, weight, *leaves])
    for grads in got:
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError, match="no gradient"):
        layer.run(fast.experts, Rows(x, rows.index, weight), 0, False)
