"""Large pages are asked for where Linux has them, and the memory is zero either way."""

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
def test_linux_is_asked_for_large_pages_inside_and_not_beyond() -> None:
    pool = zeros_in_large_pages(LEAST)
    first = -(-pool.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    end = (pool.data_ptr() + pool.numel()) // LARGE_PAGE * LARGE_PAGE
    assert "hg" in flags_at(first)
    assert "hg" in flags_at(end - 1)
    if pool.data_ptr() < first:
        assert "hg" not in flags_at(pool.data_ptr())


@pytest.mark.parametrize(("name", "value"), [("platform", "darwin"), ("MADV_HUGEPAGE", None)])
def test_other_systems_go_without(monkeypatch: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    owner = sys if name == "platform" else mmap
    if value is None:
        monkeypatch.delattr(owner, name, raising=False)
    else:
        monkeypatch.setattr(owner, name, value)
    pool = zeros_in_large_pages(LEAST)
    assert not pool.any()
    if HAS_LARGE_PAGES:
        assert "hg" not in flags_at(pool.data_ptr() + 2 * LARGE_PAGE)
