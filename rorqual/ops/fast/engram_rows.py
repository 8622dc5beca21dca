"""The Engram write of a few rows, fused: the twin of `model.engram.Engram`'s `forward`.

    table rows, decoded where they stand in their file     a row after the other
    product with wkv: a key for every copy, and a value    columns shared out among threads
    gate of every copy, and the value it lets through      rows and copies shared out

Products and norms are the parts of `linear` and `norm`: a row's bits depend on the row alone. They are those of the
op-by-op path but for the last bits of the gate: torch sums a row and computes exp in an order of its own.

T rows, S copies of the residual, D hidden, E look-ups a row, W width of a table row, M = E W.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.formats.fp8 import E8M0_NAN
from rorqual.formats.weights import TILE, Fp8Weight, Weight
from rorqual.ops.cpu import Path
from rorqual.ops.fast.arrays import floats
from rorqual.ops.fast.decode import E4M3, E8M0
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients
from rorqual.ops.fast.linear import has_vectors, parts_of
from rorqual.ops.fast.norm import inverse_rms, round_row
from rorqual.ops.fast.row_kernels import (
    address,
    columns,
    pack_row,
    part,
    reassociated,
    rooms,
    round_bf16,
    share_vector,
)
from rorqual.ops.fast.row_vectors import FP8, Array, copy_bytes

_F32 = np.float32
_FP8 = FP8.code, FP8.unit, FP8.scale_rows
_LEAST = _F32(1e-6)
_NO_SCALE = np.uint8(E8M0_NAN)


@part
def _look_up(table, index_E, raw_B, memory_M):
    """The table rows of one row, side by side. False where an id or a scale is none that may be read.

    table: addresses of codes [rows, W] and scales, rows, W. raw_B: room for one row of both.
    """
    codes, scales, count, width = table
    blocks = width // TILE
    for e in range(index_E.shape[0]):
        row = index_E[e]
        if row < 0 or row >= count:
            return False
        copy_bytes(address(raw_B), codes + row * width, width)
        copy_bytes(address(raw_B) + width, scales + row * blocks, blocks)
        for b in range(blocks):
            byte = raw_B[width + b]
            if byte == _NO_SCALE:
                return False
            for i in range(b * TILE, (b + 1) * TILE):
                memory_M[e * width + i] = E4M3[raw_B[i]] * E8M0[byte]
    return True


@reassociated
def _weighted_dot(x_D, weight_D, key_D):
    total = _F32(0)
    for d in range(x_D.shape[0]):
        total += x_D[d] * weight_D[d] * key_D[d]
    return total


@part
def _gate(x_D, weight_D, key_D, eps):
    """sigmoid of the signed root of a copy's scaled product with its key."""
    z = _weighted_dot(x_D, weight_D, key_D) * (inverse_rms(x_D, eps) * inverse_rms(key_D, eps))
    z *= _F32(1 / math.sqrt(x_D.shape[0]))
    # A NaN stays one.
    root = _F32(math.sqrt(_LEAST if abs(z) < _LEAST else abs(z)))
    signed = root if z > 0 else (-root if z < 0 else z)
    return _F32(1) / (_F32(1) + math.exp(-signed))


_SIGNATURE = (
    "void(uint8[::1], float32[:, :, ::1], int64[:, ::1], UniTuple(int64, 4), UniTuple(int64, 2), float32[:, ::1], "
    "float32, uint8[::1], boolean, float32[::1], float32[:, :, ::1], boolean[::1], int64)"
)


