"""A medium without room: pages are dropped and counted, the store lives, and takes pages again when there is room.

Once on a small tmpfs of its own, where the test may mount one; and always in a process whose files have a largest size.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import IDENTITY, PAGE_BYTES, key, page

from rorqual.store.disk import DiskStore
from rorqual.store.writer import WriteBehind

SIZE = 1 << 20
COUNT = 700
"""More pages than fit."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        pytest.skip(f"there is no mount command ({error})")
    if mounted.returncode:
        pytest.skip(f"no right to mount a tmpfs ({mounted.stderr.strip()})")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=60)


def test_a_full_disk_drops_pages(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(small_disk, IDENTITY, disk_bytes=None)
    kept = [number for number in range(COUNT) if store.put(key(number), page(number))]
    store.flush()
    stat = store.stat()
    assert 0.7 * SIZE < len(kept) * PAGE_BYTES < SIZE and stat.pages == len(kept)
    assert stat.dropped == COUNT - len(kept) > 0 and stat.damaged == 0
    assert [store.get(key(number)) == page(number) for number in kept] == [True] * len(kept)
    assert 0 < len(caplog.records) < 5 and "No space left" in caplog.text
    for number in kept[:200]:
        assert store.delete(key(number))
    store.close()
    again = DiskStore(small_disk, IDENTITY, disk_bytes=None)
    assert again.stat().damaged == 0
    assert all(again.get(key(number)) in (None, page(number)) for number in range(COUNT))
    again.compact()
    again.close()


def test_it_takes_pages_again_when_there_is_room(small_disk: Path) -> None:
    other = small_disk / "other"
    other.write_bytes(bytes(SIZE // 2))
    store = WriteBehind(DiskStore(small_disk, IDENTITY, disk_bytes=None), queue_bytes=COUNT * PAGE_BYTES)
    for number in range(COUNT):
        assert store.put(key(number), page(number))
    store.flush()
    before = store.stat()
    assert 0 < before.pages < SIZE // 2 // PAGE_BYTES and before.dropped == COUNT - before.pages
    other.unlink()
    for number in range(before.pages, before.pages + 100):
        assert store.put(key(number), page(number))
    store.close()
    again = DiskStore(small_disk, IDENTITY, disk_bytes=None)
    assert again.match([key(number) for number in range(COUNT)]) == before.pages + 100
    assert all(again.get(key(number)) == page(number) for number in range(before.pages + 100))
    again.close()


@pytest.mark.parametrize("limit", [200_000, 200_700, 50_000])
def test_files_that_may_not_grow(tmp_path: Path, limit: int) -> None:
    script = Path(__file__).with_name("filling_writer.py")
    command = [sys.executable, str(script), str(tmp_path), str(limit), "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["kept"] == said["right"] == limit // PAGE_BYTES and said["dropped"] == 300 - said["kept"]
    store = DiskStore(tmp_path, IDENTITY, disk_bytes=None)
    found = [number for number in range(300) if store.get(key(number)) == page(number)]
    assert len(found) == store.stat().pages and store.stat().damaged == 0
    assert len(found) == said["kept"] or limit < 100_000  # in which the index has no room either
    store.close()
