"""The window of a few rows in one pass: held keys decoded, new ones quantised, kept in their ring and decoded too.

The twin of what `model.kv.PagedKV.window` does op by op, bit for bit, for rings of E4M3 rows.

n rows of a segment, R rows of the ring, C head dim, L keys.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rorqual.formats.codec import check_finite
from rorqual.formats.spec import E4M3_E8M0_32, NumberFormat
from rorqual.ops.cpu import Path, best_path
from rorqual.ops.fast.codec import quantize_e4m3_e8m0
from rorqual.ops.fast.decode import BLOCK, E8M0, decode_row
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients

_U32 = np.uint32
GEOMETRY = np.array((0, 0, 0, 0, 0, 0, 0, BLOCK), dtype=np.int64)
"""Of `decode.decode_row`: neither E2M1, nor pages."""
NO_TABLE = np.zeros(0, np.int64)


@kernel("boolean(uint8[:, ::1], uint32[:, ::1], int64, int64, int64[::1], int64[::1], float32[::1], float32[::1])")
def window_kernel(ring_RB, bits_nC, start, base, geometry, table, scales, keys):
    rows, (count, channels) = ring_RB.shape[0], bits_nC.shape
    codes, exponents = np.empty((count, channels), np.uint8), np.empty((count, channels // 32), np.uint8)
    # First of all, so that a NaN leaves the ring as it is.
    if not quantize_e4m3_e8m0(bits_nC, _U32(0), 32, codes, exponents):
        return False
    region, row_bytes = (ring_RB.reshape(-1), geometry, table, scales), ring_RB.shape[1]
    # Held keys before new ones are kept: these may take their rows.
    for position in range(base, start):
        at = position % rows * row_bytes
        decode_row(region, at, at + channels, channels, keys, (position - base) * channels)
    for i in range(count):
        at = (start + i) % rows
        ring_RB[at, :channels] = codes[i]
        ring_RB[at, channels:] = exponents[i]
        decode_row(region, at * row_bytes, at * row_bytes + channels, channels, keys, (start + i - base) * channels)
    return True


def kernels(path: Path) -> tuple[Kernel, ...]:
    """What `window_rows` runs on `path`."""
    return () if path == "plain" else (window_kernel,)


def window_rows(
    ring_RB: Tensor, fmt: NumberFormat, kv_nC: Tensor, start: int, base: int, *, path: Path | None = None
) -> Tensor | None:
    """Keep the keys of positions [start, start + n) and return those of [base, start + n), fp32 [L, C].

    None, and nothing is done, where there is no kernel: another format or width, more rows than the ring has.

    Raises:
        FormatError: NaN or Inf; the ring is as it was.
    """
    count, channels = kv_nC.shape
    if fmt is not E4M3_E8M0_32 or channels % BLOCK or count > ring_RB.shape[0] or (path or best_path()) == "plain":
        return None
    refuse_gradients(kv_nC)
    kv = kv_nC.detach().to(torch.float32).contiguous()
    keys = torch.empty(start + count - base, channels)
    bits = kv.numpy().view(np.uint32)
    if not window_kernel(ring_RB.numpy(), bits, start, base, GEOMETRY, NO_TABLE, E8M0, keys.view(-1).numpy()):
        check_finite(kv_nC, fmt)
    return keys
