"""Muon for weight matrices, head by head for queries.

One step of torch.optim.Muon on a matrix W [A, B] with gradient G and momentum M:

    M <- mu M + (1 - mu) G;  U = mu M + (1 - mu) G  (Nesterov);  O = Newton-Schulz(U)
    W <- (1 - lr decay) W - 0.2 lr sqrt(max(A, B)) O

O is nearly orthogonal, so that the factor (torch's "match_rms_adamw") makes the update's RMS about 0.2 lr whatever the
shape, as AdamW's is: one learning rate serves both.

A query weight [heads x head_dim, rank] is `heads` matrices [head_dim, rank], each orthogonalised alone: one loud head
does not set the step of the others.

Two kernels, chosen by name. "torch" is torch.optim.Muon itself over views of the parameters. "batched" is the same
arithmetic over stacks of matrices of one shape, because a mixture of experts is hundreds of small ones. One core
(AVX-512 with AMX), 384 matrices of 128 x 256 and 60 of 256 x 256, CPU seconds a step: torch 0.53, batched 0.27. A
second core does nothing for torch's loop.

A parameter without gradient (an expert that no token chose, a draft before drafts are trained) is left alone: no
movement, no decay, momentum kept, as torch's optimisers do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rorqual.errors import ConfigError

KERNELS = ("batched", "torch")

# B matrices of a stack, R <= C their sides (a tall matrix goes in transposed)

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Newton-Schulz's quintic: torch's defaults."""

NORM_FLOOR = 1e-7
"""Least Frobenius norm that is divided by: a zero gradient stays zero. torch's default."""

ADAMW_RMS = 0.2
"""RMS of an update over the learning rate."""

STACK_ELEMENTS = 1 << 20
"""At most so many elements in a stack (at least one matrix): 2 MB in bf16, which a core's cache holds. Larger stacks
are slower on CPU, 384 matrices of 128 x 256 at once by a factor of two."""


class _Matrix(NamedTuple):
    """One matrix of a parameter: the whole of it, or the block of a head. Views, all of one storage."""

    name: str
    rows: slice
    weight: Tensor
    momentum: Tensor


