"""Gradient norms, one for each part of a model that has losses of its own, and clipping by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientNorm:
    """value: the norm before clipping. broken: the first parameter with an infinite or NaN gradient, "" for none."""

    value: float
    broken: str = ""

    @property
    def finite(self) -> bool:
        return not self.broken


def by_loss(parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, nn.Parameter]]:
    """ "backbone", "indexer" and "draft", those there are: no loss moves two of them, so each has a norm of its own.

    Under one norm the draft's first gradients, tens of times the backbone's, would all but stop the backbone.
    """
    parts: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        part = "draft" if name.startswith("mtp.") else "indexer" if ".indexer." in name else "backbone"
        parts.setdefault(part, {})[name] = parameter
    return parts


@torch.no_grad()
def clip_gradients(parameters: Mapping[str, nn.Parameter], limit: float) -> GradientNorm:
    """The norm of these dense and sparse gradients together; they are scaled in place so that it is at most `limit`.

    limit: 0 for no clipping. A norm that is not finite scales nothing: the caller is to stop, or skip the step.
    Sparse gradients are replaced by coalesced ones: the parts of a row add up before they are squared.
    """
    values = _gradient_values(parameters)
    if not values:
        return GradientNorm(value=0.0)
    norms = [torch.linalg.vector_norm(value, dtype=torch.float32) for value in values.values()]
    device = norms[0].device
    all_norms = torch.stack([norm.to(device) for norm in norms]).double()
    norm = float(torch.linalg.vector_norm(all_norms))
    if not math.isfinite(norm):
        broken = next(name for name, one in zip(values, all_norms.tolist(), strict=True) if not math.isfinite(one))
        return GradientNorm(value=norm, broken=broken)
    if 0 < limit < norm:
        for value in values.values():
            value.mul_(limit / norm)
    return GradientNorm(value=norm)


def _gradient_values(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The stored elements of each gradient, sharing its memory."""
    values: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = parameter.grad = gradient.coalesce()
            gradient = gradient.values()
        if gradient.numel():
            values[name] = gradient
    return values
