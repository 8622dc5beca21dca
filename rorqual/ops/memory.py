"""What the C library does with memory that a step gave back."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_REUSED = 1 << 30
_EVERYTHING = 2**31 - 1

STEP_BYTES = 256 << 20
"""Freed memory that an inference process keeps at the end of its heap: temporaries of a long chunk."""


def keep_freed_memory(most: int = _EVERYTHING) -> bool:
    """Let the C library keep what it frees, for the rest of the process; False where it cannot be told.

    glibc hands large blocks, and the free end of its heap, back to the system, and what is allocated next is zeroed
    page by page: of a large elementwise op that is most of its time. A step's tensors have the sizes of the last
    step's; kept, they are reused.

    most: bytes at the free end of a heap beyond which that end is handed back after all.
    """
    if not sys.platform.startswith("linux"):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    reused = bool(set_option(_MMAP_THRESHOLD, _LARGEST_REUSED))
    return bool(set_option(_TRIM_THRESHOLD, most)) and reused
