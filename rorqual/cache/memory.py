"""Zeroed memory for what is large and read all over, in large pages where the system has them."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Bytes of a large page on x86-64, and with 4 KiB base pages on ARM."""
LEAST = 64 << 20
"""Smaller memory may come from the heap, which would stay as advised for those who get it next; and its base pages are
not many more than a translation cache holds."""


def zeros_in_large_pages(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    """uint8 zeros, in memory for which Linux is asked to use large pages; elsewhere as `torch.zeros`.

    A scan of index keys takes a few kilobytes from every page of a cache, 114 KB apart. In base pages of 4 KiB each of
    them misses the translation cache, and the entry of the page table that is then needed is in no cache either.
    """
    pool = torch.empty(*shape, dtype=torch.uint8, device=device)
    if pool.device.type == "cpu" and pool.numel() >= LEAST:
        # Before the first write: pages that exist already are joined only later, if at all.
        _ask_for_large_pages(pool)
    return pool.zero_()


def _ask_for_large_pages(data: Tensor) -> None:
    """A hint; a system that does not know it, or refuses, leaves the memory as it is."""
    first = -(-data.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    size = (data.data_ptr() + data.numel() * data.element_size()) // LARGE_PAGE * LARGE_PAGE - first
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if sys.platform != "linux" or advice is None or size <= 0:
        return
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(advice))
