"""Gates and ups of many (row, slot) pairs in one kernel over all experts, which leaves the panels that w2 reads.

A unit is sixteen rows of an expert's w1 and the same of its w3, decoded side by side: one product gives the gates and
the ups of sixteen hidden channels, and what is written of them is silu(gate) * up * weight.

P pairs sorted by expert, J experts, I expert width, D inputs, V panels of sixteen pairs.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from rorqual.formats.weights import TILE
from rorqual.ops.fast.kernel import inlined, kernel
from rorqual.ops.fast.panels import SPARE, WEIGHT_ROWS, Panels, decode_rows, room_of
from rorqual.ops.fast.row_kernels import address
from rorqual.ops.fast.row_vectors import Array
from rorqual.ops.fast.tiles import product
from rorqual.ops.fast.vectors import LANES, add, divide, exp, load, maximum, minimum, multiply, round_bf16, splat, store

_F32 = np.float32


@inlined
def _activate(room, gate, up, weight, limit, native, hidden, to):
    """One channel of sixteen pairs, as `experts.activated`."""
    g, u = load(room, gate), load(room, up)
    if native:
        g, u = round_bf16(g), round_bf16(u)
    if limit > 0:
        high, low = splat(limit), splat(-limit)
        g, u = minimum(g, high), maximum(minimum(u, high), low)
    sigmoid = divide(g, add(splat(_F32(1)), exp(multiply(g, splat(_F32(-1))))))
    value = multiply(multiply(sigmoid, u), weight)
    store(hidden, to, round_bf16(value) if native else value)


@inlined
def place_of(channel, paired):
    """Where a channel stands in the order that a weight is decoded in."""
    return channel // TILE * TILE + channel % TILE // 2 + channel % 2 * LANES if paired else channel


@kernel(
    "void(UniTuple(int64, 3), int64[::1], int64[::1], int64[::1], int64[::1], int64, int64, int64[::1], int64[::1],"
    " float32[::1], float32, boolean, boolean, float32[::1], float32[::1], float32[::1], int64)",
    parallel=True,
)
def _gate_up(
    form, w1_J, s1_J, w3_J, s3_J, inner, k, panel_J, last_J, weight, limit, native, paired, panels, hidden, room, parts
):
    chunks = inner // LANES
    for share in prange(parts):
        at, step = share * (room.size // parts), k + SPARE
        tile, ups = at + WEIGHT_ROWS * step, LANES * step
        for unit in range(share, chunks * w1_J.size, parts):
            j, row0 = unit // chunks, unit % chunks * LANES
            decode_rows(form, w1_J[j], s1_J[j], k, row0, LANES, address(room) + 4 * at)
            decode_rows(form, w3_J[j], s3_J[j], k, row0, LANES, address(room) + 4 * (at + ups))
            for v in range(panel_J[j], last_J[j], 2):
                vecs, b_at = min(2, last_J[j] - v), v * k * LANES
                product(
                    room, at, step, 1, WEIGHT_ROWS, panels, b_at, LANES, k * LANES, vecs, k, room, tile, 2 * LANES,
                    False,
                )  # fmt: skip
                for i in range(LANES):
                    row = place_of(row0 + i, paired)
                    for t in range(vecs):
                        gate = tile + (2 * i + t) * LANES
                        up, to = gate + 2 * LANES * LANES, ((v + t) * inner + row) * LANES
                        _activate(room, gate, up, load(weight, (v + t) * LANES), limit, native, hidden, to)


KERNELS = (_gate_up,)


def hidden_panels(
    form: tuple[int, ...],
    gates: tuple[Array, Array],
    ups: tuple[Array, Array],
    shape: tuple[int, int],
    panels: Panels,
    weight_V: Array,
    limit: float,
    native: bool,
    paired: bool,
    parts: int,
) -> Panels:
    """Hidden values of all pairs, in panels for w2.

    Args:
        form: of the `Kind` of w1 and w3.
        gates: addresses of the codes and scales of each expert's w1; ups of its w3.
        shape: (I, D).
        weight_V: routing weight of every lane of the panels, fp32 [16 V].
        paired: w2 is decoded in lane order.
    """
    inner, k = shape
    hidden = np.empty(len(weight_V) * inner, np.float32)
    last = np.append(panels.first[1:], len(weight_V) // LANES)
    form_of_result: tuple[Any, ...] = _F32(limit), native, paired
    _gate_up(
        form, *gates, *ups, inner, k, panels.first, last, weight_V, *form_of_result, panels.values, hidden,
        room_of(k, parts), parts, tasks=parts,
    )  # fmt: skip
    return Panels(hidden, panels.first)
