"""What the C library does with memory that a step gave back."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_REUSED = 1 << 30
_EVERYTHING = 2**31 - 1

STEP_BYTES = 256 << 20
"""Freed memory that an inference process keeps at the end of its heap: temporaries of a long chunk."""
SLACK_BYTES = 16 << 20
"""Growth of a process over several chunks, after which its holes are handed back."""


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
    leave holes that the next ones do not fit: some 3 KB a token of them, which nobody uses. `check` hands all that is
    free back when the process has grown by `slack` since the last time; what a step needs is then touched anew, so not
    after every chunk.
    """

    def __init__(self, slack: int = SLACK_BYTES) -> None:
        self.slack = slack
        self._least: int | None = None
        library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
        self._trim = getattr(library, "malloc_trim", None)

    def check(self) -> bool:
        """Between two long chunks; whether memory was handed back."""
        if self._trim is None:
            return False
        now = _own_bytes()
        if self._least is None or now < self._least:
            self._least = now
        if now - self._least < self.slack:
            return False
        # What the next chunk leaves behind is what later ones are compared with.
        self._least = None
        return bool(self._trim(0))


def _own_bytes() -> int:
    """Memory of this process that no file backs."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
