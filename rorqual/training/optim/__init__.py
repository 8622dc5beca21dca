"""The optimisers of a training run behind one object: Muon, Sinkhorn-balanced momentum and AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rorqual.errors import CheckpointError, ConfigError
from rorqual.training.optim.adamw import AdamW
from rorqual.training.optim.clip import GradientNorm, by_loss, clip_gradients
from rorqual.training.optim.groups import Groups, query_heads, sort_parameters
from rorqual.training.optim.muon import Muon
from rorqual.training.optim.schedule import factor
from rorqual.training.optim.sinkhorn import SinkhornMomentum
from rorqual.training.recipe import OptimRecipe

ENGRAM = ".engram."

__all__ = [
    "GradientNorm",
    "Groups",
    "Optimizers",
    "by_loss",
    "clip_gradients",
    "factor",
    "query_heads",
    "sort_parameters",
]


class Optimizers:
    """All trained parameters, each with its optimiser; updates are in place and keep parameters and storages.

    parameters: by checkpoint name; those that require no gradient are left out. They must stay where they are (device
        and storage) from here on.
    heads: of the weights that Muon takes head by head (`query_heads`).
    muon: "batched", or "torch" for torch.optim.Muon itself (the same step within bf16's rounding, slower).

    Raises:
        ConfigError: `heads` names no parameter, or does not divide its rows; an unknown `muon`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        recipe: OptimRecipe,
        heads: Mapping[str, int],
        *,
        muon: str = "batched",
    ) -> None:
        for name in heads:
            if name not in parameters:
                raise ConfigError(f"heads: {name} is not a parameter")
        self.groups = sort_parameters(parameters)
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}

        def pick(names: tuple[str, ...]) -> dict[str, nn.Parameter]:
            return {name: parameters[name] for name in names}

        self._muon = Muon(
            pick(self.groups.muon),
            heads,
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            ns_steps=recipe.ns_steps,
            kernel=muon,
        )
        engram = tuple(name for name in self.groups.tables if ENGRAM in name)
        others = tuple(name for name in self.groups.tables if name not in engram)
        self._tables = [
            SinkhornMomentum(pick(names), lr=lr, momentum=recipe.momentum)
            for names, lr in ((others, recipe.lr_table), (engram, recipe.lr_engram))
        ]
        self._adamw = AdamW(
            pick(self.groups.decayed),
            pick(self.groups.plain),
            lr=recipe.lr_adam,
            betas=(recipe.beta1, recipe.beta2),
            weight_decay=recipe.weight_decay,
        )

    def step(self, factor: float) -> None:
        """One update with every learning rate times `factor`; parameters without gradient are left alone."""
        self._muon.step(factor)
        for tables in self._tables:
            tables.step(factor)
        self._adamw.step(factor)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """`<parameter>.momentum`, or AdamW's `.step`, `.exp_avg`, `.exp_avg_sq`: the live tensors, not copies."""
        return {**self._muon.state(), **self._tables[0].state(), **self._tables[1].state(), **self._adamw.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state, exact to the bit; nothing is changed if it does not fit.

        Raises:
            CheckpointError: a tensor missing, unknown, or of another shape or dtype.
        """
        own = self.state_dict()
        for name in sorted(own.keys() | state.keys()):
            if name not in own or name not in state:
                raise CheckpointError(f"optimiser state: {name} is {'missing' if name in own else 'unknown'}")
            saved, live = state[name], own[name]
            if not isinstance(saved, Tensor) or saved.shape != live.shape or saved.dtype != live.dtype:
                raise CheckpointError(f"optimiser state: {name} must be {live.dtype} {list(live.shape)}")
        with torch.no_grad():
            for name, live in own.items():
                live.copy_(state[name])
