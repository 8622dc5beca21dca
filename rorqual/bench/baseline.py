"""The baseline of `bench model` and `bench kernels`: plain torch at what it does well.

It differs from the plain twins of the ops in what would make it slow for reasons of ours:

    weights     expanded to fp32 once, at load, where the twins expand them tile by tile at every call
    attention   rows share batched products, where the twins go row by row so that a row's bits are its own;
    candidates  so do the scores of a candidate pool
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rorqual.bench.batched import batched_attention, batched_scores_at
from rorqual.bench.clocked import Given
from rorqual.formats.weights import DenseWeight, Fp4Weight, Fp8Weight, Weight
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.ops.dispatch import Ops, reference_ops

WEIGHTS = (DenseWeight, Fp8Weight, Fp4Weight)
_ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedWeight:
    """The fp32 values [N, K] of a quantised weight, for the plain ops alone.

    No `DenseWeight`: the input of a quantised weight is quantised too in native numerics.
    """

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def expand(self, dtype: torch.dtype = torch.float32, rows: slice = _ALL_ROWS) -> Tensor:
        """The rows [n, K]: a view, nothing is computed."""
        assert dtype == torch.float32
        return self.tensor[rows]


def expanded(weight: Weight) -> Weight:
    """The same values in fp32, contiguous; a weight that is stored so is itself."""
    if isinstance(weight, DenseWeight):
        return weight if weight.tensor.dtype == torch.float32 else DenseWeight(weight.expand())
    # The plain ops ask a weight for its rows and for no more.
    return cast(Weight, ExpandedWeight(weight.expand()))


def baseline_ops() -> Ops:
    """The plain ops, attention and the scores of candidates in batched products."""
    return replace(reference_ops(), sparse_attention=batched_attention, index_scores_at=batched_scores_at)


def load_baseline(folder: Path, numerics: str) -> Transformer:
    """The model of `folder` with expanded weights, served by `baseline_ops`; a checkpoint's errors as in `load`."""
    model = expand_model(load(folder, numerics=numerics, kernels="plain"))
    model.backend = Given(baseline_ops(), "plain")
    return model


def expand_model(model: Transformer) -> Transformer:
    """`model` itself, every weight of its linear layers expanded in place; only plain ops may serve it."""
    made: dict[int, tuple[Weight, Weight]] = {}  # by identity: a weight that modules share stays shared

    def replacement(weight: Weight) -> Weight:
        if id(weight) not in made:
            made[id(weight)] = weight, expanded(weight)
        return made[id(weight)][1]

    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, WEIGHTS):
                setattr(module, name, replacement(value))
            elif isinstance(value, list) and value and isinstance(value[0], WEIGHTS):
                setattr(module, name, [replacement(weight) for weight in value])
    return model
