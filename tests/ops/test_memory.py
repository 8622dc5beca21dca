"""What is asked of the C library."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
