"""What stands between two sub-layers of many rows, in one pass over the streams: `hyper_rows.enter` for long segments,
and the end of a layer.

A thread takes thirty-two rows at a time: it adds what the last sub-layer gave, turns the rows to two panels, multiplies
them with the mix, and while they are still in its cache makes their coefficients, sixteen rows side by side, and the
next sub-layer's input. Streams and inputs are those of the op-by-op path bit for bit; coefficients differ in last bits.

T rows, n copies of the residual, D hidden, C = n D, M = (2 + n) n mixes.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.ops.cpu import Path
from rorqual.ops.fast.hyper import collapse_vectors, expand_vectors
from rorqual.ops.fast.hyper_rows import Entered, MixRows
from rorqual.ops.fast.kernel import Kernel, inlined, kernel, refuse_gradients
from rorqual.ops.fast.linear import form_of, has_vectors, parts_of
from rorqual.ops.fast.norm import inverse_rms, norm_row
from rorqual.ops.fast.panels import SPARE, decode_rows, turn_plain
from rorqual.ops.fast.row_kernels import address
from rorqual.ops.fast.row_vectors import FP32, Array
from rorqual.ops.fast.tiles import product
from rorqual.ops.fast.vectors import (
    LANES,
    add,
    divide,
    exp,
    load,
    maximum,
    multiply,
    round_bf16,
    splat,
    store,
    subtract,
)

_F32 = np.float32
BLOCK_ROWS = 2 * LANES
_SIGNATURE = (
    "void(float32[::1], float32[::1], Tuple((float32[::1], float32[::1])), float32[::1],"
    " Tuple((int64, float32[::1], float32[::1], float32[::1])), Tuple((float32, float32, float32, int64)),"
    " UniTuple(int64, 3), UniTuple(int64, 3), boolean, float32[::1],"
    " Tuple((float32[::1], float32[::1], float32[::1])), float32[::1], float32[::1], int64)"
)


@inlined
def _sigmoid(x):
    one = splat(_F32(1))
    return divide(one, add(one, exp(multiply(x, splat(_F32(-1))))))


@inlined
def _normalize(room, at, n, across, along, hc_eps):
    """Each of n groups over its sum plus eps; vector (i, j) of the groups stands at at + i * across + j * along."""
    for i in range(n):
        total = load(room, at + i * across)
        for j in range(1, n):
            total = add(total, load(room, at + i * across + j * along))
        total = add(total, splat(hc_eps))
        for j in range(n):
            place = at + i * across + j * along
            store(room, place, divide(load(room, place), total))


@inlined
def _split(room, mixes, factor, n, scale_3, base_M, hc_eps, iters):
    """`hyper.split` of sixteen rows in place: vector m of the mixes stands at mixes + 2 m LANES."""
    step = 2 * LANES
    for m in range((2 + n) * n):
        kind = min(m // n, 2)
        at = mixes + m * step
        value = multiply(multiply(load(room, at), factor), splat(scale_3[kind]))
        value = add(value, splat(base_M[m]))
        if kind == 0:
            value = add(_sigmoid(value), splat(hc_eps))
        elif kind == 1:
            value = multiply(splat(_F32(2)), _sigmoid(value))
        store(room, at, value)
    comb, row = mixes + 2 * n * step, n * step
    for j in range(n):
        top = load(room, comb + j * row)
        for k in range(1, n):
            top = maximum(load(room, comb + j * row + k * step), top)
        total = splat(_F32(0))
        for k in range(n):
            value = exp(subtract(load(room, comb + j * row + k * step), top))
            total = add(total, value)
            store(room, comb + j * row + k * step, value)
        for k in range(n):
            value = load(room, comb + j * row + k * step)
            store(room, comb + j * row + k * step, add(divide(value, total), splat(hc_eps)))
    _normalize(room, comb, n, step, row, hc_eps)
    for _ in range(iters - 1):
        _normalize(room, comb, n, row, step, hc_eps)
        _normalize(room, comb, n, step, row, hc_eps)


@inlined
def _streams(out, x, post, comb, t, n, width, native, y):
    """One row's streams after the last sub-layer's output was added, where there is one."""
    if out.size:
        for k in range(n):
            expand_vectors(out, x, post, comb, t, n, k, width, y)
        if native:
            for i in range(t * n * width, (t + 1) * n * width, LANES):
                store(y, i, round_bf16(load(y, i)))


@inlined
def _write(room, mixes, lane, n, t, pre, post, comb):
    """One row's coefficients, out of their lane."""
    at = mixes + lane
    for j in range(n):
        pre[t * n + j] = room[at + 2 * j * LANES]
        post[t * n + j] = room[at + 2 * (n + j) * LANES]
    for i in range(n * n):
        comb[t * n * n + i] = room[at + 2 * (2 * n + i) * LANES]


