"""What a few rows leave the layers by, each in one kernel: twins of what `model.backbone.Backbone` does op by op.

    head    copies collapsed -> output norm -> head: `hidden` and `logits`
    mean    of the copies: `copy_mean`

Parts of `hyper`, `norm` and `linear`, in their order: the bits are those of the op-by-op path.

T rows, n copies of the residual, D hidden, V vocabulary.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.formats.weights import TILE, DenseWeight, Weight
from rorqual.ops.cpu import Path
from rorqual.ops.fast.arrays import floats
from rorqual.ops.fast.hyper import collapse
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients
from rorqual.ops.fast.linear import has_vectors, parts_of
from rorqual.ops.fast.norm import norm_row
from rorqual.ops.fast.row_kernels import address, columns, pack_row, rooms, share_vector
from rorqual.ops.fast.row_vectors import BF16, Array

_F32 = np.float32
_BF16 = BF16.code, BF16.unit, BF16.scale_rows

_HEAD = (
    "void(uint16[::1], float32[:, :, ::1], float32[:, ::1], int64, float32[::1], float32, boolean, float32[:, ::1], "
    "float32[:, ::1], int64)"
)


@kernel(_HEAD, parallel=True)
def _head(bf16, x_TnD, pre_Tn, head, norm_D, eps, native, packed_TD, out_TV, parts):
    """head: address of its weight. packed_TD: room, used by address and so not the kernel's own."""
    (rows, _, hidden), vocabulary = x_TnD.shape, out_TV.shape[1]
    work_D = np.empty(hidden, np.float32)
    for t in range(rows):
        collapse(x_TnD[t], pre_Tn[t], work_D)
        norm_row(work_D, norm_D, eps, native)
        pack_row(work_D, True, False, packed_TD[t])
    x_T = address(packed_TD) + np.arange(rows) * (hidden * 4)
    for share in prange(parts):
        lanes, wide = rooms(rows)
        n0, n1 = columns(vocabulary, share, parts)
        share_vector(bf16, _BF16, head, head, vocabulary, hidden, n0, n1, x_T, out_TV, lanes, wide)


@kernel("void(float32[:, :, ::1], float32[:, ::1])")
def _mean(x_TnD, out_TD):
    for t in range(x_TnD.shape[0]):
        for d in range(x_TnD.shape[2]):
            total = x_TnD[t, 0, d]
            for j in range(1, x_TnD.shape[1]):
                total += x_TnD[t, j, d]
            out_TD[t, d] = total / _F32(x_TnD.shape[1])


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """What `head` and `mean` run on `path`."""
    return (_head, _mean) if has_vectors(path) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadRows:
    """Output norm and head as the kernel takes them; `held` keeps what is used by address in memory."""

    head: int
    norm: Array
    eps: Any
    vocabulary: int
    held: tuple[Any, ...]

    @classmethod
    def of(cls, head: Weight, norm_D: Tensor, *, eps: float) -> HeadRows | None:
        """None where the kernel does not read it: a head [V, D] that is not bf16 or lies in no memory of its own, a
        hidden size that is no multiple of 32."""
        if type(head) is not DenseWeight or head.tensor.dtype != torch.bfloat16 or head.addresses is None:
            return None
        if head.shape[1] % TILE:
            return None
        norm = norm_D.detach().float().contiguous().numpy()
        return cls(head=head.addresses[0], norm=norm, eps=_F32(eps), vocabulary=head.shape[0], held=(head,))


def head(x_TnD: Tensor, pre_Tn: Tensor, layer: HeadRows, native: bool) -> Tensor:
    """Logits fp32 [T, V] of the streams that leave the last layer, with its pre [T, n]. No gradients.

    Args:
        x_TnD: fp32 or bf16.
        pre_Tn: fp32.
        layer: from `HeadRows.of`.
        native: SPEC 3 numerics.
    """
    refuse_gradients(x_TnD, pre_Tn)
    x, pre = floats(x_TnD), floats(pre_Tn)
    rows, _, hidden = x.shape
    out, packed = np.empty((rows, layer.vocabulary), np.float32), np.empty((rows, hidden), np.float32)
    parts = parts_of(out.size * hidden)
    _head(BF16.marker, x, pre, layer.head, layer.norm, layer.eps, native, packed, out, parts, tasks=parts)
    return torch.from_numpy(out)


def mean(x_TnD: Tensor) -> Tensor:
    """fp32 mean over the copies [T, D], added in order. No gradients."""
    refuse_gradients(x_TnD)
    x = floats(x_TnD)
    out = np.empty((x.shape[0], x.shape[2]), np.float32)
    _mean(x, out)
    return torch.from_numpy(out)
