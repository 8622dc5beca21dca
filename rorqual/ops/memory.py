"""What the C library does with memory that a step gave back."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_REUSED = 1 << 30
_EVERYTHING = 2**31 - 1

STEP_BYTES = 256 << 20
"""Freed memory that an inference process keeps at the end of its heap: temporaries of a long chunk."""
SLACK_BYTES = 16 << 20
"""Growth of the holes over several chunks, after which they are handed back."""


class _HeapFigures(ctypes.Structure):
    """glibc's `struct mallinfo2`; of these, `fordblks` are the free bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


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

    Temporaries of tiles at the end of a context have another size in every chunk. Freed between blocks that stay, they
    leave holes that the next ones do not fit: some 3 KB a token of them in `full` mode, which nobody uses. `check`
    hands all that is free back when there is more of it, by `slack`, than after the last time. glibc from 2.33 on tells
    how much there is; elsewhere nothing is done.
    """

    def __init__(self, slack: int = SLACK_BYTES) -> None:
        self.slack = slack
        self._least: int | None = None
        library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
        self._trim = getattr(library, "malloc_trim", None)
        self._figures = getattr(library, "mallinfo2", None)
        if self._figures is not None:
            self._figures.restype = _HeapFigures

    def check(self) -> bool:
        """Between two long chunks; whether memory was handed back."""
        if self._trim is None or self._figures is None:
            return False
        now = int(self._figures().fordblks)
        if self._least is None or now < self._least:
            self._least = now
        if now - self._least < self.slack:
            return False
        # What the next chunk leaves behind is what later ones are compared with.
        self._least = None
        return bool(self._trim(0))
