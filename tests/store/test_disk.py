"""The disk tier: restarts, bounds of size and age, compaction, clocks, what lies on disk."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
from stores import IDENTITY, PAGE_BYTES, index_of, key, page, segments_of

from rorqual.errors import InputError
from rorqual.store.clock import steady_clock
from rorqual.store.disk import BATCH, DiskStore
from rorqual.store.folder import LOCK, subfolder
from rorqual.store.index import count_rows
from rorqual.store.interface import StoreIdentity
from rorqual.store.segments import OPEN_FILES
from rorqual.store.sizes import SEGMENTS, sizes

RELEASE = StoreIdentity(fingerprint="the release", page_tokens=128, page_bytes=113_920)
DEADLINE_S = 60


def opened(folder: Path, pages: int | None = None, **options: object) -> DiskStore:
    bound = None if pages is None else pages * PAGE_BYTES
    return DiskStore(folder, IDENTITY, disk_bytes=bound, **options)  # type: ignore[arg-type]


def filled(store: DiskStore, *numbers: int) -> DiskStore:
    for number in numbers:
        assert store.put(key(number), page(number))
    return store


def held(store: DiskStore, last: int) -> list[int]:
    """Numbers below `last` that are there; each is got and must be right."""
    found = [number for number in range(last) if (got := store.get(key(number))) is not None and got == page(number)]
    assert sum(store.match([key(number)]) for number in range(last)) == len(found)
    return found


@pytest.mark.parametrize("fsync", [False, True])
def test_a_restart_finds_what_was_put(tmp_path: Path, fsync: bool) -> None:
    store = filled(opened(tmp_path, fsync=fsync), *range(150))
    assert store.put(key(3), page(3)) and store.get(key(149)) == page(149) and store.get(key(150)) is None
    stat = store.stat()
    assert (stat.pages, stat.bytes, stat.puts, stat.gets, stat.hits) == (150, 150 * PAGE_BYTES, 151, 2, 1)
    store.close()
    store.close()
    assert not store.put(key(0), page(0)) and store.get(key(0)) is None and store.match([key(0)]) == 0
    assert not store.delete(key(0)) and store.compact() == 0
    store.flush()
    again = opened(tmp_path, fsync=fsync)
    assert held(again, 160) == list(range(150))
    assert again.match([key(0), key(1), key(150), key(2)]) == 2 and again.stat().damaged == 0
    again.close()


def test_it_commits_in_batches_and_a_deleted_page_stays_away(tmp_path: Path) -> None:
    store = filled(opened(tmp_path), *range(BATCH - 1))
    folder = subfolder(tmp_path, IDENTITY)
    assert count_rows(folder) == 0
    filled(store, BATCH)
    assert count_rows(folder) == BATCH
    assert store.delete(key(5)) and not store.delete(key(5)) and store.get(key(5)) is None
    store.flush()
    assert count_rows(folder) == BATCH - 1
    filled(store, 5)
    store.close()
    again = opened(tmp_path)
    assert again.get(key(5)) == page(5)
    again.close()


def test_any_contiguous_buffer_can_be_put(tmp_path: Path) -> None:
    store = opened(tmp_path)
    mine = bytearray(page(1))
    assert store.put(key(1), memoryview(mine)) and store.put(key(2), bytearray(page(2)))
    mine[:] = bytes(PAGE_BYTES)
    assert (store.get(key(1)), store.get(key(2))) == (page(1), page(2))
    store.close()


def test_at_the_releases_page_size_a_token_costs_890_bytes_and_little_more(tmp_path: Path) -> None:
    """Blocks that the file system gave are counted, not lengths; once while it is open and once when it is closed."""
    count = 200
    store = DiskStore(tmp_path, RELEASE, disk_bytes=10**9)
    data = page(0, RELEASE.page_bytes)
    for number in range(count):
        assert store.put(key(number), data)
    store.flush()
    net = count * RELEASE.page_bytes
    assert net == count * 128 * 890
    for _ in range(2):
        blocks = sum(file.stat().st_blocks * 512 for file in subfolder(tmp_path, RELEASE).iterdir())
        lengths = sum(file.stat().st_size for file in subfolder(tmp_path, RELEASE).iterdir())
        assert net < max(blocks, lengths) <= 1.02 * net, (blocks, lengths)
        assert 0 <= lengths - store.stat().used < 4096  # the lock and whose it is
        store.close()


@pytest.mark.parametrize("pages", [1, 3, 40, 100, 400])
def test_it_never_outgrows_its_bound(tmp_path: Path, pages: int) -> None:
    store = opened(tmp_path, pages)
    room = sizes(PAGE_BYTES, pages * PAGE_BYTES)
    assert room.pages is not None and room.pages >= 0.8 * pages - 1
    for number in range(3 * pages):
        assert store.put(key(number), page(number))
        assert sum(path.stat().st_size for path in segments_of(tmp_path)) <= pages * PAGE_BYTES
        if number % 7 == 0 and number > 3:
            store.delete(key(number - 3))
    stat = store.stat()
    assert stat.pages <= room.pages and stat.capacity == room.pages * PAGE_BYTES and stat.evicted > 0
    assert store.get(key(3 * pages - 1)) == page(3 * pages - 1)
    store.close()
    again = opened(tmp_path, pages)
    assert again.stat().pages == stat.pages and len(held(again, 3 * pages)) == stat.pages
    again.close()


def test_the_page_unused_for_longest_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    room = sizes(PAGE_BYTES, 30 * PAGE_BYTES).pages
    assert room == 30
    store = filled(opened(tmp_path, 30), *range(30))
    assert store.get(key(0)) and store.match([key(2), key(1)]) == 2
    store.close()
    store = filled(opened(tmp_path, 30), *range(100, 127))
    assert held(store, 127) == [0, 1, 2, *range(100, 127)]
    store.close()


@pytest.mark.parametrize("restart", [False, True])
def test_a_chain_goes_from_its_end(tmp_path: Path, restart: bool) -> None:
    store = filled(opened(tmp_path, 30), *range(30))
    assert store.match([key(number) for number in range(30)]) == 30
    if restart:
        store.close()
        store = opened(tmp_path, 30)
    filled(store, *range(100, 110))
    assert held(store, 30) == list(range(20))
    store.close()


def test_a_store_that_is_given_less_room_shrinks_to_it(tmp_path: Path) -> None:
    filled(opened(tmp_path), *range(300)).close()
    for pages in (200, 100, 10, 1):
        store = opened(tmp_path, pages)
        room = sizes(PAGE_BYTES, pages * PAGE_BYTES).pages
        assert room is not None and room - 1 <= store.stat().pages <= room
        assert sum(path.stat().st_size for path in segments_of(tmp_path)) <= pages * PAGE_BYTES
        assert len(held(store, 300)) == store.stat().pages
        store.close()
    store = filled(opened(tmp_path), *range(300))
    assert store.stat().pages >= 300
    store.close()


def test_sparse_segments_are_moved_and_removed(tmp_path: Path) -> None:
    """Without need of room: what is deleted gives its room back as others are put."""
    pages = 10 * SEGMENTS
    store = filled(opened(tmp_path, pages), *range(200))
    slots = sizes(PAGE_BYTES, pages * PAGE_BYTES).slots
    assert slots == 10 and len(segments_of(tmp_path)) == 20
    for number in range(100):
        assert number % slots == 0 or store.delete(key(number))
    filled(store, *range(1000, 1080))
    store.flush()
    assert len(segments_of(tmp_path)) <= 20
    assert held(store, 200) == [*range(0, 100, slots), *range(100, 200)] and store.stat().evicted == 0
    store.close()
    again = opened(tmp_path, pages)
    assert again.stat().pages == 190 and again.stat().damaged == 0
    again.close()


def test_compaction_gives_all_room_back(tmp_path: Path) -> None:
    store = filled(opened(tmp_path), *range(300))
    for number in range(300):
        assert number % 3 == 0 or store.delete(key(number))
    assert store.compact() >= 190 * PAGE_BYTES
    assert sum(path.stat().st_size for path in segments_of(tmp_path)) == 100 * PAGE_BYTES
    assert held(store, 300) == list(range(0, 300, 3)) and store.compact() <= 0
    store.close()
    again = opened(tmp_path)
    assert held(again, 300) == list(range(0, 300, 3))
    again.close()


def test_readers_go_on_while_pages_move(tmp_path: Path) -> None:
    store = filled(opened(tmp_path, 400), *range(300))
    wrong: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for number in range(0, 300, 3):
                if store.get(key(number)) != page(number):
                    wrong.append(number)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(300):
        if number % 3:
            store.delete(key(number))
            if number % 30 == 1:
                store.compact()
    done.set()
    for reader in readers:
        reader.join(DEADLINE_S)
    assert wrong == [] and store.stat().damaged == 0 and store.stat().pages == 100
    store.close()


def test_many_segments_need_few_descriptors(tmp_path: Path) -> None:
    store = filled(opened(tmp_path, 4000, ttl=1e9), *range(300))
    assert store.stat().pages == 300
    small = opened(tmp_path / "small", SEGMENTS - 1)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    filled(small, *range(200))
    assert len(segments_of(tmp_path / "small")) <= SEGMENTS
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after - before <= OPEN_FILES
    small.close()
    store.close()


def test_pages_age_across_restarts(tmp_path: Path) -> None:
    now = 1e9
    store = filled(opened(tmp_path, ttl=100, clock=lambda: now), 0, 1)
    now += 60
    assert store.get(key(1)) == page(1)
    store.close()
    now += 50
    store = opened(tmp_path, ttl=100, clock=lambda: now)
    assert held(store, 2) == [1] and store.stat().expired == 1
    now += 100
    assert store.match([key(1)]) == 0 and store.get(key(1)) is None and store.stat().expired == 2
    store.flush()
    assert count_rows(store.path) == 0
    store.close()
    store = opened(tmp_path, clock=lambda: now)
    assert held(store, 2) == []
    store.close()


@pytest.mark.parametrize("jump", [-3e8, -3600.0, 3600.0, 3e8])
def test_the_wall_clock_may_jump(tmp_path: Path, jump: float) -> None:
    """While a store is open nothing comes of it. Over a restart time can only seem to have passed or not."""
    wall, steady = 1e9, 50.0
    ttl = 7200.0
    store = filled(opened(tmp_path, ttl=ttl, clock=steady_clock(lambda: wall, lambda: steady)), 0)
    wall, steady = wall + jump, steady + 10
    assert store.get(key(0)) == page(0)
    filled(store, 1)
    store.close()
    store = opened(tmp_path, ttl=ttl, clock=steady_clock(lambda: wall, lambda: steady))
    assert held(store, 2) == ([] if jump > ttl else [0, 1])
    filled(store, 2)
    steady += ttl - 1
    assert store.get(key(2)) == page(2)
    store.close()
    wall -= jump  # set right again
    store = opened(tmp_path, ttl=ttl, clock=steady_clock(lambda: wall, lambda: steady))
    assert store.get(key(2)) == (None if jump < -ttl else page(2))
    filled(store, 3)
    steady += ttl
    assert held(store, 4) == []  # nothing lives for ever because it was used in a future that never was
    store.close()


def test_a_store_is_open_once(tmp_path: Path) -> None:
    store = filled(opened(tmp_path), 0)
    with pytest.raises(InputError, match=rf"is open in process {os.getpid()}; legal: one process at a time"):
        opened(tmp_path)
    other = DiskStore(tmp_path, dataclasses.replace(IDENTITY, fingerprint="other"), disk_bytes=None)
    assert other.get(key(0)) is None  # another identity is another store
    other.close()
    store.close()
    opened(tmp_path).close()


def test_other_page_sizes_and_formats_are_other_stores(tmp_path: Path) -> None:
    names = {
        subfolder(tmp_path, identity)
        for identity in (
            IDENTITY,
            dataclasses.replace(IDENTITY, fingerprint="b"),
            dataclasses.replace(IDENTITY, page_tokens=8),
            dataclasses.replace(IDENTITY, page_bytes=8),
        )
    }
    assert len(names) == 4


def test_a_folder_that_goes_away_loses_pages_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = filled(opened(tmp_path / "store", 3200), *range(250))
    with caplog.at_level(logging.WARNING, logger="rorqual"):
        shutil.rmtree(tmp_path / "store")
        for number in range(400):
            assert store.get(key(number)) in (None, page(number))
            store.put(key(number), page(number))
        store.flush()
        store.compact()
        assert store.verify() >= 0 and store.stat().puts == 650
        store.close()
    assert caplog.records and len(caplog.records) < 20  # said, but not for every page


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    path = subfolder(tmp_path, IDENTITY)
    (path / LOCK).unlink()
    (path / LOCK).mkdir()
    with pytest.raises(InputError, match="lock cannot be opened"):
        opened(tmp_path)
    (path / LOCK).rmdir()
    index_of(tmp_path).unlink()
    index_of(tmp_path).mkdir()
    with pytest.raises(InputError, match=r"index\.sqlite cannot be opened"):
        opened(tmp_path)
    index_of(tmp_path).rmdir()
    opened(tmp_path).close()  # the refusals let go of the lock
