"""All optimisers behind one object: every group moves as its recipe says, state survives to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rorqual.errors import CheckpointError, ConfigError
from rorqual.training.optim import Optimizers, clip_gradients, factor
from rorqual.training.recipe import OptimRecipe

RECIPE = OptimRecipe(warmup=0.3, decay_from=0.6)
STEPS = 6
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (30, 16),
    "head.weight": (30, 16),
    "norm.weight": (16,),
    "layers.0.hc_attn_fn": (8, 32),
    "layers.0.attn.attn_sink": (4,),
    "layers.0.attn.wq_b.weight": (32, 12),
    "layers.0.attn.wkv.weight": (8, 16),
    "layers.0.ffn.experts.0.w1.weight": (12, 16),
    "layers.0.ffn.experts.1.w1.weight": (12, 16),
    "layers.0.ffn.gate.weight": (2, 16),
    "layers.0.ffn.gate.bias": (2,),
    "layers.0.engram.embed.weight": (50, 8),
}
HEADS = {"layers.0.attn.wq_b.weight": 4}
EXPERT = "layers.0.ffn.experts.1.w1.weight"


def build(muon: str = "batched", recipe: OptimRecipe = RECIPE) -> tuple[dict[str, nn.Parameter], Optimizers]:
    generator = torch.Generator().manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    parameters["layers.0.ffn.gate.bias"].requires_grad_(False)
    return parameters, Optimizers(parameters, recipe, HEADS, muon=muon)


def gradient(name: str, step: int) -> Tensor | None:
    """Of a step: sparse for the Engram table, missing for an expert in the odd ones."""
    generator = torch.Generator().manual_seed(100 * step + sorted(SHAPES).index(name))
    values = torch.randn(SHAPES[name], generator=generator)
    if name == EXPERT and step % 2:
        return None
    if "engram" in name:
        rows = torch.randint(0, 50, (1, 20), generator=generator)
        return torch.sparse_coo_tensor(rows, values[:20], SHAPES[name], check_invariants=True)
    return values


def train(parameters: dict[str, nn.Parameter], optimisers: Optimizers, steps: range) -> None:
    for step in steps:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.grad = gradient(name, step)
        clip_gradients(parameters, RECIPE.clip)
        optimisers.step(factor(step, STEPS, RECIPE))
        optimisers.zero_grad()


@pytest.mark.parametrize("muon", ["batched", "torch"])
def test_six_steps_are_three_saved_and_three_more(muon: str) -> None:
    through, all_at_once = build(muon)
    train(through, all_at_once, range(STEPS))

    first, optimisers = build(muon)
    train(first, optimisers, range(3))
    saved = {name: tensor.clone() for name, tensor in optimisers.state_dict().items()}
    second, resumed = build(muon)
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(first[name])
    resumed.load_state_dict(saved)
    train(second, resumed, range(3, STEPS))

    for name in SHAPES:
        assert torch.equal(second[name], through[name]), name
    again = resumed.state_dict()
    for name, tensor in all_at_once.state_dict().items():
        assert torch.equal(again[name], tensor), name


def test_steps_are_in_place_and_leave_no_graph() -> None:
    parameters, optimisers = build()
    places = {name: (id(p), p.data_ptr()) for name, p in parameters.items()}
    start = {name: p.detach().clone() for name, p in parameters.items()}
    with torch.enable_grad():
        train(parameters, optimisers, range(3))
    for name, parameter in parameters.items():
        assert (id(parameter), parameter.data_ptr()) == places[name]
        assert parameter.is_leaf and parameter.grad_fn is None and parameter.grad is None
        assert torch.equal(parameter, start[name]) == (not parameter.requires_grad), name
    assert not any(tensor.requires_grad for tensor in optimisers.state_dict().values())


def test_works_under_no_grad_all_the_same() -> None:
    (a, with_grad), (b, without) = build(), build()
    train(a, with_grad, range(2))
    with torch.no_grad():
        train(b, without, range(2))
    for name in SHAPES:
        assert torch.equal(a[name], b[name]), name


def test_weight_decay_acts_on_matrices_alone() -> None:
    """Zero gradients: what decays shrinks by its own learning rate, the rest stays."""
    recipe = OptimRecipe(lr=0.1, lr_adam=0.2, lr_table=0.3, weight_decay=0.5)
    parameters, optimisers = build(recipe=recipe)
    start = {name: p.detach().clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimisers.step(0.5)
    shrink = {"muon": 1 - 0.05 * 0.5, "tables": 1.0, "decayed": 1 - 0.1 * 0.5, "plain": 1.0}
    for group, scale in shrink.items():
        names = getattr(optimisers.groups, group)
        assert names
        for name in names:
            torch.testing.assert_close(parameters[name].detach(), start[name] * scale)


def test_updates_are_of_one_scale() -> None:
    """RMS of a step over its learning rate: 0.2 for matrices and tables, so that one rate can serve all."""
    recipe = OptimRecipe(lr=0.01, lr_adam=0.01, lr_table=0.01, weight_decay=0.0)
    parameters, optimisers = build(recipe=recipe)
    start = {name: p.detach().clone() for name, p in parameters.items()}
    for name in (*optimisers.groups.muon, *optimisers.groups.tables):
        parameters[name].grad = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(7))
    optimisers.step(1.0)
    for name in (*optimisers.groups.muon, *optimisers.groups.tables):
        rms = float((parameters[name].detach() - start[name]).square().mean().sqrt())
        assert rms / 0.01 == pytest.approx(0.2, rel=0.25), name


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    parameters, optimisers = build()
    train(parameters, optimisers, range(1))
    saved = {name: tensor.clone() for name, tensor in optimisers.state_dict().items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    key = "layers.0.attn.wkv.weight.momentum"
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({name: t for name, t in zeros.items() if name != key}, "is missing"),
        ({**zeros, "other.momentum": torch.zeros(1)}, "other.momentum is unknown"),
        ({**zeros, key: torch.zeros(3, 3)}, r"must be torch.float32 \[8, 16\]"),
        ({**zeros, key: zeros[key].double()}, "must be torch.float32"),
    ]
    for state, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            optimisers.load_state_dict(state)
    for name, tensor in optimisers.state_dict().items():
        assert torch.equal(tensor, saved[name]), name


def test_heads_must_name_parameters() -> None:
    parameters, _ = build()
    with pytest.raises(ConfigError, match=r"heads: layers\.9\.attn\.wq_b\.weight is not a parameter"):
        Optimizers(parameters, RECIPE, {"layers.9.attn.wq_b.weight": 4})


def test_a_small_model_learns_and_the_kernels_learn_alike() -> None:
    """Least squares through a table, an expert and a head: the loss falls to a tenth with either kernel."""
    for muon in ("batched", "torch"):
        generator = torch.Generator().manual_seed(3)
        shapes = {"embed.weight": (20, 16), "w.weight": (24, 16), "head.weight": (5, 24), "bias": (5,)}
        parameters = {n: nn.Parameter(0.3 * torch.randn(s, generator=generator)) for n, s in shapes.items()}
        target = torch.randn(20, 5, generator=generator)
        recipe = OptimRecipe(lr=0.05, lr_adam=0.05, lr_table=0.05, weight_decay=0.0)
        optimisers = Optimizers(parameters, recipe, {}, muon=muon)
        losses = []
        for step in range(80):
            hidden = (parameters["embed.weight"] @ parameters["w.weight"].T).relu()
            loss = (hidden @ parameters["head.weight"].T + parameters["bias"] - target).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimisers.step(factor(step, 80, RECIPE))
            optimisers.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.1 * losses[0], (muon, losses[0], losses[-1])


def test_engrams_tables_have_a_rate_of_their_own() -> None:
    recipe = OptimRecipe(lr=0.01, lr_adam=0.01, lr_table=0.01, lr_engram=0.0025, weight_decay=0.0)
    parameters, optimizers = build(recipe=recipe)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = gradient(name, 0)
    optimizers.step(1.0)
    moved = {
        name: float((parameters[name].detach() - before[name]).square().mean(1).sqrt().max())
        for name in ("embed.weight", "layers.0.engram.embed.weight")
    }
    assert moved == pytest.approx({"embed.weight": 0.002, "layers.0.engram.embed.weight": 0.0005}, rel=1e-3)
