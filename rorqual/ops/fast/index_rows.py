"""An indexer's queries and head weights for a few rows in one kernel: the twin of `model.indexer.Indexer.queries`.

    q latent -> wq_b -> rotation      x -> weights_proj -> scale

Parts of `linear` and of the rotation, in their order: the bits are those of the op-by-op path.

T rows, Q q_lora rank, D hidden, I index heads, K index dim.
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

from rorqual.formats.codec import check_finite
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import TILE, DenseWeight, Fp8Weight, Weight
from rorqual.ops.cpu import Path
from rorqual.ops.fast.arrays import angle_arrays, floats
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients
from rorqual.ops.fast.latent_rows import turned
from rorqual.ops.fast.linear import has_vectors, parts_of
from rorqual.ops.fast.row_kernels import (
    address,
    columns,
    pack_row,
    rooms,
    round_bf16,
    share_vector,
)
from rorqual.ops.fast.row_vectors import BF16, FP8

_F32 = np.float32
_MARKERS = FP8.marker, BF16.marker
_FP8, _BF16 = ((kind.code, kind.unit, kind.scale_rows) for kind in (FP8, BF16))

_QUERIES = (
    "void(Tuple((uint8[::1], uint16[::1])), float32[:, ::1], float32[:, ::1], UniTuple(int64, 3), "
    "UniTuple(float32[:, ::1], 2), float32, boolean, float32[::1], float32[:, :, ::1], float32[:, ::1], boolean[::1], "
    "int64)"
)


@kernel(_QUERIES, parallel=True)
def _queries(markers, qr_TQ, x_TD, weights, angles, scale, native, room, q_TIK, w_TI, finite_T, parts):
    """weights: addresses of wq_b's codes and scales, of weights_proj. scale: of head weights. room: [T (Q + D)], used
    by address and so not the kernel's own. finite_T: False where native has a NaN or an Inf to quantise."""
    (rows, latent), hidden, (_, heads, channels) = qr_TQ.shape, x_TD.shape[1], q_TIK.shape
    (fp8, bf16), (cos_Tr, sin_Tr), (codes, scales, proj) = markers, angles, weights
    q_packed, x_packed = room[: rows * latent].reshape(rows, latent), room[rows * latent :].reshape(rows, hidden)
    for t in range(rows):
        finite_T[t] = pack_row(qr_TQ[t], True, native, q_packed[t])
        pack_row(x_TD[t], True, False, x_packed[t])
    q_T = address(q_packed) + np.arange(rows) * (latent * 4)
    x_T = address(x_packed) + np.arange(rows) * (hidden * 4)
    width = heads * channels
    q_TN = q_TIK.reshape(rows, width)
    for share in prange(parts):
        lanes, wide = rooms(rows)
        # Whole heads, so that a thread can turn what it has made.
        h0, h1 = heads * share // parts, heads * (share + 1) // parts
        share_vector(fp8, _FP8, codes, scales, width, latent, h0 * channels, h1 * channels, q_T, q_TN, lanes, wide)
        n0, n1 = columns(heads, share, parts)
        share_vector(bf16, _BF16, proj, proj, heads, hidden, n0, n1, x_T, w_TI, lanes, wide)
        for t in range(rows):
            for h in range(h0, h1):
                turned(q_TIK[t, h], cos_Tr[t], sin_Tr[t], native)
            for h in range(n0, n1):
                w_TI[t, h] = round_bf16(round_bf16(w_TI[t, h]) * scale) if native else w_TI[t, h] * scale


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """What `queries` runs on `path`."""
    return (_queries,) if has_vectors(path) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexRows:
    """An indexer's weights as `queries` takes them: addresses, which `held` keeps in memory."""

    weights: tuple[int, int, int]
    scale: Any
    shape: tuple[int, int]
    held: tuple[Any, ...]

    @classmethod
    def of(cls, wq_b: Weight, weights_proj: Weight, *, heads: int, scale: float) -> IndexRows | None:
        """None where the kernel does not read them: a wq_b that is not FP8, a weights_proj that is not bf16, either in
        no memory of its own, widths that are no multiple of 32.

        Args:
            wq_b: [I K, Q].
            weights_proj: [I, D].
            heads: I.
            scale: of the head weights.
        """
        if type(wq_b) is not Fp8Weight or type(weights_proj) is not DenseWeight:
            return None
        if not wq_b.addresses or not weights_proj.addresses or weights_proj.tensor.dtype != torch.bfloat16:
            return None
        channels = wq_b.shape[0] // heads
        if wq_b.shape[1] % TILE or weights_proj.shape[1] % TILE or channels % TILE:
            return None
        addresses = (*wq_b.addresses, weights_proj.addresses[0])
        held = (wq_b, weights_proj)
        return cls(weights=addresses, scale=_F32(scale), shape=(heads, channels), held=held)


def queries(
    qr_TQ: Tensor, x_TD: Tensor, layer: IndexRows, cos_sin: tuple[Tensor, Tensor], native: bool
) -> tuple[Tensor, Tensor]:
    """Rotated index queries [T, I, K] and head weights [T, I]: fp32, rounded where native rounds. No gradients.

    Args:
        qr_TQ: normed q latent.
        x_TD: the sub-layer's input.
        layer: from `IndexRows.of`.
        cos_sin: [T, r].
        native: SPEC 3 numerics.

    Raises:
        FormatError: NaN or Inf in what native quantises.
    """
    refuse_gradients(qr_TQ, x_TD)
    qr, x = floats(qr_TQ), floats(x_TD)
    (rows, latent), (heads, channels) = qr.shape, layer.shape
    q, w = np.empty((rows, heads, channels), np.float32), np.empty((rows, heads), np.float32)
    room, finite, parts = np.empty(qr.size + x.size, np.float32), np.empty(rows, np.bool_), parts_of(q.size * latent)
    known = (layer.weights, angle_arrays(cos_sin), layer.scale, native, room)
    _queries(_MARKERS, qr, x, *known, q, w, finite, parts, tasks=parts)
    if native and not finite.all():
        check_finite(torch.from_numpy(qr), E4M3_E8M0_32)
    return torch.from_numpy(q), torch.from_numpy(w)
