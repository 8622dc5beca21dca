"""Training twins: the plain ops' values and gradients, bits that no thread count changes, formats to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.formats import codec
from rorqual.formats.spec import BF16, E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, NumberFormat
from rorqual.formats.weights import DenseWeight, quantize_weight
from rorqual.ops.dispatch import Ops, reference_ops
from rorqual.ops.fast import train_codec, train_ops, train_rows
from rorqual.ops.reference import rope, topk
from rorqual.ops.reference.hyper import Coefficients

EPS = 1e-6
FORMATS = (E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32)
OPS = train_ops.training_ops()
PLAIN = reference_ops()


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _gradients(function: Callable[..., object], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and the gradients of a fixed random projection of all of them."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    found = function(*leaves)
    outputs = [found] if isinstance(found, Tensor) else list(found)  # type: ignore[call-overload]
    seeds = [_random(*output.shape, seed=90 + i).to(output.dtype) for i, output in enumerate(outputs)]
    return outputs, list(torch.autograd.grad(outputs, leaves, seeds, allow_unused=True))


def _assert_agree(
    fast: Callable[..., object], plain: Callable[..., object], inputs: Sequence[Tensor], tolerance: float = 1e-4
) -> None:
    """The plain function's own gradients, of fp32 inputs; errors are relative to the largest element."""
    for found, wanted, bound in zip(
        _gradients(fast, inputs), _gradients(plain, inputs), (1e-5, tolerance), strict=True
    ):
        assert len(found) == len(wanted)
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            if a is None or b is None:
                assert a is None and (b is None or not b.any()), f"tensor {i}"
                continue
            assert a.shape == b.shape and a.dtype == b.dtype, f"tensor {i}"
            a, b = a.detach(), b.detach()
            scale = float(b.abs().max()) if b.numel() else 0.0
            assert not b.numel() or float((a - b).abs().max()) <= bound * scale + 1e-9, f"tensor {i}"