@kernel(_SIGNATURE, parallel=True)
def _engram(fp8, x_TSD, index_TE, table, wkv, weight_SD, eps, image_T, native, room, out_TSD, fine_T, parts):
    """table: as `_look_up`. wkv: addresses of its codes and scales. room: [T M], used by address and so not the
    kernel's own. fine_T: False where a look-up may not be read, or native has a NaN or an Inf to quantise."""
    (rows, copies, hidden), memory = x_TSD.shape, index_TE.shape[1] * table[3]
    packed_TM, memory_M = room.reshape(rows, memory), np.zeros(memory, np.float32)
    raw_B = np.empty(table[3] + table[3] // TILE, np.uint8)
    for t in range(rows):
        found = _look_up(table, index_TE[t], raw_B, memory_M)
        round_row(memory_M, native)
        finite = pack_row(memory_M, True, native, packed_TM[t])
        fine_T[t] = found and finite
    width = (copies + 1) * hidden
    y_TN, x_T = np.empty((rows, width), np.float32), address(packed_TM) + np.arange(rows) * (memory * 4)
    for share in prange(parts):
        lanes, wide = rooms(rows)
        n0, n1 = columns(width, share, parts)
        share_vector(fp8, _FP8, wkv[0], wkv[1], width, memory, n0, n1, x_T, y_TN, lanes, wide)
        for t in range(rows):
            round_row(y_TN[t, n0:n1], native)
    for share in prange(parts):
        for i in range(rows * copies * share // parts, rows * copies * (share + 1) // parts):
            t, s = i // copies, i % copies
            x_D, out_D, value_D = x_TSD[t, s], out_TSD[t, s], y_TN[t, copies * hidden :]
            gate = _F32(0) if image_T[t] else _gate(x_D, weight_SD[s], y_TN[t, s * hidden : (s + 1) * hidden], eps)
            for d in range(hidden):
                total = x_D[d] + gate * value_D[d]
                out_D[d] = round_bf16(total) if native else total


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """What `engram_rows` runs on `path`."""
    return (_engram,) if has_vectors(path) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramRows:
    """A layer's Engram as the kernel takes it: addresses of its table and weight, which `held` keeps in memory."""

    table: tuple[int, int, int, int]
    wkv: tuple[int, int]
    weight: Array
    eps: Any
    held: tuple[Any, ...]

    @classmethod
    def of(
        cls, table: tuple[Tensor, Tensor] | None, wkv: Weight, q_weight_SD: Tensor, k_weight_SD: Tensor, *, eps: float
    ) -> EngramRows | None:
        """None where the kernel does not read a layer: a table (codes and scales) or a weight that is not FP8 or lies
        in no memory of its own, rows that are no multiple of 32.

        Args:
            table: codes uint8 [rows, W] and scales uint8 [rows, W / 32]; None for a plain one.
            wkv: [(S + 1) D, M].
            q_weight_SD: fp32, of the stream.
            k_weight_SD: fp32, of the keys.
            eps: of both norms.
        """
        if table is None or type(wkv) is not Fp8Weight or not wkv.addresses:
            return None
        codes, scales = table
        if (
            codes.shape[1] % TILE
            or codes.device.type != "cpu"
            or not (codes.is_contiguous() and scales.is_contiguous())
        ):
            return None
        weight = (q_weight_SD.detach() * k_weight_SD.detach()).float().contiguous().numpy()
        return cls(
            table=(codes.data_ptr(), scales.data_ptr(), *codes.shape),
            wkv=wkv.addresses,
            weight=weight,
            eps=_F32(eps),
            held=(codes, scales, wkv),
        )


def engram_rows(
    x_TSD: Tensor, layer: EngramRows, index_TE: Tensor, image_T: Tensor | None, native: bool
) -> Tensor | None:
    """The streams after the write, fp32 [T, S, D], rounded where native rounds; without gradients.

    Args:
        x_TSD: the streams, fp32 or bf16.
        layer: from `EngramRows.of`.
        index_TE: int64 table rows.
        image_T: bool, rows of image spans, which get nothing; None for none.
        native: SPEC 3 numerics.

    Returns:
        None for what the op-by-op path refuses: an id outside the table, a NaN scale, a NaN or an Inf to quantise.
    """
    refuse_gradients(x_TSD)
    x = floats(x_TSD)
    rows, copies, hidden = x.shape
    index = np.ascontiguousarray(index_TE.numpy())
    image = np.zeros(rows, np.uint8) if image_T is None else image_T.to(torch.uint8).contiguous().numpy()
    memory = index.shape[1] * layer.table[3]
    out, fine, room = np.empty(x.shape, np.float32), np.empty(rows, np.bool_), np.empty(rows * memory, np.float32)
    parts = parts_of(rows * memory * (copies + 1) * hidden)
    known, sizes = (layer.table, layer.wkv, layer.weight, layer.eps), (image, native, room)
    _engram(FP8.marker, x, index, *known, *sizes, out, fine, parts, tasks=parts)
    return torch.from_numpy(out) if all(fine.tolist()) else None
