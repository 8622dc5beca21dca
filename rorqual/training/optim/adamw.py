"""torch's AdamW for everything small, with its state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class AdamW:
    """torch.optim.AdamW over two groups: `decayed` with weight decay, `plain` without.

    lr: at factor 1. A parameter without gradient is left alone. The fused kernel works element by element, hence gives
    the same bits with any number of threads.
    """

    def __init__(
        self,
        decayed: Mapping[str, nn.Parameter],
        plain: Mapping[str, nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self.parameters = {**decayed, **plain}
        self.lr = lr
        groups = [
            {"params": list(decayed.values()), "weight_decay": weight_decay},
            {"params": list(plain.values()), "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._torch = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True) if groups else None
        if self._torch is not None:
            # From the start, so that what is saved does not depend on which parameters have met a gradient yet.
            for p in self.parameters.values():
                self._torch.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
                }

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update at factor x lr, in place."""
        if self._torch is None:
            return
        for group in self._torch.param_groups:
            group["lr"] = factor * self.lr
        self._torch.step()

    def state(self) -> dict[str, Tensor]:
        """The live buffers, by parameter name and what they hold (torch's names)."""
        if self._torch is None:
            return {}
        return {f"{name}.{key}": v for name, p in self.parameters.items() for key, v in self._torch.state[p].items()}