def _mix_inputs(t: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mixes = (2 + n) * n
    fn = _random(mixes, n * d, seed=1) / (n * d) ** 0.5
    return _random(t, n, d) * 3, fn, torch.tensor([0.9, 1.1, 2.0]), _random(mixes, seed=2)


def _mix_of(ops: Ops, iters: int) -> Callable[..., Coefficients]:
    return lambda *inputs: ops.hyper_mix(*inputs, 1e-20, EPS, iters, 0)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("t", [0, 1, 3, 70])
def test_hyper_connections(t: int, n: int) -> None:
    d = 33
    for iters in (1, 2, 20):
        _assert_agree(_mix_of(OPS, iters), _mix_of(PLAIN, iters), _mix_inputs(t, n, d))
    streams, pre = _random(t, n, d), _random(t, n, seed=3)
    _assert_agree(OPS.hyper_collapse, PLAIN.hyper_collapse, (streams, pre))
    out, comb = _random(t, d, seed=4), _random(t, n, n, seed=5)
    _assert_agree(OPS.hyper_expand, PLAIN.hyper_expand, (out, streams, pre, comb))
    assert torch.equal(OPS.hyper_expand(out, streams, pre, comb), PLAIN.hyper_expand(out, streams, pre, comb))


def test_sinkhorn_gradient_against_fp64() -> None:
    """Twenty iterations of saturated logits, where an approximate backward pass would show."""
    streams, fn, scale, base = _mix_inputs(40, 4, 16)
    scale = scale * 3

    def in_fp64(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = streams.flatten(1)
        mixes = flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        pre, post, comb = (
            part * factor + shift
            for part, factor, shift in zip(mixes.split([4, 4, 16], 1), scale, base.split([4, 4, 16]), strict=True)
        )
        comb = torch.softmax(comb.reshape(-1, 4, 4), -1) + EPS
        comb = comb / (comb.sum(1, keepdim=True) + EPS)
        for _ in range(19):
            comb = comb / (comb.sum(2, keepdim=True) + EPS)
            comb = comb / (comb.sum(1, keepdim=True) + EPS)
        return torch.sigmoid(pre) + EPS, 2 * torch.sigmoid(post), comb

    inputs = (streams, fn, scale, base)
    outputs, grads = _gradients(lambda *x: OPS.hyper_mix(*x, EPS, EPS, 20, 0), inputs)
    wanted_outputs, wanted_grads = _gradients(in_fp64, [tensor.double() for tensor in inputs])
    for found, wanted in zip([*outputs, *grads], [*wanted_outputs, *wanted_grads], strict=True):
        assert found is not None and wanted is not None
        assert (found.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_frozen_inputs_get_no_gradient() -> None:
    streams, fn, scale, base = _mix_inputs(5, 2, 8)
    base.requires_grad_()
    pre, _, _ = OPS.hyper_mix(streams, fn, scale, base, EPS, EPS, 3, 0)
    pre.sum().backward()
    assert base.grad is not None and base.grad[:2].abs().min() > 0 and not base.grad[2:].any()


@pytest.mark.parametrize("shape", [(0, 33), (1, 5), (3, 64), (130, 33), (4, 3, 16)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    inputs = _random(*shape), _random(shape[-1], seed=1)
    _assert_agree(lambda *x: OPS.rms_norm(*x, EPS, False), lambda *x: PLAIN.rms_norm(*x, EPS, False), inputs)


def test_rms_norm_keeps_the_dtype() -> None:
    x, weight = _random(4, 16).bfloat16(), _random(16, seed=1)
    assert OPS.rms_norm(x, weight, EPS, False).dtype == torch.bfloat16
    assert torch.allclose(OPS.rms_norm(x, weight, EPS, False), PLAIN.rms_norm(x, weight, EPS, False), rtol=1e-2)


def test_linear() -> None:
    weights = [_random(7, 12, seed=i) for i in range(3)]
    for ops in (OPS, PLAIN):
        assert ops.linear(_random(5, 12).bfloat16(), DenseWeight(weights[0]), 0, False).dtype == torch.float32
    for dense in ([DenseWeight(weight.bfloat16()) for weight in weights], [quantize_weight(w, "fp8") for w in weights]):
        _assert_agree(
            lambda x, dense=dense: OPS.grouped_linear(x, dense, 0),
            lambda x, dense=dense: PLAIN.grouped_linear(x, dense, 0),
            [_random(5, 3, 12)],
        )
    _assert_agree(
        lambda x, *w: OPS.grouped_linear(x, [DenseWeight(weight) for weight in w], 0),
        lambda x, *w: PLAIN.grouped_linear(x, [DenseWeight(weight) for weight in w], 0),
        [_random(5, 3, 12), *weights],
    )


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(0, 2, 12), (3, 12), (70, 3, 12), (5, 2, 2, 12)])
def test_rotation(shape: tuple[int, ...], inverse: bool) -> None:
    turn = _random(shape[0], 4, seed=1), _random(shape[0], 4, seed=2)
    _assert_agree(
        lambda x: train_rows.rotate(x, turn, inverse=inverse),
        lambda x: rope.rotate(x, turn, inverse=inverse),
        [_random(*shape)],
    )


@dataclass(frozen=True)
class _Layer:
    """Experts' inputs as one flat list of tensors, so that gradients can be asked of all."""

    index_Tk: Tensor
    experts: int
    limit: float

    def call(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, routing: Tensor, *weights: Tensor) -> Tensor:
            dense = [DenseWeight(weight) for weight in weights]
            j = self.experts
            return function(
                x, self.index_Tk, routing, dense[:j], dense[j : 2 * j], dense[2 * j :], self.limit, 0, False
            )

        return run


def _expert_inputs(t: int, k: int, experts: int, width: int, inner: int, unused: int) -> tuple[Tensor, list[Tensor]]:
    scores = _random(t, experts, seed=1)
    scores[:, experts - unused :] = -torch.inf
    shapes = [(inner, width)] * experts + [(width, inner)] * experts + [(inner, width)] * experts
    weights = [_random(*shape, seed=10 + i) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]
    return scores.topk(k)[1], [_random(t, width) * 2, _random(t, k, seed=2).sigmoid(), *weights]


@pytest.mark.parametrize("limit", [0.0, 0.7])
@pytest.mark.parametrize(("t", "k", "experts", "unused"), [(1, 1, 3, 0), (3, 2, 5, 2), (150, 3, 6, 2)])
def test_experts(t: int, k: int, experts: int, unused: int, limit: float) -> None:
    index, inputs = _expert_inputs(t, k, experts, 21, 19, unused)
    layer = _Layer(index, experts, limit)
    _assert_agree(layer.call(OPS.experts), layer.call(PLAIN.experts), inputs)


def test_experts_of_no_rows() -> None:
    index, inputs = _expert_inputs(0, 2, 3, 8, 6, 0)
    outputs, grads = _gradients(_Layer(index, 3, 0.0).call(OPS.experts), inputs)
    assert outputs[0].shape == (0, 8)
    assert [grad is None for grad in grads] == [False, False, *[True] * 9]


def test_an_expert_chosen_twice_counts_twice() -> None:
    _, inputs = _expert_inputs(4, 2, 3, 8, 8, 0)
    layer = _Layer(torch.tensor([[1, 1], [0, 1], [2, 2], [1, 0]]), 3, 0.0)
    _assert_agree(layer.call(OPS.experts), layer.call(PLAIN.experts), inputs)


def test_experts_of_wide_activations_saturate() -> None:
    index, inputs = _expert_inputs(3, 2, 3, 8, 8, 0)
    layer = _Layer(index, 3, 0.0)
    _assert_agree(layer.call(OPS.experts), layer.call(PLAIN.experts), [inputs[0] * 300, *inputs[1:]])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_fake_quantize_has_the_bits_of_the_codec(fmt: NumberFormat) -> None:
    patterns = torch.randint(-(2**31), 2**31, (200, 64), generator=torch.Generator().manual_seed(0))
    anything = patterns.to(torch.int32).view(torch.float32)
    grids = torch.arange(-4096, 4096).view(-1, 64) / 64
    for x in (
        _random(65, 96),
        anything.where(anything.isfinite(), 0.0),
        _random(200, 64) * torch.logspace(-44, 38, 200)[:, None],
        grids,
        torch.zeros(2, 3, 32),
        -torch.zeros(1, 32),
        torch.zeros(0, 32),
        _random(32),
        _random(3, 64).bfloat16(),
        _random(64, 5).T,
    ):
        if x.shape[-1] % fmt.group:
            continue
        found, wanted = train_codec.fake_quantize(x, fmt), codec.fake_quantize(x, fmt)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert torch.equal(_bits(found), _bits(wanted))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def test_fake_quantize_passes_gradients_and_other_formats() -> None:
    for fmt in (*FORMATS, BF16):
        x = (_random(3, 32) * 5).requires_grad_()
        grad = _random(3, 32, seed=1)
        train_codec.fake_quantize(x, fmt).backward(grad)
        assert x.grad is not None and torch.equal(x.grad, grad)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_fake_weight_has_the_bits_of_the_checkpoint(kind: str) -> None:
    for w in (
        _random(65, 96),
        _random(1, 32),
        _random(33, 64) * 1e-40,
        _random(65, 64) * torch.logspace(-44, 38, 65)[:, None],
        torch.zeros(3, 32),
        _random(40, 64).bfloat16(),
        *((_random(33, 45),) if kind == "fp8" else ()),
    ):
        found, wanted = train_codec.fake_quantize_weight(w, kind), quantize_weight(w, kind).expand(w.dtype)  # type: ignore[arg-type]
        assert torch.equal(_bits(found), _bits(wanted))
    w = _random(33, 64).requires_grad_()
    train_codec.fake_quantize_weight(w, kind).backward(torch.ones(33, 64))  # type: ignore[arg-type]
    assert w.grad is not None and torch.equal(w.grad, torch.ones(33, 64))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_cannot_be_quantised_is_refused(bad: float) -> None:
    x = _random(70, 32)
    x[66, 5] = bad
    for fmt in FORMATS:
        with pytest.raises(FormatError, match="66, 5"):
            train_codec.fake_quantize(x, fmt)
    for kind in ("fp8", "fp4"):
        with pytest.raises(FormatError, match="66, 5"):
            train_codec.fake_quantize_weight(x, kind)
    with pytest.raises(FormatError, match="width 33"):
        train_codec.fake_quantize(_random(2, 33), E4M3_E8M0_32)
    with pytest.raises(FormatError, match="fp5"):
        train_codec.fake_quantize_weight(_random(2, 32), "fp5")  # type: ignore[arg-type]


def test_the_facade_changes_only_what_it_names() -> None:
    changed = {field.name for field in fields(OPS) if getattr(OPS, field.name) is not getattr(PLAIN, field.name)}
    kept = {"gather_rows", "index_scores", "index_scores_at", "pool_groups", "sparse_attention", "regions"}
    assert changed == {field.name for field in fields(OPS)} - kept
    scores = _random(3, 40)
    assert torch.equal(OPS.topk_lowest(scores, 7), topk.topk_lowest(scores, 7))
    for native in (OPS.rms_norm, lambda x, w, eps, native: OPS.experts(x, None, None, [], [], [], eps, 0, native)):
        with pytest.raises(AssertionError, match="native"):
            native(_random(1, 4), _random(4), EPS, True)


DIGEST = """
import hashlib, torch
from rorqual.formats.weights import DenseWeight
from rorqual.ops.fast.train_ops import training_ops
ops, digest = training_ops(), hashlib.sha256()
make = torch.Generator().manual_seed(0)
random = lambda *shape: torch.randn(*shape, generator=make).requires_grad_()
def add(outputs, inputs):
    seeds = [torch.randn(output.shape, generator=make) for output in outputs]
    for tensor in (*outputs, *torch.autograd.grad(outputs, inputs, seeds)):
        digest.update(tensor.detach().numpy().tobytes())
x = random(300, 4, 16), random(24, 64), random(3), random(24)
add(ops.hyper_mix(*x, 1e-6, 1e-6, 5, 0), x)
x = random(300, 16), random(300, 4, 16), random(300, 4), random(300, 4, 4)
add([ops.hyper_expand(*x)], x)
x = random(300, 4, 16), random(300, 4)
add([ops.hyper_collapse(*x)], x)
x = random(300, 16), random(16)
add([ops.rms_norm(*x, 1e-6, False)], x)
weights = [random(16, 16) for _ in range(12)]
dense = [DenseWeight(weight) for weight in weights]
x, routing, index = random(300, 16), random(300, 2), torch.rand(300, 4, generator=make).topk(2)[1]
add([ops.experts(x, index, routing, dense[:4], dense[4:8], dense[8:], 1.0, 0, False)], [x, routing, *weights])
print(torch.get_num_threads(), digest.hexdigest())
"""


def test_no_thread_count_changes_a_bit() -> None:
    found = {}
    for threads in ("1", "2"):
        env = os.environ | {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        used, found[threads] = done.stdout.split()
        assert used == threads
    assert found["1"] == found["2"]
