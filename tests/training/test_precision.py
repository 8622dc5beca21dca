"""Products in bf16 where the device gains by it, and nowhere else."""

import pytest
import torch
from torch import nn

from rorqual.ops import cpu
from rorqual.ops.dispatch import reference_ops
from rorqual.training.learner import Phase, Totals
from rorqual.training.live import LiveWeight, Rounding, fake_quantize_weight
from rorqual.training.precision import gains_by_bf16, reduced_products, with_autocast
from tests.training.models import learner, packed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("features", "inside"), [(frozenset({"amx-bf16"}), "medium"), (frozenset(), "highest")])
def test_a_cpu_gains_by_its_tiles(monkeypatch: pytest.MonkeyPatch, features: frozenset[str], inside: str) -> None:
    monkeypatch.setattr(cpu, "features", lambda: features)
    assert gains_by_bf16(CPU) == (inside == "medium")
    before = torch.get_float32_matmul_precision()
    assert before == "highest"
    with pytest.raises(RuntimeError, match="stop"), reduced_products(CPU, "auto"):
        assert torch.get_float32_matmul_precision() == inside
        raise RuntimeError("stop")
    assert torch.get_float32_matmul_precision() == before


def test_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "features", lambda: frozenset({"amx-bf16"}))
    with reduced_products(CPU, "off"):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("gains", [True, False])
def test_autocast_is_for_quantised_weights(monkeypatch: pytest.MonkeyPatch, gains: bool) -> None:
    """What a GPU runs, with the CPU's autocast: those products alone are rounded, and what they give is fp32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: gains)
    ops, rounding = with_autocast(reference_ops()), Rounding(fake_quantize_weight)
    x, w = torch.randn(40, 64), nn.Parameter(torch.randn(32, 64))
    dense, quantised = (LiveWeight(w, "w", kind, rounding) for kind in (None, "fp8"))
    exact = x @ w.T
    assert torch.equal(ops.linear(x, quantised, 0, False), exact), "not while it is off"
    with reduced_products(CUDA, "auto"):
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.equal(ops.linear(x, dense, 0, False), exact)
        lowered = ops.linear(x, quantised, 0, False)
        (gradient,) = torch.autograd.grad(lowered.sum(), w)
        several = ops.grouped_linear(x[:, None], [quantised], 0)
    if not gains:
        assert torch.equal(lowered, exact)
        return
    expected = (x.bfloat16() @ w.bfloat16().T).float()
    assert lowered.dtype == torch.float32 and torch.equal(lowered, expected) and not torch.equal(lowered, exact)
    assert torch.equal(several[:, 0], expected)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, x.sum(0).expand(32, 64), atol=0.2, rtol=0.02)


def test_a_learner_learns_the_same_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    made = learner(3, anchors=0.2, indexer_rows=0.5)
    batch, phase = [packed([70, 20], 1)], Phase(quantise_weights=True)
    totals = Totals(tokens=batch[0].trained, sequences=1)
    exact = made.loss(batch, phase, totals)
    made.ops = with_autocast(made.ops)
    with reduced_products(CUDA, "auto"):
        found = made.loss(batch, phase, totals)
        found.total.backward()
    assert found.parts.keys() == exact.parts.keys() and found.total.dtype == torch.float32
    assert found.parts["loss"] == pytest.approx(exact.parts["loss"], abs=0.02)
    assert found.parts["loss"] != exact.parts["loss"]
    assert all(bool(p.grad.to_dense().isfinite().all()) for p in made.parameters.values() if p.grad is not None)
