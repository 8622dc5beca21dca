"""A writer that is killed at any moment: nothing torn is served, nothing that was flushed is missing."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stores import IDENTITY, PAGE_BYTES, key, page

from rorqual.errors import InputError
from rorqual.store.disk import DiskStore
from rorqual.store.sizes import sizes

KILLS, KILLS_FULL = 8, 200
CHAIN = 4
"""Kills of one folder, each writer going on where the last one died."""
SCRIPT = Path(__file__).with_name("killed_writer.py")
BOUND = 320
SPAN = 100_000
"""Numbers that one writer may use."""
DEADLINE_S = 120


def killed(folder: Path, draw: random.Random, first: int, pages: int) -> int:
    """Run a writer and kill it; all numbers below the result were flushed."""
    tearing = draw.random() < 0.5
    step = draw.randint(1, 600) if tearing else 0
    command = [
        sys.executable,
        str(SCRIPT),
        str(folder),
        str(draw.randrange(1 << 30)),
        str(first),
        str(pages),
        str(step),
    ]
    flushed = first
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stderr is not None
        if not tearing:
            if draw.random() < 0.8:  # else perhaps while it opens the store
                flushed = _flushed(writer.stdout.readline(), flushed)
            time.sleep(draw.uniform(0, 0.1))
            writer.kill()
        said, complaint = writer.communicate(timeout=DEADLINE_S)
        assert writer.returncode == -9, complaint
    for line in said.splitlines(keepends=True):
        flushed = _flushed(line, flushed)
    return flushed


def _flushed(line: str, before: int) -> int:
    return int(line.split()[1]) if line.endswith("\n") else before


def check_kills(tmp_path: Path, seed: int) -> None:
    """A chain of kills in one folder, without a bound or with one."""
    draw = random.Random(seed)
    pages = 0 if seed % 2 else BOUND
    ranges: list[tuple[int, int]] = []
    for i in range(CHAIN):
        ranges.append((i * SPAN, killed(tmp_path, draw, i * SPAN, pages)))
        store = DiskStore(tmp_path, IDENTITY, disk_bytes=pages * PAGE_BYTES or None)
        assert store.stat().damaged == 0
        there = 0
        for first, flushed in ranges:
            for number in range(first, flushed + 300):
                got = store.get(key(number))
                assert got is None or got == page(number), (seed, i, number)
                assert got is not None or pages or number >= flushed, (seed, i, number, ranges)
                there += got is not None
        assert there == store.stat().pages
        assert store.put(key(-i - 1), page(-i - 1)) and store.get(key(-i - 1)) == page(-i - 1)
        store.delete(key(-i - 1))
        if pages:
            bound = sizes(PAGE_BYTES, pages * PAGE_BYTES).pages
            assert bound is not None and there <= bound
        store.close()


@pytest.mark.parametrize("seed", range(KILLS // CHAIN))
def test_killed_at_random_points(tmp_path: Path, seed: int) -> None:
    check_kills(tmp_path, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(KILLS // CHAIN, KILLS_FULL // CHAIN))
def test_killed_at_many_random_points(tmp_path: Path, seed: int) -> None:
    check_kills(tmp_path, seed)


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "0", "0", "64", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline().startswith("flushed")
        with pytest.raises(InputError, match=rf"is open in process {writer.pid}; legal: one process at a time"):
            DiskStore(tmp_path, IDENTITY, disk_bytes=None)
        writer.kill()
    store = DiskStore(tmp_path, IDENTITY, disk_bytes=None)
    assert store.stat().pages > 0
    store.close()
