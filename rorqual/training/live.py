"""Weights that are being trained, behind the interfaces through which a model takes a checkpoint's.

Modules are built once and keep these objects; what a product sees is asked for at every use: the fp32 parameter, or,
once weights are quantised, the parameter after the format's rounding with its gradient passed straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rorqual.checkpoint.table import EngramTable
from rorqual.formats.codec import fake_quantize
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import DenseWeight, Weight, quantize_weight
from rorqual.inventory.names import TensorSpec

# N output rows, K input columns, R rows of a table, D its width

Kind = Literal["fp8", "fp4"]
FakeWeight = Callable[[Tensor, Kind], Tensor]
"""(weight [N, K], its format) -> the values that the format gives back, with a straight-through gradient."""


@dataclass(slots=True)
class Rounding:
    """The switch that all live weights of a model share, and what they have rounded since it was last turned."""

    fake: FakeWeight
    on: bool = False
    held: dict[str, Tensor] = field(default_factory=dict)

    def turn(self, on: bool) -> None:
        """Begin a forward: parameters may have changed since the last one."""
        self.on = on
        self.held.clear()


class LiveWeight(DenseWeight):
    """A parameter [N, K] as a weight; `tensor` is what products see, differentiable down to the parameter."""

    __slots__ = ("kind", "name", "parameter", "rounding", "rows")

    parameter: nn.Parameter
    name: str
    kind: Kind | None
    rounding: Rounding
    rows: slice | None

    def __init__(
        self, parameter: nn.Parameter, name: str, kind: Kind | None, rounding: Rounding, rows: slice | None = None
    ) -> None:
        for field_, value in (
            ("parameter", parameter),
            ("name", name),
            ("kind", kind),
            ("rounding", rounding),
            ("rows", rows),
            ("addresses", None),
        ):
            object.__setattr__(self, field_, value)

    @property
    def tensor(self) -> Tensor:
        whole = self._whole()
        return whole if self.rows is None else whole[self.rows]

    def row_range(self, rows: slice) -> LiveWeight:
        assert self.rows is None
        return LiveWeight(self.parameter, self.name, self.kind, self.rounding, rows)

    def _whole(self) -> Tensor:
        if self.kind is None or not self.rounding.on:
            return self.parameter
        held = self.rounding.held
        if self.name not in held:
            held[self.name] = self.rounding.fake(self.parameter, self.kind)
        return held[self.name]


class LiveTable(EngramTable):
    """An Engram table in training: rows gathered from the parameter, whose gradient is sparse."""

    def __init__(self, parameter: nn.Parameter, name: str, quantised: bool, rounding: Rounding) -> None:
        super().__init__(parameter, None, name)
        self.parameter, self.quantised, self.rounding = parameter, quantised, rounding

    def rows(self, index: Tensor) -> Tensor:
        """int64 [...] row ids -> fp32 [..., width]."""
        rows = F.embedding(index, self.parameter, sparse=True)
        return fake_quantize(rows, E4M3_E8M0_32) if self.quantised and self.rounding.on else rows


class LiveScope:
    """The trained parameters below a prefix, as a model's constructor asks for them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        specs: Mapping[str, TensorSpec],
        rounding: Rounding,
        prefix: str = "",
    ) -> None:
        self._parameters, self._specs, self._rounding, self.prefix = parameters, specs, rounding, prefix

    def _full(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def scope(self, prefix: str) -> LiveScope:
        return LiveScope(self._parameters, self._specs, self._rounding, self._full(prefix))

    def has(self, name: str) -> bool:
        return self._full(name) in self._parameters

    def tensor(self, name: str) -> Tensor:
        return self._parameters[self._full(name)]

    def param(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        assert dtype == torch.float32
        return self._parameters[self._full(name)]

    def weight(self, name: str) -> Weight:
        full = self._full(f"{name}.weight")
        return LiveWeight(self._parameters[full], full, _kind(self._specs[full]), self._rounding)

    def table(self, name: str) -> EngramTable:
        full = self._full(f"{name}.weight")
        return LiveTable(self._parameters[full], full, _kind(self._specs[full]) is not None, self._rounding)


def _kind(spec: TensorSpec) -> Kind | None:
    """How the checkpoint will store it: "fp8", "fp4", or None for plain."""
    kinds: dict[str, Kind] = {"F8_E4M3": "fp8", "I8": "fp4"}
    return kinds.get(spec.dtypes[0])


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, kind: Kind) -> Tensor:
        ctx.set_materialize_grads(False)  # an expert that nobody was routed to has no gradient, not one of zeros
        return quantize_weight(weight, kind).expand()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None]:
        return grad_outputs[0], None


def fake_quantize_weight(weight: Tensor, kind: Kind) -> Tensor:
    """What a weight [N, K] is worth once stored as `kind` ("fp8", "fp4"); straight-through gradient."""
    result: Tensor = _StraightThrough.apply(weight, kind)  # type: ignore[no-untyped-call]
    return result
