"""RMSNorm: both twins against fp64, and rows whose bits are their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rorqual.ops.fast import linear as fast_linear
from rorqual.ops.fast import norm as fast
from rorqual.ops.reference import norm as plain

Norm = Callable[[Tensor, Tensor, float, bool], Tensor]
TWINS = [pytest.param(plain.rms_norm, id="plain"), pytest.param(fast.rms_norm, id="fast")]


def _rows(t: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(t, k, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("norm", TWINS)
@pytest.mark.parametrize("width", [1, 2, 7, 16, 33, 64, 512, 1279])
def test_value(norm: Norm, width: int) -> None:
    x, weight = _rows(9, width), _rows(1, width, seed=1)[0]
    x[3] = 0.0
    for eps in (1e-20, 1e-6, 0.5):
        exact = weight * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
        y = norm(x, weight, eps, False)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), exact, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("norm", TWINS)
def test_dtypes_and_rounding(norm: Norm) -> None:
    x, weight = _rows(5, 96), _rows(1, 96, seed=1)[0].to(torch.bfloat16)
    exact = norm(x, weight, 1e-20, False)
    native = norm(x, weight, 1e-20, True)
    assert native.dtype == torch.float32 and torch.equal(native, exact.to(torch.bfloat16).float())
    half = norm(x.to(torch.bfloat16), weight, 1e-20, True)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.float(), norm(x.to(torch.bfloat16).float(), weight, 1e-20, True))


@pytest.mark.parametrize("norm", TWINS)
def test_any_leading_dimensions(norm: Norm) -> None:
    x, weight = _rows(12, 40), _rows(1, 40, seed=1)[0]
    flat = norm(x, weight, 1e-6, False)
    assert torch.equal(norm(x.view(3, 4, 40), weight, 1e-6, False), flat.view(3, 4, 40))
    assert torch.equal(norm(x[0], weight, 1e-6, False), flat[0])
    assert norm(x[:0], weight, 1e-6, False).shape == (0, 40)


@pytest.mark.parametrize("norm", TWINS)
@pytest.mark.parametrize("width", [48, 1280])
def test_a_row_has_the_same_bits_in_any_company(norm: Norm, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = _rows(600, width), _rows(1, width, seed=1)[0]
    alone = torch.cat([norm(x[t : t + 1].clone(), weight, 1e-20, False) for t in range(600)])
    for t in (2, 3, 8, 31, 32, 33, 600):
        assert torch.equal(norm(x[:t], weight, 1e-20, False), alone[:t]), t
    assert torch.equal(norm(x[5:40], weight, 1e-20, False), alone[5:40])
    for module in (fast, fast_linear):
        monkeypatch.setattr(module, "parts_of", lambda products: 7)
    assert torch.equal(norm(x, weight, 1e-20, False), alone)


def test_twins() -> None:
    x, weight = _rows(50, 333), _rows(1, 333, seed=1)[0]
    torch.testing.assert_close(
        fast.rms_norm(x, weight, 1e-20, False), plain.rms_norm(x, weight, 1e-20, False), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("width", [5, 512, 20_480, 40_000])
def test_a_row_is_summed_alike_alone_and_in_a_batch(width: int) -> None:
    """torch splits a lone row of 2^15 elements over threads; `row_sum` does not let it."""
    values = _rows(33, width)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = plain.row_sum(values)
        for rows in (1, 2, 7):
            assert torch.equal(plain.row_sum(values[:rows].clone()), together[:rows])
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(together, values.sum(-1), rtol=1e-5, atol=1e-3)


def test_gradients() -> None:
    x, weight = _rows(4, 21).requires_grad_(), _rows(1, 21, seed=1)[0].requires_grad_()
    upstream = _rows(4, 21, seed=2)
    got = torch.autograd.grad(plain.rms_norm(x, weight, 1e-6, False), (x, weight), upstream)
    expected = torch.autograd.grad(torch.nn.functional.rms_norm(x, (21,), weight, 1e-6), (x, weight), upstream)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError, match="no gradient"):
        fast.rms_norm(x, weight, 1e-6, False)
