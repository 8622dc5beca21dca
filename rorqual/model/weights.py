"""Where a module takes its tensors from: a scope of a checkpoint, named as in the release (official layout)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rorqual.checkpoint.table import EngramTable
from rorqual.formats.weights import DenseWeight, Fp4Weight, Fp8Weight, Weight


class Scope(Protocol):
    """The part of a checkpoint below a prefix; each tensor is taken exactly once."""

    def param(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor, converted (norms, biases, mixing coefficients: small things kept in fp32)."""

    def weight(self, name: str) -> Weight:
        """`name.weight`, with `name.scale` where it is quantised; kept packed."""

    def tensor(self, name: str) -> Tensor:
        """The raw tensor."""

    def table(self, name: str) -> EngramTable:
        """Rows of an n-gram table, gathered where they stand."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""

    def scope(self, prefix: str) -> Scope:
        """The part below `prefix.`"""


def row_groups(weight: Weight, groups: int) -> list[Weight]:
    """Split a weight [N, K] into `groups` weights of N / groups rows each, without copying.

    Wo_a's rows belong to output groups (SPEC 5). An FP8 weight splits on its 32-row tiles.
    """
    rows = weight.shape[0] // groups
    parts: list[Weight] = []
    for g in range(groups):
        cut = slice(g * rows, (g + 1) * rows)
        if isinstance(weight, DenseWeight):
            parts.append(weight.row_range(cut))
        elif isinstance(weight, Fp8Weight):
            if rows % 32:
                # Groups that share a tile: the values are exact in bf16, so keep them so.
                parts.append(DenseWeight(weight.expand(torch.bfloat16, cut)))
            else:
                parts.append(Fp8Weight(weight.codes[cut], weight.scales[g * rows // 32 : (g + 1) * rows // 32]))
        else:
            parts.append(Fp4Weight(weight.packed[cut], weight.scales[cut]))
    return parts
