"""The projections of attention for a few rows, fused: twins of `latents` and `project` of `model.attention.Attention`.

    latents   x -> Wq_a, Wkv -> norms -> Wq_b -> rotation: the queries, the window KV, and the normed q latent
    project   o -> rotated back -> Wo_a, group by group -> Wo_b

One kernel each, threads sharing the columns of every product. Products and norms are the parts of `linear` and `norm`,
in their order, and rotation is elementwise: the bits are those of the op-by-op path.

T rows, D hidden, Q q_lora rank, H heads, C head dim, R rotary channels, G output groups, L o_lora rank.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.formats.codec import check_finite
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import TILE, Fp8Weight, Weight
from rorqual.ops.cpu import Path
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients
from rorqual.ops.fast.linear import has_vectors, parts_of
from rorqual.ops.fast.norm import norm_row, round_row
from rorqual.ops.fast.row_kernels import address, columns, pack_row, part, rooms, share_vector
from rorqual.ops.fast.row_vectors import FP8, Array

_F32 = np.float32
_FP8 = FP8.code, FP8.unit, FP8.scale_rows


@part
def turned(x_C, cos_r, sin_r, native):
    """The trailing channels of one head rotated in place, rounded before and after."""
    round_row(x_C, native)
    first = x_C.shape[0] - 2 * cos_r.shape[0]
    for j in range(cos_r.shape[0]):
        a, b = x_C[first + 2 * j], x_C[first + 2 * j + 1]
        x_C[first + 2 * j] = a * cos_r[j] - b * sin_r[j]
        x_C[first + 2 * j + 1] = a * sin_r[j] + b * cos_r[j]
    round_row(x_C, native)


ANGLES = "UniTuple(float32[:, ::1], 2)"
_LATENTS = (
    f"void(uint8[::1], float32[:, ::1], int64[:, ::1], UniTuple(float32[::1], 2), {ANGLES}, float32, boolean, "
    "float32[::1], float32[:, ::1], float32[:, :, ::1], float32[:, ::1], boolean[::1], int64)"
)


@kernel(_LATENTS, parallel=True)
def latents_kernel(fp8, x_TD, weights, norms, angles, eps, native, room, qr_TQ, q_THC, kv_TC, finite_T, parts):
    """weights: addresses of codes and scales of Wq_a, Wq_b, Wkv [3, 2]. norms: q's, kv's. room: [T (D + Q)], used by
    address and so not the kernel's own. finite_T: False where native has a NaN or an Inf to quantise."""
    (rows, hidden), latent, (_, heads, channels) = x_TD.shape, qr_TQ.shape[1], q_THC.shape
    (q_norm, kv_norm), (cos_Tr, sin_Tr) = norms, angles
    x_packed, q_packed = room[: rows * hidden].reshape(rows, hidden), room[rows * hidden :].reshape(rows, latent)
    for t in range(rows):
        finite_T[t] = pack_row(x_TD[t], True, native, x_packed[t])
    x_T, qr_T = address(x_packed) + np.arange(rows) * (hidden * 4), address(q_packed) + np.arange(rows) * (latent * 4)
    w, s = weights[:, 0], weights[:, 1]
    for share in prange(parts):
        lanes, wide = rooms(rows)
        n0, n1 = columns(latent, share, parts)
        share_vector(fp8, _FP8, w[0], s[0], latent, hidden, n0, n1, x_T, qr_TQ, lanes, wide)
        n0, n1 = columns(channels, share, parts)
        share_vector(fp8, _FP8, w[2], s[2], channels, hidden, n0, n1, x_T, kv_TC, lanes, wide)
    for t in range(rows):
        norm_row(qr_TQ[t], q_norm, eps, native)
        finite = pack_row(qr_TQ[t], True, native, q_packed[t])
        finite_T[t] = finite_T[t] and finite
        norm_row(kv_TC[t], kv_norm, eps, native)
        turned(kv_TC[t], cos_Tr[t], sin_Tr[t], native)
    width = heads * channels
    q_TN = q_THC.reshape(rows, width)
    for share in prange(parts):
        lanes, wide = rooms(rows)
        # Whole heads, so that a thread can turn what it has made; `of` rejects heads of odd eights.
        h0, h1 = heads * share // parts, heads * (share + 1) // parts
        share_vector(fp8, _FP8, w[1], s[1], width, latent, h0 * channels, h1 * channels, qr_T, q_TN, lanes, wide)
        for t in range(rows):
            for h in range(h0, h1):
                turned(q_THC[t, h], cos_Tr[t], sin_Tr[t], native)


_PROJECT = (
    f"void(uint8[::1], float32[:, :, ::1], int64[:, ::1], int64[::1], {ANGLES}, boolean, int64, "
    "float32[::1], float32[:, ::1], boolean[::1], int64)"
)


