"""Sinkhorn-balanced momentum for tables: embeddings, the head, Engram's and the Markov head's tables.

The report names the technique without its details; what follows is ours. A step on a table W [rows, width] with
gradient G, over the rows that G touches:

    M <- mu M + (1 - mu) G;  U = mu M + (1 - mu) G  (Nesterov)
    U <- columns, then rows, divided by their RMS, ITERATIONS times
    W <- W - 0.2 lr U

Balanced, every touched row moves equally far and no channel dominates: rare tokens learn as fast as common ones, which
is what a second moment gives AdamW, without its memory. Rows come last, so that a touched row's update has an RMS of
0.2 lr exactly: the scale of Muon's updates and of AdamW's. The size of the gradient does not matter, only its
direction.

Momentum is lazy. A row whose gradient is zero in a step neither moves nor forgets: were its momentum decayed, balancing
would blow the remainder up to full size, and a rare token would wander for hundreds of steps after it was last seen.
A sparse gradient and a dense one with zero rows therefore give the same step, and the cost of a sparse one grows with
the rows touched, not with the table. No weight decay: it would wear off rows that are merely rare.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

ITERATIONS = 3
"""Column and row passes: on random gradients the columns' RMS is within 6 % of 1 after one, 0.1 % after two."""

UPDATE_RMS = 0.2
"""RMS of a touched row's update over the learning rate."""

FLOOR = 1e-12
"""Least RMS that is divided by, beside a largest element of 1: a row or column of zeros stays zero."""

# T touched rows, D width


class SinkhornMomentum:
    """Sinkhorn-balanced momentum over tables by name; gradients dense or sparse (COO, coalesced or not).

    lr: at factor 1. Momentum is fp32 of the table's shape.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, lr: float, momentum: float) -> None:
        self.parameters = dict(parameters)
        self.lr, self.beta = lr, momentum
        self.momentum = {
            name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update at factor x lr, in place; a table without gradient is left alone."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self._update(parameter, parameter.grad, self.momentum[name], factor * self.lr)

    def state(self) -> dict[str, Tensor]:
        """The live buffers, by parameter name and what they hold."""
        return {f"{name}.momentum": buffer for name, buffer in self.momentum.items()}

    def _update(self, parameter: nn.Parameter, gradient: Tensor, momentum: Tensor, lr: float) -> None:
        rows_T, g_TD = touched_rows(gradient)
        if not len(rows_T):
            return
        m_TD = momentum.index_select(0, rows_T).lerp_(g_TD, 1 - self.beta)
        momentum.index_copy_(0, rows_T, m_TD)
        update_TD = balance(g_TD.lerp_(m_TD, self.beta))
        # Rows are distinct, so that adding by index has one order only.
        parameter.index_add_(0, rows_T, update_TD.to(parameter.dtype), alpha=-lr * UPDATE_RMS)


def balance(matrix_TD: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """[T, D] with every row's RMS 1 and every column's nearly so; zero rows and columns stay zero."""
    x_TD = matrix_TD / matrix_TD.abs().amax().clamp_min(torch.finfo(matrix_TD.dtype).tiny)
    # Only the two scales iterate: a pass reads the squares once instead of writing the matrix twice.
    square_TD = x_TD.square()
    row_T = torch.ones_like(x_TD[:, 0])
    column_D = torch.ones_like(x_TD[0])
    for _ in range(iterations):
        column_D = _inverse_rms(square_TD.mT @ row_T.square(), len(row_T))
        row_T = _inverse_rms(square_TD @ column_D.square(), len(column_D))
    return x_TD.mul_(row_T[:, None]).mul_(column_D)


def touched_rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows int64 [T], ascending, whose gradient is not zero, and their gradients fp32 [T, D], a copy."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        live = values.any(dim=1).nonzero()[:, 0]
        return rows[live], values[live].float()
    live = gradient.any(dim=1).nonzero()[:, 0]
    return live, gradient[live].float()


def _inverse_rms(sum_of_squares: Tensor, count: int) -> Tensor:
    return (sum_of_squares / count).clamp_min_(FLOOR**2).rsqrt_()
