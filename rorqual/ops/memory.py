"""What the C library does with memory that a step gave back."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_REUSED = 1 << 30
_EVERYTHING = 2**31 - 1

STEP_BYTES = 256 << 20
"""Freed memory that an inference process keeps at the end of its heap: temporaries of a long chunk."""
TRIM_CHUNKS = 8
"""Long chunks after which the holes in the heap are handed back; one that must touch them anew is 3 to 5 % slower."""


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


class HeapBound:
    """Keeps the holes in the heap from growing with a prompt.

    What a chunk needs does not grow, but where the C library puts it does: a few small blocks that live longer than the
    large ones around them are enough that a large one finds no hole and is put at the end. So all that is free is
    handed back after every few chunks.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
        self._trim = getattr(library, "malloc_trim", None)
        self._chunks = 0

    def check(self) -> bool:
        """Between two long chunks; whether memory was handed back. Does nothing where the C library is not glibc."""
        self._chunks += 1
        if self._trim is None or self._chunks % TRIM_CHUNKS:
            return False
        return bool(self._trim(0))