@kernel(_SIGNATURE, parallel=True)
def _enter(x, out, written, pre, mix, settings, form, sizes, native, y, mixed, inner, room, parts):
    (rows, n, width), (fn, scale_3, base_M, norm_D), (mix_eps, hc_eps, eps, iters) = sizes, mix, settings
    k, mixes = n * width, base_M.size
    for share in prange(parts):
        at, step = share * (room.size // parts), k + SPARE
        panels = at + mixes * step
        tile, factors = panels + 2 * k * LANES, panels + 2 * k * LANES + mixes * 2 * LANES
        index = np.empty(BLOCK_ROWS, np.int64)
        decode_rows(form, fn, fn, k, 0, mixes, address(room) + 4 * at)
        blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
        for first in range(
            blocks * share // parts * BLOCK_ROWS, blocks * (share + 1) // parts * BLOCK_ROWS, BLOCK_ROWS
        ):
            last = min(rows, first + BLOCK_ROWS)
            for t in range(first, last):
                _streams(out, x, written[0], written[1], t, n, width, native, y)
                room[factors + t - first] = inverse_rms(y[t * k : (t + 1) * k], mix_eps)
            for i in range(BLOCK_ROWS):
                index[i] = min(first + i, last - 1)
            for v in range(2):
                for c in range(0, k, LANES):
                    turn_plain(y, index, v * LANES, k, c, room, panels + (v * k + c) * LANES)
            product(room, at, step, 1, mixes, room, panels, LANES, k * LANES, 2, k, room, tile, 2 * LANES, False)
            for v in range(2):
                factor = load(room, factors + v * LANES)
                _split(room, tile + v * LANES, factor, n, scale_3, base_M, hc_eps, iters)
            for t in range(first, last):
                _write(room, tile, t - first, n, t, mixed[0], mixed[1], mixed[2])
                collapse_vectors(y, pre, t, n, width, inner)
                norm_row(inner[t * width : (t + 1) * width], norm_D, eps, native)


@kernel("void(float32[::1], float32[::1], float32[::1], float32[::1], UniTuple(int64, 3), int64)", parallel=True)
def _leave(out, x, post, comb, sizes, parts):
    """One row at a time goes to a thread's room, and its streams come back to where it was."""
    rows, n, width = sizes
    k = n * width
    for share in prange(parts):
        room = np.empty(k, np.float32)
        for t in range(rows * share // parts, rows * (share + 1) // parts):
            room[:] = x[t * k : (t + 1) * k]
            out_D, to = out[t * width : (t + 1) * width], x[t * k : (t + 1) * k]
            post_n, comb_nn = post[t * n : (t + 1) * n], comb[t * n * n : (t + 1) * n * n]
            for copy in range(n):
                expand_vectors(out_D, room, post_n, comb_nn, 0, n, copy, width, to)


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """What `enter` and `leave` run on `path`."""
    return (_enter, _leave) if has_vectors(path) else ()


def enter(
    x_TnD: Tensor,
    pre_Tn: Tensor,
    layer: MixRows,
    native: bool,
    written: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Entered:
    """As `hyper_rows.enter`, for many rows."""
    refuse_gradients(x_TnD, pre_Tn)
    rows, n, width = x_TnD.shape
    x, mixes = _flat(x_TnD), layer.mix[2].size
    streams = torch.empty(x_TnD.shape) if written else torch.from_numpy(x).view(x_TnD.shape)
    inner, pre, post, comb = (
        torch.empty(rows, width),
        torch.empty(rows, n),
        torch.empty(rows, n),
        torch.empty(rows, n, n),
    )
    out, *rest = (_flat(tensor) for tensor in written) if written else (_NONE, _NONE, _NONE)
    parts = parts_of(x.size * n)
    # The mix, two panels, their products, and a factor a row.
    room = np.empty(parts * (mixes * (n * width + SPARE + BLOCK_ROWS) + BLOCK_ROWS * (n * width + 1)), np.float32)
    given = x, out, tuple(rest), _flat(pre_Tn), layer.mix, layer.settings, form_of(FP32), (rows, n, width), native
    mixed = tuple(tensor.view(-1).numpy() for tensor in (pre, post, comb))
    _enter(*given, streams.view(-1).numpy(), mixed, inner.view(-1).numpy(), room, parts, tasks=parts)
    return Entered(streams, inner, pre, post, comb)


def leave(out_TD: Tensor, x_TnD: Tensor, post_Tn: Tensor, comb_Tnn: Tensor) -> Tensor:
    """As `hyper.hyper_expand`, bit for bit, for streams that nobody reads afterwards: fp32 ones are written over."""
    refuse_gradients(out_TD, x_TnD, post_Tn, comb_Tnn)
    streams, (rows, n, width) = x_TnD.detach().to(torch.float32).contiguous(), x_TnD.shape
    parts = parts_of(streams.numel() * n)
    given = _flat(out_TD), streams.view(-1).numpy(), _flat(post_Tn), _flat(comb_Tnn)
    _leave(*given, (rows, n, width), parts, tasks=parts)
    return streams


_NONE = np.empty(0, np.float32)


def _flat(tensor: Tensor) -> Array:
    return tensor.detach().to(torch.float32).contiguous().view(-1).numpy()
