"""`rorqual.ops.reference.linear` for training: one GEMM, without the copies that rows with bits of their own cost.

T rows, G groups, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rorqual.formats.weights import DenseWeight, Weight
from rorqual.ops.reference import linear as plain


def linear(x_TK: Tensor, weight: Weight, short_rows: int, native: bool) -> Tensor:
    """As the plain `linear`; differentiable in x, and in a dense weight.

    Native numerics have no training twin, and `short_rows` is ignored: no row's bits are promised.
    """
    assert not native, "native numerics are not trained: use the plain op"
    if isinstance(weight, DenseWeight) and weight.tensor.dtype == torch.float32:
        return F.linear(x_TK.float(), weight.tensor)
    return plain.linear(x_TK, weight, 0, False)


def grouped_linear(x_TGK: Tensor, weights: Sequence[Weight], short_rows: int) -> Tensor:
    """As the plain `grouped_linear`."""
    return torch.stack([linear(x_TGK[:, g], weight, 0, False) for g, weight in enumerate(weights)], dim=1)
