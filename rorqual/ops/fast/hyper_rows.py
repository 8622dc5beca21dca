"""What stands between two sub-layers of a few rows, fused: the twin of `model.layer.Layer`'s `enter_sublayer`.

    streams, after the last sub-layer's output was added      `hyper_expand`, where there is one
    coefficients of the next sub-layer                        `hyper_mix`
    its input: copies collapsed, then normed                  `hyper_collapse`, `rms_norm`

Parts of `hyper`, `norm` and the row kernels, in their order: the bits are those of the op-by-op path.

T rows, n copies of the residual, D hidden, C = n D, M = (2 + n) n mixes.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.formats.weights import TILE
from rorqual.ops.cpu import Path
from rorqual.ops.fast.hyper import collapse, expand, split
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients
from rorqual.ops.fast.linear import has_vectors, parts_of
from rorqual.ops.fast.norm import inverse_rms, norm_row, round_row
from rorqual.ops.fast.row_kernels import address, columns, part, rooms, share_vector
from rorqual.ops.fast.row_vectors import FP32, Array

_F32 = np.float32
_FP32 = FP32.code, FP32.unit, FP32.scale_rows

_MIXED = "Tuple((float32[:, ::1], float32[:, ::1], float32[:, :, ::1]))"
MIX, SETTINGS = "Tuple((int64, float32[::1], float32[::1], float32[::1]))", "Tuple((float32, float32, float32, int64))"
"""Numba types of what `MixRows` holds."""
_SIGNATURE = (
    "void(float32[::1], float32[:, :, ::1], float32[:, ::1], Tuple((float32[:, ::1], float32[:, :, ::1])), "
    f"float32[:, ::1], {MIX}, {SETTINGS}, boolean, float32[:, :, ::1], "
    f"{_MIXED}, float32[:, ::1], int64)"
)


@part
def _write(r0, r1, out_TD, x_TnD, post_Tn, comb_Tnn, native, y_TnD):
    """The streams of rows [r0, r1) after the last sub-layer."""
    for t in range(r0, r1):
        expand(out_TD[t], x_TnD[t], post_Tn[t], comb_Tnn[t], y_TnD[t])
        for j in range(y_TnD.shape[1]):
            round_row(y_TnD[t, j], native)


@part
def _read(r0, r1, y_TnD, y_TC, mixes_TM, known, pre_Tn, norm_D, eps, native, mixed, inner_TD):
    """Coefficients and inputs of rows [r0, r1)."""
    (scale_3, base_M, mix_eps, hc_eps, iters), (new_pre_Tn, new_post_Tn, new_comb_Tnn) = known, mixed
    for t in range(r0, r1):
        factor = inverse_rms(y_TC[t], mix_eps)
        split(mixes_TM[t], factor, scale_3, base_M, hc_eps, iters, new_pre_Tn[t], new_post_Tn[t], new_comb_Tnn[t])
        collapse(y_TnD[t], pre_Tn[t], inner_TD[t])
        norm_row(inner_TD[t], norm_D, eps, native)


@kernel(_SIGNATURE, parallel=True)
def enter_kernel(fp32, x_TnD, out_TD, written, pre_Tn, mix, settings, native, y_TnD, mixed, inner_TD, parts):
    """out_TD: of the last sub-layer, with no rows where x is to be taken as it is; written: its (post, comb).
    mix: (address of fn [M, C], scale, base, norm [D]). settings: eps of the mix's norm, of the mix, of the norm,
    iterations. y: the streams, x itself where nothing is added. mixed: (pre, post, comb) to write."""
    (rows, copies, hidden), (post_Tn, comb_Tnn) = x_TnD.shape, written
    (fn, scale_3, base_M, norm_D), (mix_eps, hc_eps, eps, iters) = mix, settings
    width, mixes = copies * hidden, base_M.shape[0]
    # A thread is worth its waking for a row of its own, or for a share of the product.
    if rows >= parts and out_TD.shape[0]:
        for share in prange(parts):
            _write(rows * share // parts, rows * (share + 1) // parts, out_TD, x_TnD, post_Tn, comb_Tnn, native, y_TnD)
    elif out_TD.shape[0]:
        _write(0, rows, out_TD, x_TnD, post_Tn, comb_Tnn, native, y_TnD)
    y_T, mixes_TM = address(y_TnD) + np.arange(rows) * (width * 4), np.empty((rows, mixes), np.float32)
    for share in prange(parts):
        lanes, wide = rooms(rows)
        n0, n1 = columns(mixes, share, parts)
        share_vector(fp32, _FP32, fn, fn, mixes, width, n0, n1, y_T, mixes_TM, lanes, wide)
    y_TC = y_TnD.reshape(rows, width)
    known = scale_3, base_M, mix_eps, hc_eps, iters
    if rows >= parts:
        for share in prange(parts):
            r0, r1 = rows * share // parts, rows * (share + 1) // parts
            _read(r0, r1, y_TnD, y_TC, mixes_TM, known, pre_Tn, norm_D, eps, native, mixed, inner_TD)
    else:
        _read(0, rows, y_TnD, y_TC, mixes_TM, known, pre_Tn, norm_D, eps, native, mixed, inner_TD)


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """What `enter` runs on `path`."""
    return (enter_kernel,) if has_vectors(path) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MixRows:
    """A sub-layer's mix and norm as `enter` takes them; `held` keeps what is used by address in memory."""

    mix: tuple[int, Array, Array, Array]
    settings: tuple[Any, Any, Any, int]
    held: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        fn_MC: Tensor,
        scale_3: Tensor,
        base_M: Tensor,
        norm_D: Tensor,
        *,
        mix_eps: float,
        hc_eps: float,
        iters: int,
        eps: float,
    ) -> MixRows | None:
        """None where the kernel does not read it: an fn that is not fp32, a hidden size that is no multiple of 32."""
        if fn_MC.dtype != torch.float32 or norm_D.shape[0] % TILE:
            return None
        fn_MC = fn_MC.detach().contiguous()
        scale, base, norm = (x.detach().float().contiguous().numpy() for x in (scale_3, base_M, norm_D))
        return cls(
            mix=(fn_MC.data_ptr(), scale, base, norm),
            settings=(_F32(mix_eps), _F32(hc_eps), _F32(eps), iters),
            held=(fn_MC,),
        )


