"""What is asked of the C library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rorqual.ops.memory import TRIM_CHUNKS, HeapBound

REUSE = """
import resource, torch
from rorqual.ops.memory import STEP_BYTES, keep_freed_memory
if {keep}:
    assert keep_freed_memory(STEP_BYTES) and keep_freed_memory(STEP_BYTES)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.zeros(12 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


def _faults(keep: bool) -> int:
    """Pages that eight tensors of 48 MB, each freed before the next, touch first; in a process of its own, because the
    setting cannot be taken back."""
    script = REUSE.format(keep=keep)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_freed_memory_is_reused() -> None:
    pages = 8 * (48 << 20) // 4096
    if _faults(keep=False) < pages // 2:
        pytest.skip("this C library hands no block of 48 MB back, or pages are not of 4 KB")
    assert _faults(keep=True) < pages // 4


HOLE = """
import numpy as np
from pathlib import Path
from rorqual.ops.memory import TRIM_CHUNKS, HeapBound, keep_freed_memory
assert keep_freed_memory()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

heap = HeapBound()
assert not any(heap.check() for _ in range(TRIM_CHUNKS - 1))
block = np.full(64 << 20, 1, np.uint8)
pin = np.full(1 << 20, 1, np.uint8)
del block
held = resident()
assert heap.check()
print(held - resident())
assert not heap.check() and pin[0] == 1
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_a_hole_between_blocks_that_stay_is_handed_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 48 << 20


def test_memory_is_handed_back_after_every_few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    heap, trims = HeapBound(), []
    monkeypatch.setattr(heap, "_trim", lambda pad: trims.append(pad) or 1)
    handed_back = [heap.check() for _ in range(2 * TRIM_CHUNKS + 1)]
    assert [i for i, done in enumerate(handed_back, 1) if done] == [TRIM_CHUNKS, 2 * TRIM_CHUNKS]
    assert trims == [0, 0]


def test_without_such_a_library_nothing_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    heap = HeapBound()
    assert not any(heap.check() for _ in range(2 * TRIM_CHUNKS))
