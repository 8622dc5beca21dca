"""Bits that flip, files that are cut, filled with zeros or with something else: never wrong bytes, no exception."""

from __future__ import annotations

import os
import random
import sqlite3
from pathlib import Path

import pytest
from stores import IDENTITY, copied, files_of, flip, index_of, key, page, segments_of

from rorqual.store.disk import DiskStore
from rorqual.store.folder import ABOUT, subfolder

FLIPS, FLIPS_FULL = 60, 1000
PAGES = 40


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A store with all its pages: of a process that died, with a log, and of one that closed it."""
    folder = tmp_path_factory.mktemp("sound")
    store = DiskStore(folder / "open", IDENTITY, disk_bytes=None)
    for number in range(PAGES):
        store.put(key(number), page(number))
        if number % 10 == 9:
            store.flush()
    copied(folder / "open", folder / "died")
    store.close()
    return {True: folder / "died", False: folder / "open"}


def check(folder: Path) -> int:
    """Open what there is and read it all; what is missing can be put again. How many pages were there."""
    store = DiskStore(folder, IDENTITY, disk_bytes=None)
    found = [store.get(key(number)) for number in range(PAGES)]
    assert all(got in (None, page(number)) for number, got in enumerate(found))
    there = sum(got is not None for got in found)
    assert store.stat().pages >= there  # a row with a damaged key stands for a page that nobody will ask for
    for number in range(PAGES):
        assert store.put(key(number), page(number))
    store.close()
    again = DiskStore(folder, IDENTITY, disk_bytes=None)
    assert [again.get(key(number)) for number in range(PAGES)] == [page(number) for number in range(PAGES)]
    again.close()
    return there


def check_flip(sound: dict[bool, Path], tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    folder = copied(sound[draw.random() < 0.5], tmp_path / "store")
    file = draw.choice(files_of(folder))
    flip(file, draw.randrange(8 * file.stat().st_size))
    there = check(folder)
    if file in segments_of(folder):
        assert there == PAGES - 1
    # In front of a flipped bit, sqlite takes its log for whole.
    assert there > 0 or file.name.endswith("-wal") or file == index_of(folder)


def test_flipped_bits(sound: dict[bool, Path], tmp_path: Path) -> None:
    for seed in range(FLIPS):
        check_flip(sound, tmp_path, seed)


@pytest.mark.full
def test_many_flipped_bits(sound: dict[bool, Path], tmp_path: Path) -> None:
    for seed in range(FLIPS, FLIPS_FULL):
        check_flip(sound, tmp_path, seed)


def test_bits_that_flip_while_it_is_open(tmp_path: Path) -> None:
    draw = random.Random(7)
    store = DiskStore(tmp_path, IDENTITY, disk_bytes=None)
    for number in range(20 * PAGES):
        assert store.put(key(number), page(number))
        if number % PAGES == PAGES - 1:
            store.flush()
            file = draw.choice(files_of(tmp_path))
            flip(file, draw.randrange(8 * file.stat().st_size))
            for _ in range(20):
                asked = draw.randrange(number)
                assert store.get(key(asked)) in (None, page(asked))
            assert store.get(key(number)) in (None, page(number))
    store.close()
    again = DiskStore(tmp_path, IDENTITY, disk_bytes=None)
    found = [again.get(key(number)) for number in range(20 * PAGES)]
    assert all(got in (None, page(number)) for number, got in enumerate(found))
    again.close()


@pytest.mark.parametrize("which", ["index", "segment"])
@pytest.mark.parametrize("how", ["gone", "empty", "cut", "zeros", "noise", "swapped halves"])
@pytest.mark.parametrize("died", [True, False])
def test_whole_files_that_are_wrong(sound: dict[bool, Path], tmp_path: Path, which: str, how: str, died: bool) -> None:
    folder = copied(sound[died], tmp_path / "store")
    file = index_of(folder) if which == "index" else segments_of(folder)[0]
    data = file.read_bytes()
    half = len(data) // 2
    file.write_bytes(
        {
            "gone": b"",
            "empty": b"",
            "cut": data[: half + 7],
            "zeros": bytes(len(data)),
            "noise": random.Random(1).randbytes(len(data)),
            "swapped halves": data[half:] + data[:half],
        }[how]
    )
    if how == "gone":
        file.unlink()
    there = check(folder)
    assert there < PAGES or (which == "index" and died)  # the log may hold all that the file lacks


def test_a_damaged_index_is_said_and_the_rest_of_it_is_kept(
    sound: dict[bool, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A row whose types are wrong, in a file that sqlite takes for sound."""
    folder = copied(sound[False], tmp_path / "store")
    base = sqlite3.connect(index_of(folder))
    base.execute("UPDATE pages SET key = 7.5 WHERE place = (SELECT min(place) FROM pages)")
    base.commit()
    base.close()
    store = DiskStore(folder, IDENTITY, disk_bytes=None)
    assert [record.getMessage() for record in caplog.records] == [
        f"store: the index of {subfolder(folder, IDENTITY)} is damaged; it still finds {PAGES - 1} pages"
    ]
    assert store.verify() == PAGES - 1 and store.stat().damaged == 1
    assert store.get(key(0)) is None and store.get(key(1)) == page(1)
    store.close()
    assert check(folder) == PAGES - 1


def test_two_rows_for_one_page_and_rows_beyond_the_end(sound: dict[bool, Path], tmp_path: Path) -> None:
    folder = copied(sound[False], tmp_path / "store")
    base = sqlite3.connect(index_of(folder))
    base.execute("INSERT INTO pages SELECT place + 1000, key, digest, used FROM pages")
    base.execute("DELETE FROM pages WHERE place = (SELECT min(place) + 20 FROM pages)")
    base.execute("INSERT INTO pages SELECT min(place) + 20, key, digest, used - 5 FROM pages")
    base.execute("INSERT INTO pages VALUES (-3, x'00', x'00', 0)")
    base.execute("UPDATE pages SET used = -used WHERE place % 5 = 0")
    base.execute("UPDATE pages SET used = 2 * used WHERE place % 5 = 1")
    base.commit()
    base.close()
    assert check(folder) == PAGES - 2  # that whose row was taken, and that which took it


def test_verify_finds_all_damage_and_removes_it(sound: dict[bool, Path], tmp_path: Path) -> None:
    folder = copied(sound[False], tmp_path / "store")
    (segment,) = segments_of(folder)
    for number in (3, 17):
        flip(segment, 8 * (number * IDENTITY.page_bytes + 1234) + 5)
    store = DiskStore(folder, IDENTITY, disk_bytes=None)
    assert store.verify() == PAGES and store.stat().damaged == 2 and store.stat().pages == PAGES - 2
    assert store.verify() == PAGES - 2 and store.stat().damaged == 2
    store.close()
    assert check(folder) == PAGES - 2


def test_files_of_others_do_no_harm(sound: dict[bool, Path], tmp_path: Path) -> None:
    folder = copied(sound[False], tmp_path / "store")
    inside = subfolder(folder, IDENTITY)
    (inside / ABOUT).write_text("{", encoding="utf-8")
    for name in ("7.pages", "notes.pages", "00000009.pages", "x"):
        (inside / name).write_bytes(os.urandom(9999))
    (folder / "README").write_text("mine", encoding="utf-8")
    assert check(folder) == PAGES
    assert not (inside / "00000009.pages").exists() and (inside / "notes.pages").exists()
    assert (inside / ABOUT).read_text(encoding="utf-8") != "{" and (folder / "README").exists()
