"""Muon's step against a plain implementation, and its two kernels against torch's own.

Newton-Schulz runs in bf16 (8 bits of mantissa: a relative rounding of 2^-9 per product) for five steps whose polynomial
has a slope of 3.4 at zero, so that early errors grow: over seeds and shapes the update differs from fp32's by 0.9 to
1.5 %, torch's kernel and ours alike. TOLERANCE lies just above; the smallest mistake tried below makes 22 %. The same
step in fp32 agrees to EXACT, so that nothing hides behind the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rorqual.errors import ConfigError
from rorqual.training.optim.muon import KERNELS, Muon

TOLERANCE = 0.02
EXACT = 1e-4
LR, MU, DECAY, STEPS = 0.02, 0.9, 0.5, 5
SHAPES = {"wide.weight": (24, 64), "tall.weight": (96, 32), "wq_b.weight": (4 * 16, 24)}
HEADS = {"wq_b.weight": 4}


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(kernel: str, lr: float = LR) -> tuple[dict[str, nn.Parameter], Muon]:
    parameters = {name: nn.Parameter(0.2 * draw(shape, 1)) for name, shape in SHAPES.items()}
    muon = Muon(parameters, HEADS, lr=lr, momentum=MU, weight_decay=DECAY, ns_steps=STEPS, kernel=kernel)
    return parameters, muon


def set_gradients(parameters: dict[str, nn.Parameter], seed: int) -> None:
    for name, parameter in parameters.items():
        parameter.grad = draw(SHAPES[name], seed)


def plain_newton_schulz(matrix: Tensor) -> Tensor:
    """fp32, one matrix, from the published coefficients; the smaller side's Gram matrix."""
    if matrix.shape[0] > matrix.shape[1]:
        return plain_newton_schulz(matrix.T).T
    x = matrix / matrix.norm()
    for _ in range(STEPS):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def plain_muon(weight: Tensor, gradients: list[Tensor], heads: int, nesterov: bool = True) -> Tensor:
    """The weight after a step a gradient, block by block."""
    blocks = []
    for head, block in enumerate(weight.chunk(heads)):
        momentum = torch.zeros_like(block)
        w = block.clone()
        for gradient in gradients:
            g = gradient.chunk(heads)[head]
            momentum = MU * momentum + (1 - MU) * g
            update = plain_newton_schulz(MU * momentum + (1 - MU) * g if nesterov else momentum)
            w = w - LR * DECAY * w - LR * 0.2 * math.sqrt(max(w.shape)) * update
        blocks.append(w)
    return torch.cat(blocks)


def distance(a: Tensor, b: Tensor, start: Tensor) -> float:
    """Of two moves from `start`, relative."""
    return float((a - b).norm() / (b - start).norm())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SHAPES)
def test_steps_equal_a_plain_implementation(kernel: str, name: str) -> None:
    parameters, muon = build(kernel)
    start = parameters[name].detach().clone()
    gradients: list[Tensor] = []
    for seed in (2, 3, 4):  # from the second on momentum matters
        set_gradients(parameters, seed)
        gradients.append(draw(SHAPES[name], seed))
        muon.step(1.0)
        expected = plain_muon(start, gradients, HEADS.get(name, 1))
        assert distance(parameters[name].detach(), expected, start) < TOLERANCE


def test_in_fp32_the_batched_step_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rorqual.training.optim.muon.work_dtype", lambda device: torch.float32)
    parameters, muon = build("batched")
    start = {name: p.detach().clone() for name, p in parameters.items()}
    for seed in (2, 3):
        set_gradients(parameters, seed)
        muon.step(1.0)
    for name, shape in SHAPES.items():
        expected = plain_muon(start[name], [draw(shape, 2), draw(shape, 3)], HEADS.get(name, 1))
        assert distance(parameters[name].detach(), expected, start[name]) < EXACT, name


@pytest.mark.parametrize(
    "mistake",
    [
        lambda w, g: plain_muon(w, g, 1),
        lambda w, g: plain_muon(w, g, 4, nesterov=False),
        lambda w, g: plain_muon(w, g[-1:], 4),
        lambda w, g: plain_muon(w, g, 4) + LR * DECAY * w,
    ],
    ids=["whole", "no nesterov", "one step", "less decay"],
)
def test_the_tolerance_tells_mistakes_apart(mistake: Callable[[Tensor, list[Tensor]], Tensor]) -> None:
    start = 0.2 * draw(SHAPES["wq_b.weight"], 1)
    gradients = [draw(SHAPES["wq_b.weight"], seed) for seed in (2, 3)]
    assert distance(mistake(start, gradients), plain_muon(start, gradients, 4), start) > 10 * TOLERANCE


