"""Gradient norms, sparse parts included, and clipping by them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from rorqual.training.optim import by_loss, clip_gradients


def gradients() -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Parameters with a dense, an uncoalesced sparse and no gradient; the same gradients dense."""
    generator = torch.Generator().manual_seed(1)
    parameters = {name: nn.Parameter(torch.zeros(6, 4)) for name in ("a", "t", "none")}
    parameters["a"].grad = torch.randn(6, 4, generator=generator)
    values = torch.randn(3, 4, generator=generator)
    parameters["t"].grad = torch.sparse_coo_tensor(torch.tensor([[2, 5, 2]]), values, (6, 4), check_invariants=True)
    return parameters, {name: p.grad.to_dense().clone() for name, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e6])
def test_norm_and_clipping_equal_those_of_the_dense_gradients(limit: float) -> None:
    parameters, dense = gradients()
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in dense.values()))
    norm = clip_gradients(parameters, limit)
    assert norm.finite and norm.value == pytest.approx(expected, rel=1e-6)
    scale = min(1.0, limit / expected) if limit else 1.0
    for name, gradient in dense.items():
        found = parameters[name].grad
        assert found is not None
        torch.testing.assert_close(found.to_dense(), gradient * scale)
    assert parameters["none"].grad is None


@pytest.mark.parametrize("name", ["a", "t"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_gradient_is_named_and_nothing_scaled(name: str, value: float) -> None:
    parameters, dense = gradients()
    other = "t" if name == "a" else "a"
    gradient = parameters[name].grad
    assert gradient is not None
    (gradient._values() if gradient.is_sparse else gradient)[0, 0] = value
    norm = clip_gradients(parameters, 0.1)
    assert not norm.finite and norm.broken == name and not math.isfinite(norm.value)
    untouched = parameters[other].grad
    assert untouched is not None
    torch.testing.assert_close(untouched.to_dense(), dense[other])


def test_no_gradients_no_norm() -> None:
    norm = clip_gradients({"a": nn.Parameter(torch.zeros(2))}, 1.0)
    assert norm.value == 0.0 and norm.finite


def test_each_loss_has_a_norm_of_its_own() -> None:
    names = ("embed.weight", "layers.1.attn.indexer.wk.weight", "mtp.0.attn.wq_b.weight", "layers.1.attn.wkv.weight")
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in names}
    parts = by_loss(parameters)
    assert {part: list(some) for part, some in parts.items()} == {
        "backbone": ["embed.weight", "layers.1.attn.wkv.weight"],
        "indexer": ["layers.1.attn.indexer.wk.weight"],
        "draft": ["mtp.0.attn.wq_b.weight"],
    }
    for parameter, size in zip(parameters.values(), (0.3, 2.0, 50.0, 0.4), strict=True):
        parameter.grad = torch.tensor([size, 0.0])
    norms = {part: clip_gradients(some, 1.0).value for part, some in parts.items()}
    assert norms == pytest.approx({"backbone": 0.5, "indexer": 2.0, "draft": 50.0})
    left = [float(parameter.grad[0]) for parameter in parameters.values() if parameter.grad is not None]
    assert left == pytest.approx([0.3, 1.0, 1.0, 0.4]), "a loud draft does not quieten the backbone"
