"""Numba twin of `rorqual.ops.reference.rope`, the same bits: one pass over the values, or over those that turn."""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.ops.fast.kernel import kernel, refuse_gradients
from rorqual.ops.fast.linear import parts_of
from rorqual.ops.fast.vectors import F32, LANES, add, instruction, load, multiply, pick, store
from rorqual.ops.reference.rope import rotate as plain_rotate

# T rows, D rotated channels of C


@instruction(F32, F32)
def _swapped(builder: Any, x: Any) -> Any:
    """Neighbours in each other's place."""
    return builder.shuffle_vector(x, x, pick([lane ^ 1 for lane in range(LANES)]))


@kernel(
    "void(float32[::1], float32[:, ::1], float32[:, ::1], float32, int64, boolean, float32[::1], int64)", parallel=True
)
def _rotate(x, cos, sin, sign, channels, here, out, parts):
    """here: out is x itself, whose other channels stay as they are."""
    rows, width = cos.shape[0], 2 * cos.shape[1]
    each = x.size // rows
    for share in prange(parts):
        # A pair (a, b) becomes (a cos + b (-sin), b cos + a sin): every product and sum is the plain op's.
        c, s = np.empty(width, np.float32), np.empty(width, np.float32)
        for t in range(rows * share // parts, rows * (share + 1) // parts):
            for j in range(cos.shape[1]):
                c[2 * j] = c[2 * j + 1] = cos[t, j]
                s[2 * j], s[2 * j + 1] = -(sign * sin[t, j]), sign * sin[t, j]
            for at in range(t * each, (t + 1) * each, channels):
                first = at + channels - width
                if not here:
                    whole = (channels - width) // LANES * LANES
                    for i in range(at, at + whole, LANES):
                        store(out, i, load(x, i))
                    for i in range(at + whole, first):
                        out[i] = x[i]
                for i in range(0, width, LANES):
                    values = load(x, first + i)
                    turned = add(multiply(values, load(c, i)), multiply(_swapped(values), load(s, i)))
                    store(out, first + i, turned)


KERNELS = (_rotate,)


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor], *, inverse: bool = False, overwrite: bool = False) -> Tensor:
    """As the plain `rotate`, bit for bit, which also takes what is not on a CPU and other widths. No gradients."""
    cos, sin = cos_sin
    if x.device.type != "cpu" or cos.shape[1] % (LANES // 2) or not x.numel():
        return plain_rotate(x, cos_sin, inverse=inverse)
    refuse_gradients(x)
    values = x.detach().to(torch.float32).contiguous()
    # What was converted or made contiguous is a copy, and may be written whoever owns x.
    out = values if overwrite or values.data_ptr() != x.data_ptr() else torch.empty(x.shape)
    sign, parts = np.float32(-1 if inverse else 1), parts_of(values.numel())
    angles = (cos.contiguous().numpy(), sin.contiguous().numpy())
    flat, to = values.view(-1).numpy(), out.view(-1).numpy()
    _rotate(flat, *angles, sign, x.shape[-1], out is values, to, parts, tasks=parts)
    return out
