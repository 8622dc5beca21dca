"""Large pages are asked for where Linux has them, and the memory is zero either way."""

import ctypes
import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from rorqual.cache.memory import LARGE_PAGE, LEAST, zeros_in_large_pages

HAS_LARGE_PAGES = sys.platform == "linux" and Path("/sys/kernel/mm/transparent_hugepage").is_dir()


def flags_at(address: int) -> list[str]:
    """Kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 1 << 20), (2, LARGE_PAGE)])
def test_all_bytes_are_zero_and_can_be_written(shape: tuple[int, ...]) -> None:
    # What was freed just before holds other bytes.
    torch.full(shape, 9, dtype=torch.uint8)
    pool = zeros_in_large_pages(*shape)
    assert pool.shape == shape
    assert pool.dtype == torch.uint8
    assert pool.is_contiguous()
    assert not pool.any()
    pool.fill_(1)
    assert int(pool.sum()) == pool.numel()


@pytest.mark.skipif(not HAS_LARGE_PAGES, reason="no large pages on this system")
def test_linux_is_asked_for_large_pages() -> None:
    pool = zeros_in_large_pages(LEAST)
    assert "hg" in flags_at(-(-pool.data_ptr() // LARGE_PAGE) * LARGE_PAGE)
    assert "hg" in flags_at((pool.data_ptr() + pool.numel()) // LARGE_PAGE * LARGE_PAGE - 1)


class Library:
    """Stands in for the C library: what is asked of it is written down, and refused."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def madvise(self, first: ctypes.c_void_p, size: ctypes.c_size_t, advice: ctypes.c_int) -> int:
        self.asked.append((first.value or 0, size.value, advice.value))
        return -1


@pytest.mark.parametrize(("name", "value"), [("platform", "linux"), ("platform", "darwin"), ("MADV_HUGEPAGE", None)])
def test_what_is_asked_of_which_system(monkeypatch: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    """Of Linux whole large pages inside the memory and none beyond; of others, or without the advice, nothing."""
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    if value is None:
        monkeypatch.delattr(mmap, name)
    else:
        monkeypatch.setattr(sys, name, value)
    pool = zeros_in_large_pages(LEAST)
    assert not pool.any()
    assert len(library.asked) == (value == "linux")
    for first, size, advice in library.asked:
        assert advice == 14 and first % LARGE_PAGE == size % LARGE_PAGE == 0
        assert pool.data_ptr() <= first < pool.data_ptr() + LARGE_PAGE
        assert 0 <= pool.data_ptr() + pool.numel() - (first + size) < LARGE_PAGE
    assert not zeros_in_large_pages(LEAST - 1).any() and len(library.asked) == (value == "linux")