@kernel(_PROJECT, parallel=True)
def project_kernel(fp8, o_THC, groups, wo_b, angles, native, rank, room, out_TD, finite_T, parts):
    """groups: addresses of codes and scales of every group's Wo_a [G, 2]. wo_b: of Wo_b's. angles: to rotate back.
    rank: L. room: [T (H C + G L)]. o is rotated in place."""
    (rows, heads, channels), count, hidden = o_THC.shape, groups.shape[0], out_TD.shape[1]
    (cos_Tr, sin_Tr), width, latent = angles, heads * channels // groups.shape[0], groups.shape[0] * rank
    # Groups lie apart: group g of row t is row t G + g.
    o_packed = room[: rows * heads * channels].reshape(rows * count, width)
    packed = room[rows * heads * channels :].reshape(rows, latent)
    for t in range(rows):
        for h in range(heads):
            turned(o_THC[t, h], cos_Tr[t], sin_Tr[t], native)
    o_RW = o_THC.reshape(rows * count, width)
    for r in range(rows * count):
        pack_row(o_RW[r], True, False, o_packed[r])
    y_GTL = np.empty((count, rows, rank), np.float32)
    for share in prange(parts):
        lanes, wide = rooms(rows)
        n0, n1 = columns(rank, share, parts)
        for g in range(count):
            o_T = address(o_packed) + (np.arange(rows) * count + g) * (width * 4)
            share_vector(fp8, _FP8, groups[g, 0], groups[g, 1], rank, width, n0, n1, o_T, y_GTL[g], lanes, wide)
    work = np.empty(latent, np.float32)
    for t in range(rows):
        for g in range(count):
            work[g * rank : (g + 1) * rank] = y_GTL[g, t]
        round_row(work, native)
        finite_T[t] = pack_row(work, True, native, packed[t])
    latent_T = address(packed) + np.arange(rows) * (latent * 4)
    for share in prange(parts):
        lanes, wide = rooms(rows)
        n0, n1 = columns(hidden, share, parts)
        share_vector(fp8, _FP8, wo_b[0], wo_b[1], hidden, latent, n0, n1, latent_T, out_TD, lanes, wide)


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """What `latents` and `project` run on `path`."""
    return (latents_kernel, project_kernel) if has_vectors(path) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRows:
    """A layer's projections as the kernels take them: addresses of its weights, which `held` keeps in memory."""

    weights: Array
    groups: Array
    wo_b: Array
    norms: tuple[Array, Array]
    eps: Any
    hidden: int
    latent: int
    heads: int
    channels: int
    rank: int
    held: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        wq_a: Weight,
        wq_b: Weight,
        wkv: Weight,
        wo_a: Sequence[Weight],
        wo_b: Weight,
        q_norm: Tensor,
        kv_norm: Tensor,
        *,
        eps: float,
        heads: int,
    ) -> AttentionRows | None:
        """None where the kernels do not read a layer: weights that are not FP8 or lie in no memory of their own, widths
        that are no multiple of 32, heads that are none of 8."""
        dense = [wq_a, wq_b, wkv, *wo_a, wo_b]
        if not all(type(w) is Fp8Weight and w.addresses and w.shape[1] % TILE == 0 for w in dense):
            return None
        (latent, hidden), channels, rank = wq_a.shape, wkv.shape[0], wo_a[0].shape[0]
        if channels % 8 or latent % TILE or rank % TILE or wq_b.shape[0] != heads * channels:
            return None
        at: list[Any] = [w.addresses for w in dense if type(w) is Fp8Weight]
        norms = (q_norm.detach().float().contiguous().numpy(), kv_norm.detach().float().contiguous().numpy())
        return cls(
            weights=np.array(at[:3], dtype=np.int64),
            groups=np.array(at[3:-1], dtype=np.int64),
            wo_b=np.array(at[-1], dtype=np.int64),
            norms=norms,
            eps=_F32(eps),
            hidden=hidden,
            latent=latent,
            heads=heads,
            channels=channels,
            rank=rank,
            held=(dense, q_norm, kv_norm),
        )


def latents(
    x_TD: Tensor, layer: AttentionRows, cos_sin: tuple[Tensor, Tensor], native: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed q latent [T, Q], rotated queries [T, H, C], rotated window KV [T, C]: fp32, rounded where native rounds.

    Raises:
        FormatError: NaN or Inf in what native quantises.
    """
    refuse_gradients(x_TD)
    x, rows = x_TD.detach().to(torch.float32).contiguous(), x_TD.shape[0]
    qr, q = torch.empty(rows, layer.latent), torch.empty(rows, layer.heads, layer.channels)
    kv, finite = torch.empty(rows, layer.channels), np.empty(rows, np.bool_)
    room, parts = np.empty(rows * (layer.hidden + layer.latent), np.float32), parts_of(q.numel() * layer.latent)
    known = layer.weights, layer.norms, _arrays(cos_sin), layer.eps, native
    latents_kernel(FP8.marker, x.numpy(), *known, room, qr.numpy(), q.numpy(), kv.numpy(), finite, parts, tasks=parts)
    _check(x, finite, native)
    return qr, q, kv


def project(o_THC: Tensor, layer: AttentionRows, cos_sin: tuple[Tensor, Tensor], native: bool) -> Tensor:
    """What attention gave, rotated back, through both output projections: fp32 [T, D] before its last rounding.

    Raises:
        FormatError: NaN or Inf in what native quantises.
    """
    refuse_gradients(o_THC)
    rows = o_THC.shape[0]
    o = o_THC.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)
    out, finite = torch.empty(rows, layer.hidden), np.empty(rows, np.bool_)
    room = np.empty(o.numel() + rows * len(layer.groups) * layer.rank, np.float32)
    (cos, sin), parts = _arrays(cos_sin), parts_of(o.numel() * layer.rank)
    known = layer.groups, layer.wo_b, (cos, -sin), native, layer.rank
    project_kernel(FP8.marker, o.numpy(), *known, room, out.numpy(), finite, parts, tasks=parts)
    _check(o, finite, native)
    return out


def _arrays(cos_sin: tuple[Tensor, Tensor]) -> tuple[Array, Array]:
    cos, sin = cos_sin
    return cos.contiguous().numpy(), sin.contiguous().numpy()


def _check(x: Tensor, finite: Array, native: bool) -> None:
    if native and not finite.all():
        check_finite(x.flatten(1), E4M3_E8M0_32)
        check_finite(torch.full((1, TILE), torch.nan), E4M3_E8M0_32)  # among the activations