class Muon:
    """Muon over parameters by name; `heads` says which of them are stacks of head blocks, and of how many.

    lr, weight_decay: at factor 1. Momentum is of the parameter's shape and dtype.

    Raises:
        ConfigError: an unknown kernel; rows that the heads do not divide.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        heads: Mapping[str, int],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        ns_steps: int,
        kernel: str = "batched",
    ) -> None:
        if kernel not in KERNELS:
            raise ConfigError(f"Muon kernel is {kernel!r}, must be one of {', '.join(KERNELS)}")
        self.parameters = dict(parameters)
        self.lr, self.beta, self.weight_decay, self.ns_steps = lr, momentum, weight_decay, ns_steps
        self.momentum = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}
        self._places = {name: p.data_ptr() for name, p in self.parameters.items()}
        self._matrices = [m for name in self.parameters for m in self._blocks(name, heads.get(name, 1))]
        self._torch = self._reference() if kernel == "torch" and self._matrices else None
        self._shapes: dict[tuple[int, int, torch.device], list[_Matrix]] = {}
        for matrix in self._matrices:
            short, long = sorted(matrix.weight.shape)
            self._shapes.setdefault((short, long, matrix.weight.device), []).append(matrix)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update at factor x lr, in place, of the parameters that have a gradient."""
        for name, parameter in self.parameters.items():
            assert parameter.data_ptr() == self._places[name], f"{name} moved to another storage"
        if self._torch is not None:
            self._step_torch(self._torch, factor)
            return
        for (short, long, _), matrices in self._shapes.items():
            live = [m for m in matrices if self.parameters[m.name].grad is not None]
            size = max(1, STACK_ELEMENTS // (short * long))
            for at in range(0, len(live), size):
                self._step_stack(live[at : at + size], factor * self.lr)

    def state(self) -> dict[str, Tensor]:
        """The live buffers, by parameter name and what they hold."""
        return {f"{name}.momentum": buffer for name, buffer in self.momentum.items()}

    def _blocks(self, name: str, heads: int) -> Iterator[_Matrix]:
        weight, momentum = self.parameters[name].detach(), self.momentum[name]
        if heads < 1 or weight.shape[0] % heads:
            raise ConfigError(f"{name}: {weight.shape[0]} rows are not {heads} heads of equal size")
        size = weight.shape[0] // heads
        for head in range(heads):
            rows = slice(head * size, (head + 1) * size)
            yield _Matrix(name, rows, weight[rows], momentum[rows])

    def _gradient(self, matrix: _Matrix) -> Tensor:
        gradient = self.parameters[matrix.name].grad
        assert gradient is not None, matrix.name
        return gradient[matrix.rows]

    def _step_stack(self, matrices: Sequence[_Matrix], lr: float) -> None:
        """One update of matrices of one shape, tall and wide mixed."""
        first = matrices[0].weight
        short, long = sorted(first.shape)
        stack_BRC = torch.empty(len(matrices), short, long, dtype=work_dtype(first.device), device=first.device)
        for matrix, slot in zip(matrices, stack_BRC, strict=True):
            gradient = self._gradient(matrix)
            matrix.momentum.lerp_(gradient, 1 - self.beta)
            _lying(slot, matrix).copy_(gradient.lerp(matrix.momentum, self.beta))
        step = lr * adjustment(first.shape)
        for matrix, update in zip(matrices, newton_schulz(stack_BRC, self.ns_steps), strict=True):
            matrix.weight.mul_(1 - lr * self.weight_decay)
            matrix.weight.add_(_lying(update, matrix), alpha=-step)

    def _reference(self) -> torch.optim.Muon:
        """torch's Muon over the blocks, with our buffers as its state, so that both kernels save the same."""
        views = [nn.Parameter(matrix.weight) for matrix in self._matrices]
        muon = torch.optim.Muon(
            views,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.beta,
            nesterov=True,
            ns_coefficients=NS_COEFFICIENTS,
            eps=NORM_FLOOR,
            ns_steps=self.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        for view, matrix in zip(views, self._matrices, strict=True):
            muon.state[view]["momentum_buffer"] = matrix.momentum
        return muon

    def _step_torch(self, muon: torch.optim.Muon, factor: float) -> None:
        group = muon.param_groups[0]
        group["lr"] = factor * self.lr
        for view, matrix in zip(group["params"], self._matrices, strict=True):
            view.grad = None if self.parameters[matrix.name].grad is None else self._gradient(matrix)
        muon.step()
        muon.zero_grad(set_to_none=True)  # the views must not keep the gradients alive


def newton_schulz(stack_BRC: Tensor, steps: int) -> Tensor:
    """Singular values of each matrix pushed towards 1 (to about 0.7..1.2), as torch's Muon does. [B, R, C], R <= C."""
    a, b, c = NS_COEFFICIENTS
    norm = torch.linalg.vector_norm(stack_BRC, dim=(1, 2), keepdim=True)
    x_BRC: Tensor = stack_BRC / norm.clamp(min=NORM_FLOOR)
    for _ in range(steps):
        gram_BRR = torch.bmm(x_BRC, x_BRC.mT)
        poly_BRR = torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=b, alpha=c)
        x_BRC = torch.baddbmm(x_BRC, poly_BRR, x_BRC, beta=a)
    return x_BRC


def adjustment(shape: Sequence[int]) -> float:
    """What the learning rate is multiplied by for a matrix of this shape: torch's "match_rms_adamw"."""
    return ADAMW_RMS * math.sqrt(max(shape))


def work_dtype(device: torch.device) -> torch.dtype:
    """Of Newton-Schulz: bf16, as torch's; fp32 on a CPU whose bf16 products are emulated element by element."""
    fast = device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return torch.bfloat16 if fast else torch.float32


def _lying(slot_RC: Tensor, matrix: _Matrix) -> Tensor:
    """A slot of the stack seen in the matrix's own shape."""
    return slot_RC if slot_RC.shape == matrix.weight.shape else slot_RC.mT
