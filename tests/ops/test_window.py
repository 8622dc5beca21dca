"""`window_rows` against what `PagedKV.window` does op by op: same keys, same bytes in the ring, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rorqual.cache.rings import WindowRings
from rorqual.errors import FormatError
from rorqual.formats.codec import dequantize, quantize
from rorqual.formats.spec import E2M1_E8M0_32, E4M3_E8M0_32
from rorqual.ops import cpu
from rorqual.ops.fast.window import window_rows

WIDTH, ROWS = 64, 9

pytestmark = pytest.mark.skipif(bool(cpu.missing("vector")), reason="this CPU has no vector path")


def values(count: int, seed: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3


def filled(start: int) -> WindowRings:
    """A ring that holds the positions before `start`, as far as it can."""
    rings = WindowRings(1, 1, ROWS, WIDTH, E4M3_E8M0_32)
    rings.poison(0)
    if start:
        rings.write(0, 0, 0, quantize(values(start, 1), E4M3_E8M0_32))
    return rings


def by_op(rings: WindowRings, kv_nC: Tensor, start: int, base: int) -> Tensor:
    held = rings.read(0, 0, base, start)
    packed = quantize(kv_nC, E4M3_E8M0_32)
    rings.write(0, 0, start, packed)
    parts = [dequantize(p.codes, p.scales, E4M3_E8M0_32) for p in (held, packed)]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("start", "base", "count"),
    [(0, 0, 1), (0, 0, 9), (5, 5, 3), (5, 1, 3), (8, 0, 1), (30, 22, 1), (30, 26, 4), (31, 23, 9)],
)
def test_keys_and_ring_are_those_of_the_ops(start: int, base: int, count: int, dtype: torch.dtype) -> None:
    kv, ours, theirs = values(count, 2).to(dtype), filled(start), filled(start)
    keys = window_rows(ours.data[0, 0], E4M3_E8M0_32, kv, start, base)
    assert keys is not None and torch.equal(keys, by_op(theirs, kv, start, base))
    assert torch.equal(ours.data, theirs.data)


def test_extremes_keep_their_bits() -> None:
    kv = torch.zeros(3, WIDTH)
    kv[0, :4] = torch.tensor([-0.0, 1e-9, 3e38, -2e-38])
    kv[1] = torch.linspace(-448, 448, WIDTH)
    ours, theirs = filled(0), filled(0)
    keys = window_rows(ours.data[0, 0], E4M3_E8M0_32, kv, 0, 0)
    expected = by_op(theirs, kv, 0, 0)
    assert keys is not None and torch.equal(keys.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(ours.data, theirs.data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_leaves_the_ring_as_it_was(bad: float) -> None:
    rings, kv = filled(12), values(2, 2)
    before = rings.data.clone()
    kv[1, 40] = bad
    with pytest.raises(FormatError, match=r"at \(1, 40\); every value must be finite"):
        window_rows(rings.data[0, 0], E4M3_E8M0_32, kv, 12, 8)
    assert torch.equal(rings.data, before)


def test_what_has_no_kernel_is_left_to_the_ops() -> None:
    rings = filled(4)
    before = rings.data.clone()
    assert window_rows(rings.data[0, 0], E2M1_E8M0_32, values(1, 2), 4, 0) is None
    assert window_rows(rings.data[0, 0], E4M3_E8M0_32, values(1, 2)[:, :48], 4, 0) is None
    assert window_rows(rings.data[0, 0], E4M3_E8M0_32, values(ROWS + 1, 2), 4, 0) is None
    assert window_rows(rings.data[0, 0], E4M3_E8M0_32, values(1, 2), 4, 0, path="plain") is None
    assert torch.equal(rings.data, before)
