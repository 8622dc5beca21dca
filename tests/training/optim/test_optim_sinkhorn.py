"""Sinkhorn-balanced momentum: what balancing does, which rows move, and that sparse equals dense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rorqual.training.optim.sinkhorn import UPDATE_RMS, SinkhornMomentum, balance, touched_rows

LR, MU = 0.05, 0.9


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rms(x: Tensor, dim: int) -> Tensor:
    return x.square().mean(dim).sqrt()


def build(rows: int = 40, width: int = 8) -> tuple[nn.Parameter, SinkhornMomentum]:
    table = nn.Parameter(draw((rows, width), 1))
    return table, SinkhornMomentum({"t.weight": table}, lr=LR, momentum=MU)


def sparse(rows: list[int], values: Tensor, size: tuple[int, int]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, size, check_invariants=True)


def plain_balance(x: Tensor) -> Tensor:
    """Whole matrix, pass by pass."""
    for _ in range(3):
        x = x / rms(x, 0).clamp_min(1e-30)
        x = x / rms(x, 1).clamp_min(1e-30)[:, None]
    return x


def test_rows_and_columns_are_balanced_and_signs_kept() -> None:
    scales = torch.logspace(-4, 1, 60)[:, None] * torch.logspace(-2, 1, 16)
    gradient = draw((60, 16), 1) * scales
    balanced = balance(gradient)
    torch.testing.assert_close(rms(balanced, 1), torch.ones(60), atol=1e-5, rtol=0)
    torch.testing.assert_close(rms(balanced, 0), torch.ones(16), atol=0.03, rtol=0)
    torch.testing.assert_close(balanced, plain_balance(gradient.double()).float(), atol=1e-4, rtol=1e-4)
    assert torch.equal(balanced.sign(), gradient.sign())


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e15])
def test_size_does_not_matter(scale: float) -> None:
    gradient = draw((12, 6), 2)
    torch.testing.assert_close(balance(gradient * scale), balance(gradient), atol=1e-4, rtol=1e-4)


def test_zero_rows_and_columns_stay_zero() -> None:
    gradient = draw((6, 5), 3)
    gradient[2] = 0
    gradient[:, 4] = 0
    balanced = balance(gradient)
    assert bool(balanced.isfinite().all())
    assert not balanced[2].any() and not balanced[:, 4].any()
    assert not balance(torch.zeros(3, 4)).any()


def test_steps_equal_a_plain_implementation() -> None:
    table, optimiser = build()
    weight, momentum = table.detach().double(), torch.zeros(40, 8, dtype=torch.float64)
    for seed, factor in ((2, 1.0), (3, 0.5)):
        gradient = draw((40, 8), seed)
        table.grad = gradient.clone()
        optimiser.step(factor)
        momentum = MU * momentum + (1 - MU) * gradient.double()
        weight = weight - factor * LR * 0.2 * plain_balance(MU * momentum + (1 - MU) * gradient.double())
        torch.testing.assert_close(table.detach().double(), weight, atol=1e-5, rtol=1e-5)
        assert torch.equal(table.grad, gradient), "the gradient is read only"


def test_only_touched_rows_move_and_all_by_the_same() -> None:
    table, optimiser = build()
    touched = [3, 7, 20]
    for seed in (2, 3):
        before, momentum = table.detach().clone(), optimiser.state()["t.weight.momentum"].clone()
        table.grad = torch.zeros(40, 8)
        table.grad[touched] = draw((3, 8), seed) * torch.tensor([[1e-4], [1.0], [100.0]])
        optimiser.step(1.0)
        moved = rms(table.detach() - before, 1)
        torch.testing.assert_close(moved[touched], torch.full((3,), LR * UPDATE_RMS), rtol=1e-4, atol=0)
        touched = [0, 1, 39]  # next: others, though the first have momentum
        assert int((moved > 0).sum()) == 3
        assert int((optimiser.state()["t.weight.momentum"] != momentum).any(1).sum()) == 3


def test_sparse_uncoalesced_equals_dense() -> None:
    (dense, dense_optimiser), (table, optimiser) = build(), build()
    for seed in (2, 3, 4):
        rows = torch.randint(0, 40, (25,), generator=torch.Generator().manual_seed(seed)).tolist()
        gradient = sparse(rows, draw((25, 8), seed), (40, 8))
        assert len(set(rows)) < len(rows) and not gradient.is_coalesced()
        table.grad, dense.grad = gradient, gradient.to_dense()
        optimiser.step(1.0)
        dense_optimiser.step(1.0)
        torch.testing.assert_close(table, dense, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimiser.state(), dense_optimiser.state(), rtol=1e-5, atol=1e-7)


def test_touched_rows_drops_rows_that_cancel() -> None:
    values = draw((3, 8), 1)
    gradient = sparse([5, 2, 5], torch.stack([values[0], values[1], -values[0]]), (9, 8))
    rows, found = touched_rows(gradient)
    assert rows.tolist() == [2]
    assert torch.equal(found, values[1:2])


def test_no_rows_no_step() -> None:
    table, optimiser = build()
    before = table.detach().clone()
    for gradient in (None, torch.zeros(40, 8), sparse([], torch.empty(0, 8), (40, 8))):
        table.grad = gradient
        optimiser.step(1.0)
    assert torch.equal(table, before)


class LargeResults(TorchDispatchMode):
    """Names of the operations that return or change a dense tensor of at least so many elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor) and not one.is_sparse and one.numel() >= self.elements:
                self.names.add(func.overloadpacket.__name__)
        return result


def test_a_sparse_step_touches_the_table_by_index_only() -> None:
    table, optimiser = build(rows=5000, width=4)
    table.grad = sparse([1, 4999, 1], draw((3, 4), 1), (5000, 4))
    with LargeResults(5000) as large:
        optimiser.step(1.0)
    assert large.names == {"index_copy_", "index_add_"}
