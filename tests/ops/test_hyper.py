"""Hyper-connections: the release's Sinkhorn, both twins against fp64, and tokens whose bits are their own."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rorqual.ops.fast import hyper as fast
from rorqual.ops.fast import linear as fast_linear
from rorqual.ops.reference import hyper as plain

TWINS = [pytest.param(plain, id="plain"), pytest.param(fast, id="fast")]
CASES = [f"case{i}" for i in range(10)]
EPS = 1e-6


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _mix_inputs(t: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mixes = (2 + n) * n
    fn = _random(mixes, n * d, seed=1) / (n * d) ** 0.5
    return _random(t, n, d) * 5, fn, torch.tensor([0.9, 1.1, 2.0]), _random(mixes, seed=2)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("case", CASES)
def test_sinkhorn_of_the_release(twin: ModuleType, case: str, goldens: Path) -> None:
    tensors = load_file(goldens / "sinkhorn" / "expected.safetensors")
    described = json.loads((goldens / "sinkhorn" / "README.json").read_text())["cases"]
    (settings,) = (entry for entry in described if entry["name"] == case)
    assert len(described) == len(CASES)
    mixes, scale, base = (tensors[f"{case}.{name}"] for name in ("mixes", "scale", "base"))
    for short_rows in (0, 8):
        found = twin.split_mixes(mixes, scale, base, settings["eps"], settings["iters"], short_rows)
        for name, tensor in zip(("pre", "post", "comb"), found, strict=True):
            expected = tensors[f"{case}.{name}"]
            assert tensor.shape == expected.shape
            assert (tensor - expected).abs().max() <= 1e-6, name


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("short_rows", [0, 3, 99])
def test_mix_value(twin: ModuleType, n: int, short_rows: int) -> None:
    for t in (1, 9, fast_linear.GEMM_ROWS + 5):
        streams, fn, scale, base = _mix_inputs(t, n, 40)
        found = twin.hyper_mix(streams, fn, scale, base, 1e-20, EPS, 20, short_rows)
        flat = streams.double().flatten(1)
        mixes = flat @ fn.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
        for a, b in zip(found, _sinkhorn_in_fp64(mixes, scale, base, n, 20), strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def _sinkhorn_in_fp64(mixes: Tensor, scale: Tensor, base: Tensor, n: int, iters: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = zip(mixes.T.tensor_split([n, 2 * n]), base.double().tensor_split([n, 2 * n]), scale, strict=True)
    pre, post, comb = ((part * factor + shift[:, None]).T for part, shift, factor in parts)
    pre, post = torch.sigmoid(pre) + EPS, 2 * torch.sigmoid(post)
    comb = torch.softmax(comb.reshape(-1, n, n), dim=-1) + EPS
    comb = comb / (comb.sum(1, keepdim=True) + EPS)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + EPS)
        comb = comb / (comb.sum(1, keepdim=True) + EPS)
    return pre, post, comb


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(("n", "d"), [(4, 64), (4, 1300), (2, 40)])
def test_a_token_has_the_same_bits_in_any_company(
    twin: ModuleType, n: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, fn, scale, base = _mix_inputs(32 + fast_linear.GEMM_ROWS, n, d)
    out = _random(streams.shape[0], d, seed=3)

    def step(tokens: slice | Tensor, short_rows: int) -> list[Tensor]:
        pre, post, comb = twin.hyper_mix(streams[tokens], fn, scale, base, 1e-20, EPS, 20, short_rows)
        expanded = twin.hyper_expand(out[tokens], streams[tokens], post, comb)
        return [pre, post, comb, twin.hyper_collapse(streams[tokens], pre), expanded]

    alone = [torch.cat(parts) for parts in zip(*(step(slice(t, t + 1), 1) for t in range(32)), strict=True)]

    def same(found: list[Tensor], tokens: slice | Tensor, count: int) -> bool:
        return all(torch.equal(a[:count], b[tokens]) for a, b in zip(found, alone, strict=True))

    for t in range(1, 33):
        assert same(step(slice(0, t), t), slice(0, t), t), t
    order = torch.randperm(32, generator=torch.Generator().manual_seed(4))
    assert same(step(order, 32), order, 32)
    assert same(step(slice(0, None), 32), slice(0, 32), 32)
    for module in (fast, fast_linear):
        monkeypatch.setattr(module, "parts_of", lambda products: 3)
    assert same(step(slice(0, 32), 32), slice(0, 32), 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 4])
def test_collapse_and_expand(dtype: torch.dtype, n: int) -> None:
    streams, out = _random(11, n, 70).to(dtype), _random(11, 70, seed=1).to(dtype)
    pre, post, comb = _random(11, n, seed=2), _random(11, n, seed=3), _random(11, n, n, seed=4)
    collapsed, expanded = plain.hyper_collapse(streams, pre), plain.hyper_expand(out, streams, post, comb)
    assert collapsed.dtype == expanded.dtype == torch.float32
    exact = torch.einsum("tnd,tn->td", streams.double(), pre.double())
    torch.testing.assert_close(collapsed.double(), exact, rtol=1e-5, atol=1e-5)
    exact = post.double()[:, :, None] * out.double()[:, None] + torch.einsum(
        "tjd,tjk->tkd", streams.double(), comb.double()
    )
    torch.testing.assert_close(expanded.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(fast.hyper_collapse(streams, pre), collapsed)
    assert torch.equal(fast.hyper_expand(out, streams, post, comb), expanded)


@pytest.mark.parametrize("twin", TWINS)
def test_no_tokens(twin: ModuleType) -> None:
    streams, fn, scale, base = _mix_inputs(0, 4, 32)
    pre, post, comb = twin.hyper_mix(streams, fn, scale, base, 1e-20, EPS, 20, 0)
    assert comb.shape == (0, 4, 4) and twin.hyper_collapse(streams, pre).shape == (0, 32)
    assert twin.hyper_expand(torch.empty(0, 32), streams, post, comb).shape == (0, 4, 32)


def test_bf16_streams_are_taken_exactly() -> None:
    streams, fn, scale, base = _mix_inputs(6, 4, 32)
    half = streams.to(torch.bfloat16)
    for twin in (plain, fast):
        found = twin.hyper_mix(half, fn, scale, base, 1e-20, EPS, 20, 6)
        expected = twin.hyper_mix(half.float(), fn, scale, base, 1e-20, EPS, 20, 6)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_mixes_must_belong_to_some_number_of_copies() -> None:
    assert [plain.copies_of((2 + n) * n) for n in (1, 2, 3, 4, 8)] == [1, 2, 3, 4, 8]
    with pytest.raises(AssertionError, match="23 mixes"):
        plain.copies_of(23)


def test_gradients() -> None:
    inputs = [x.double().requires_grad_() for x in (_random(3, 24), torch.tensor([0.9, 1.1, 2.0]), _random(24, seed=2))]
    assert torch.autograd.gradcheck(lambda x, y, z: plain.split_mixes(x, y, z, EPS, 5, 1), inputs)
    streams, fn, scale, base = (x.requires_grad_() for x in _mix_inputs(5, 2, 6))

    def loss(twin_mixes: Tensor) -> Tensor:
        pre, post, comb = plain.split_mixes(twin_mixes, scale, base, EPS, 3)
        collapsed = plain.hyper_collapse(streams, pre)
        return plain.hyper_expand(collapsed, streams, post, comb).square().sum()

    flat = streams.flatten(1)
    mixes = flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
    expected = torch.autograd.grad(loss(mixes), (streams, fn, scale, base))
    pre, post, comb = plain.hyper_mix(streams, fn, scale, base, 1e-20, EPS, 3, 2)
    value = plain.hyper_expand(plain.hyper_collapse(streams, pre), streams, post, comb).square().sum()
    for a, b in zip(torch.autograd.grad(value, (streams, fn, scale, base)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    with pytest.raises(AssertionError, match="no gradient"):
        fast.hyper_mix(streams, fn, scale, base, 1e-20, EPS, 3, 2)
