"""Mixture of experts: square-root-softplus routing, clamped SwiGLU, one shared expert (SPEC 7)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.formats.weights import DenseWeight
from rorqual.model.rows import Rows
from rorqual.model.run import NOT_YET, Run
from rorqual.model.weights import Scope
from rorqual.ops.dispatch import Regions
from rorqual.ops.reference.experts import swiglu
from rorqual.ops.rowwise import by_row

# T rows, D hidden, E routed experts, k experts a token


class MoE(nn.Module):
    """Routed experts plus shared ones. Drafts have their own, narrower one and never use `bias_vl`."""

    def __init__(self, config: ModelConfig, scope: Scope, *, experts: int, per_token: int, draft: bool = False) -> None:
        super().__init__()
        self.experts, self.per_token = experts, per_token
        self.limit = config.swiglu_limit
        self.scoring = config.scoring_func
        self.temperature = config.gate_temp
        self.normalise = config.norm_topk_prob and per_token > 1
        self.scaling = config.routed_scaling_factor
        self.bias_vl: Tensor | None = None
        self._packed: Any = NOT_YET
        if experts:
            self.gate = DenseWeight(scope.param("gate.weight"))
            self.bias = scope.param("gate.bias")
            bias_vl = scope.param("gate.bias_vl") if scope.has("gate.bias_vl") else None
            self.bias_vl = None if draft else bias_vl
            self.w1, self.w2, self.w3 = (
                [scope.weight(f"experts.{e}.{name}") for e in range(experts)] for name in ("w1", "w2", "w3")
            )
        self.shared = (
            [scope.weight(f"shared_experts.{name}") for name in ("w1", "w2", "w3")] if config.n_shared_experts else None
        )

    def forward(self, x_TD: Tensor, rows: Rows, run: Run, name: str) -> Tensor:
        """Output [T, D] in the activation dtype; the sum over experts is fp32, rounded once."""
        # Where there is a kernel for the whole, every short row takes it, whatever stands beside them (DESIGN 12).
        regions = run.regions
        short = rows.short_rows if regions is not None and self.packed_for(regions) is not None else 0
        if regions is not None and not short and 0 < rows.short_rows < len(rows):
            # Apart, so that long rows are rounded the same whatever stands beside them.
            parts = (x_TD[: rows.short_rows], rows.only_short()), (x_TD[rows.short_rows :], rows.without_short())
            return torch.cat([self._by_op(x, part, run, name) for x, part in parts])
        if regions is None or not short:
            return self._by_op(x_TD, rows, run, name)
        image = None if rows.image_T is None or self.bias_vl is None else rows.image_T[:short]
        total = regions.moe(x_TD[:short], self._packed, image, run.numerics.native)
        if short == len(rows):
            return run.numerics.round(total)
        return torch.cat((run.numerics.round(total), self._by_op(x_TD[short:], rows.without_short(), run, name)))

    def packed_for(self, regions: Regions) -> Any:
        """The layer as the region takes it; None where there is none for it."""
        if self._packed is NOT_YET:
            self._packed = self.experts and regions.pack_moe(
                self.gate,
                self.bias,
                self.bias_vl,
                self.w1,
                self.w2,
                self.w3,
                self.shared,
                per_token=self.per_token,
                scoring=self.scoring,
                temperature=self.temperature,
                scaling=self.scaling,
                normalise=self.normalise,
                limit=self.limit,
            )
        return self._packed or None

    def _by_op(self, x_TD: Tensor, rows: Rows, run: Run, name: str) -> Tensor:
        # Many rows: the shared expert is one more for all of them, which rounds in the same places and spares a pass.
        together = self.shared if run.regions is not None and not rows.short_rows else None
        if self.experts:
            index, weight = self.route(x_TD, rows, run, name)
            chosen, how = (index, weight, self.w1, self.w2, self.w3), (self.limit, rows.short_rows, run.numerics.native)
            total = run.ops.experts(x_TD.float(), *chosen, *how, *(() if together is None else (together,)))
        else:
            together, total = None, torch.zeros_like(x_TD, dtype=torch.float32)
        if self.shared is not None and together is None:
            total = total + self._shared(x_TD, rows, run).float()
        return run.numerics.round(total)

    def route(self, x_TD: Tensor, rows: Rows, run: Run, name: str) -> tuple[Tensor, Tensor]:
        """Experts int64 [T, k] in descending biased score (ties to the lowest id) and their weights fp32 [T, k]."""
        logits = run.ops.linear(x_TD.float(), self.gate, rows.short_rows, False) / self.temperature
        scores = by_row(lambda row: affinity(row, self.scoring), logits, rows.short_rows)
        biased = scores + self.bias
        if self.bias_vl is not None and rows.image_T is not None:
            biased = torch.where(rows.image_T[:, None], scores + self.bias_vl, biased)
        order = biased.sort(dim=-1, descending=True, stable=True)
        index = order.indices[:, : self.per_token]
        if run.tap.wants(f"{name}.moe_margin"):
            last = self.per_token
            gap = order.values[:, last - 1] - order.values[:, last] if last < self.experts else None
            run.record(f"{name}.moe_margin", scores.new_full((len(rows),), torch.inf) if gap is None else gap, rows)
        if run.hooks is not None:
            run.hooks.routed(name, scores, index, rows)
        weight = scores.gather(1, index)
        if self.normalise:
            total = weight[:, 0]
            for k in range(1, self.per_token):
                total = total + weight[:, k]
            weight = weight / (total + 1e-20)[:, None]
        weight = weight * self.scaling
        if run.tap.active:
            index = run.record(f"{name}.moe_indices", index.to(torch.int32), rows).to(torch.int64)
            if bool(((index < 0) | (index >= self.experts)).any()):
                raise InputError(f"inject: {name}.moe_indices names an expert outside 0..{self.experts - 1}")
        return index, run.record(f"{name}.moe_weights", weight, rows)

    def _shared(self, x_TD: Tensor, rows: Rows, run: Run) -> Tensor:
        assert self.shared is not None
        w1, w2, w3 = self.shared
        g, u = run.linear(x_TD, w1, rows).float(), run.linear(x_TD, w3, rows).float()
        gated = by_row(lambda gu: swiglu(gu[:, 0], gu[:, 1], self.limit), torch.stack((g, u), 1), rows.short_rows)
        return run.linear(run.numerics.round(gated), w2, rows)


def affinity(logits: Tensor, scoring: str) -> Tensor:
    """Unbiased routing scores in fp32: sqrtsoftplus (the release), sigmoid or softmax."""
    if scoring == "sigmoid":
        return logits.sigmoid()
    if scoring == "softmax":
        return logits.softmax(dim=-1)
    # softplus underflows to 0 below -104, where the gradient of a root would be NaN.
    return F.softplus(logits).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
