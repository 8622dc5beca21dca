"""Gates and ups of many (row, slot) pairs in one kernel over all experts, which leaves the rows that w2 reads.

A unit is sixteen rows of an expert's w1 and the same of its w3, decoded side by side: one product gives the gates and
the ups of sixteen hidden channels, and what is written of them is silu(gate) * up * weight.

P pairs sorted by expert, J experts, I expert width, D inputs.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from rorqual.ops.fast.kernel import inlined, kernel
from rorqual.ops.fast.panels import Rows, room_of
from rorqual.ops.fast.row_kernels import address
from rorqual.ops.fast.row_vectors import Array
from rorqual.ops.fast.vectors import LANES, add, divide, exp, load, maximum, minimum, multiply, round_bf16, splat, store
from rorqual.ops.fast.weight_panels import DEPTH, ROWS, WIDTH, multiply_tile, turn_weights

_F32 = np.float32


@inlined
def _activate(g, u, weight, limit, native):
    """Sixteen channels of a pair, as `experts.activated`."""
    if native:
        g, u = round_bf16(g), round_bf16(u)
    if limit > 0:
        high, low = splat(limit), splat(-limit)
        g, u = minimum(g, high), maximum(minimum(u, high), low)
    sigmoid = divide(g, add(splat(_F32(1)), exp(multiply(g, splat(_F32(-1))))))
    value = multiply(multiply(sigmoid, u), splat(weight))
    return round_bf16(value) if native else value


@kernel(
    "void(UniTuple(int64, 3), int64[::1], int64[::1], int64[::1], int64[::1], int64, int64, int64[::1], int64[::1],"
    " float32[::1], float32, boolean, float32[::1], int64[::1], boolean, float32[::1], float32[::1], int64)",
    parallel=True,
)
def _gate_up(
    form, w1_J, s1_J, w3_J, s3_J, inner, k, first_J, last_J, weight_P, limit, native, x, row_P, plain, hidden, room,
    parts,
):  # fmt: skip
    chunks = inner // LANES
    for share in prange(parts):
        panel = share * (room.size // parts)
        sums, kept = panel + WIDTH * DEPTH, WIDTH if k > DEPTH else 0
        for unit in range(share, chunks * w1_J.size, parts):
            j, row0 = unit // chunks, unit % chunks * LANES
            for k0 in range(0, k, DEPTH):
                depth, to = min(DEPTH, k - k0), address(room) + 4 * panel
                turn_weights(form, w1_J[j], s1_J[j], k, row0, LANES, k0, depth, plain, to)
                turn_weights(form, w3_J[j], s3_J[j], k, row0, LANES, k0, depth, plain, to + 4 * LANES)
                for first in range(first_J[j], last_J[j], ROWS):
                    tile = sums + (first - first_J[j]) * kept
                    multiply_tile(x, row_P, first, last_J[j] - 1, k, k0, room, panel, tile, depth, k0 > 0)
                    for p in range(first, min(first + ROWS, last_J[j]) if k0 + depth == k else first):
                        gate = tile + (p - first) * WIDTH
                        value = _activate(load(room, gate), load(room, gate + LANES), weight_P[p], limit, native)
                        store(hidden, p * inner + row0, value)


KERNELS = (_gate_up,)


def hidden_panels(
    form: tuple[int, ...],
    gates: tuple[Array, Array],
    ups: tuple[Array, Array],
    shape: tuple[int, int],
    rows: Rows,
    weight_P: Array,
    limit: float,
    native: bool,
    paired: bool,
    parts: int,
) -> Rows:
    """Hidden values of all pairs, as rows for w2.

    Args:
        form: of the `Kind` of w1 and w3.
        gates: addresses of the codes and scales of each expert's w1; ups of its w3.
        shape: (I, D); I is a multiple of 16.
        weight_P: routing weight of every pair, fp32.
        paired: w2 is decoded in lane order.
    """
    inner, k = shape
    hidden = np.empty(len(weight_P) * inner, np.float32)
    spans = rows.first, rows.last
    room = room_of(int((spans[1] - spans[0]).max()), k, parts)
    form_of_result: tuple[Any, ...] = _F32(limit), native
    _gate_up(
        form, *gates, *ups, inner, k, *spans, weight_P, *form_of_result, rows.x, rows.row, rows.plain, hidden,
        room, parts, tasks=parts,
    )  # fmt: skip
    return Rows(hidden, np.arange(len(weight_P)), paired, *spans)