class Entered(NamedTuple):
    """streams [T, n, D]; inner [T, D], the sub-layer's input; its pre [T, n], post [T, n], comb [T, n, n]. All fp32."""

    streams: Tensor
    inner: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


_NO_OUT = np.empty((0, 0), np.float32), (np.empty((0, 0), np.float32), np.empty((0, 0, 0), np.float32))


def enter(
    x_TnD: Tensor,
    pre_Tn: Tensor,
    layer: MixRows,
    native: bool,
    written: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Entered:
    """Enter a sub-layer; before that add the last one's output, where `written` is its (out [T, D], post, comb)."""
    refuse_gradients(x_TnD, pre_Tn)
    x, pre = _floats(x_TnD), _floats(pre_Tn)
    rows, copies, hidden = x.shape
    streams = torch.empty(x.shape) if written else torch.from_numpy(x)
    inner, new_pre, new_post = torch.empty(rows, hidden), torch.empty(rows, copies), torch.empty(rows, copies)
    comb = torch.empty(rows, copies, copies)
    out, rest = (_floats(written[0]), (_floats(written[1]), _floats(written[2]))) if written else _NO_OUT
    mixed = (new_pre.numpy(), new_post.numpy(), comb.numpy())
    known, parts = (layer.mix, layer.settings, native), parts_of(x.size * (2 + copies) * copies)
    enter_kernel(FP32.marker, x, out, rest, pre, *known, streams.numpy(), mixed, inner.numpy(), parts, tasks=parts)
    return Entered(streams, inner, new_pre, new_post, comb)


def _floats(x: Tensor) -> Array:
    return x.detach().to(torch.float32).contiguous().numpy()