def test_torch_kernel_is_torch_optim_muon_to_the_bit() -> None:
    parameters, muon = build("torch")
    blocks = {name: parameters[name].detach().clone().chunk(HEADS.get(name, 1)) for name in SHAPES}
    alone = {name: [nn.Parameter(block.clone()) for block in parts] for name, parts in blocks.items()}
    reference = torch.optim.Muon(
        [p for parts in alone.values() for p in parts],
        lr=LR,
        momentum=MU,
        weight_decay=DECAY,
        adjust_lr_fn="match_rms_adamw",
    )
    for seed in (2, 3):
        set_gradients(parameters, seed)
        for name, parts in alone.items():
            for part, gradient in zip(parts, draw(SHAPES[name], seed).chunk(len(parts)), strict=True):
                part.grad = gradient
        muon.step(1.0)
        reference.step()
    for name, parts in alone.items():
        assert torch.equal(parameters[name], torch.cat([p.detach() for p in parts])), name


def test_kernels_agree_and_share_their_momentum() -> None:
    start, (torch_p, torch_m), (batched_p, batched_m) = build("torch")[0], build("torch"), build("batched")
    for seed, factor in ((2, 0.5), (3, 1.0), (4, 0.1)):
        set_gradients(torch_p, seed)
        set_gradients(batched_p, seed)
        torch_m.step(factor)
        batched_m.step(factor)
    for name in SHAPES:
        assert distance(batched_p[name].detach(), torch_p[name].detach(), start[name].detach()) < TOLERANCE, name
        assert torch.equal(batched_m.state()[f"{name}.momentum"], torch_m.state()[f"{name}.momentum"]), name


def test_stacks_do_not_change_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix among others of its shape, tall and wide, cut into stacks of two."""
    monkeypatch.setattr("rorqual.training.optim.muon.STACK_ELEMENTS", 2 * 24 * 64)
    shapes = [(24, 64), (64, 24), (24, 64), (64, 24), (24, 64)]
    many = {f"{i}.weight": nn.Parameter(0.2 * draw(shape, i)) for i, shape in enumerate(shapes)}
    for i, parameter in enumerate(many.values()):
        parameter.grad = draw(shapes[i], 10 + i)
    start = {name: p.detach().clone() for name, p in many.items()}
    Muon(many, {}, lr=LR, momentum=MU, weight_decay=DECAY, ns_steps=STEPS).step(1.0)
    for i, (name, parameter) in enumerate(many.items()):
        expected = plain_muon(start[name], [draw(shapes[i], 10 + i)], 1)
        assert distance(parameter.detach(), expected, start[name]) < TOLERANCE, name


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_gradient_nothing_changes_and_others_move(kernel: str) -> None:
    parameters, muon = build(kernel)
    set_gradients(parameters, 2)
    muon.step(1.0)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    momentum = muon.state()["wide.weight.momentum"].clone()
    set_gradients(parameters, 3)
    parameters["wide.weight"].grad = None
    muon.step(1.0)
    assert torch.equal(parameters["wide.weight"], before["wide.weight"])
    assert torch.equal(muon.state()["wide.weight.momentum"], momentum)
    assert not torch.equal(parameters["tall.weight"], before["tall.weight"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_zero_gradient_only_decays(kernel: str) -> None:
    parameters, muon = build(kernel)
    start = parameters["wide.weight"].detach().clone()
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    muon.step(1.0)
    assert torch.equal(parameters["wide.weight"], start * (1 - LR * DECAY))


def test_bad_heads_and_kernels_are_refused() -> None:
    parameters = {"wq_b.weight": nn.Parameter(draw((10, 4), 1))}
    with pytest.raises(ConfigError, match=r"wq_b\.weight: 10 rows are not 4 heads"):
        Muon(parameters, {"wq_b.weight": 4}, lr=LR, momentum=MU, weight_decay=0.0, ns_steps=5)
    with pytest.raises(ConfigError, match="must be one of batched, torch"):
        Muon(parameters, {}, lr=LR, momentum=MU, weight_decay=0.0, ns_steps=5, kernel="fast")
