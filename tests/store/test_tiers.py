"""Several tiers as one store, and the opener of them."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from stores import IDENTITY, PAGE_BYTES, key, page

from rorqual.errors import InputError
from rorqual.store.disk import DiskStore
from rorqual.store.folder import subfolder
from rorqual.store.memory import MemoryStore
from rorqual.store.opener import open_store
from rorqual.store.tiers import Tiers

OTHER = dataclasses.replace(IDENTITY, fingerprint="another model")


def memory(pages: int) -> MemoryStore:
    return MemoryStore(IDENTITY, capacity=pages * PAGE_BYTES)


def test_pages_go_through_and_come_back_up() -> None:
    small, large = memory(2), memory(9)
    store = Tiers(small, large)
    for number in range(4):
        assert store.put(key(number), page(number))
    assert (small.stat().pages, large.stat().pages) == (2, 4)
    assert small.match([key(0)]) == 0 and store.get(key(0)) == page(0) and small.match([key(0)]) == 1
    assert store.get(key(8)) is None
    stat = store.stat()
    assert (stat.puts, stat.gets, stat.hits, stat.pages, stat.capacity) == (4, 2, 1, 6, 11 * PAGE_BYTES)


def test_a_chain_may_lie_in_turns_and_is_deleted_everywhere() -> None:
    upper, lower = memory(9), memory(9)
    for number in range(6):
        (upper if number % 2 else lower).put(key(number), page(number))
    store = Tiers(upper, lower)
    keys = [key(number) for number in range(8)]
    assert store.match(keys) == 6 and store.match(keys[6:]) == 0 and store.match([]) == 0
    store.put(key(3), page(3))
    assert store.delete(key(3)) and not store.delete(key(3)) and store.match(keys) == 3


def test_tiers_are_of_one_identity() -> None:
    with pytest.raises(InputError, match=r"a model.*another model.*legal: one identity"):
        Tiers(memory(1), MemoryStore(OTHER, capacity=PAGE_BYTES))
    with pytest.raises(InputError, match="legal: at least one of memory, disk and remote"):
        Tiers()


def test_a_restart_finds_on_disk_what_was_in_memory(tmp_path: Path) -> None:
    store = open_store(tmp_path, IDENTITY, memory_bytes=4 * PAGE_BYTES, disk_bytes=10**6)
    for number in range(10):
        assert store.put(key(number), page(number))
    store.close()
    assert not store.put(key(1), page(1)) and store.get(key(1)) is None and store.match([key(1)]) == 0
    again = open_store(tmp_path, IDENTITY, memory_bytes=4 * PAGE_BYTES, disk_bytes=10**6)
    assert again.match([key(number) for number in range(11)]) == 10
    assert [again.get(key(number)) for number in range(10)] == [page(number) for number in range(10)]
    assert again.tiers[0].stat().pages == 4
    again.close()


def test_a_remote_tier_comes_last(tmp_path: Path) -> None:
    remote = memory(9)
    store = open_store(None, IDENTITY, memory_bytes=PAGE_BYTES, remote=remote)
    for number in range(3):
        store.put(key(number), page(number))
    store.flush()
    assert remote.stat().pages == 3 and store.get(key(0)) == page(0)
    store.close()
    assert not remote.put(key(9), page(9))  # closed with it


def test_others_in_the_folder_are_named_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for identity in (OTHER, IDENTITY):
        with caplog.at_level(logging.INFO, logger="rorqual"):
            caplog.clear()
            store = open_store(tmp_path, identity)
            assert store.get(key(0)) is None
            store.put(key(0), page(0) if identity is OTHER else page(1))
            store.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"store: {tmp_path} also holds pages of other models or formats, left alone: {subfolder(tmp_path, OTHER).name}"
    ]
    old = subfolder(tmp_path, IDENTITY)
    old.rename(old.with_name(old.name.replace("v1-", "v0-")))
    store = open_store(tmp_path, IDENTITY)
    assert store.get(key(0)) is None
    store.close()
    disk = DiskStore(tmp_path, OTHER, disk_bytes=None)
    assert disk.get(key(0)) == page(0)
    disk.close()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"memory_bytes": -1}, "memory: -1 is not legal; legal: at least 0"),
        ({"memory_bytes": 5}, f"memory: 5 bytes hold no page; legal: at least {PAGE_BYTES}"),
        ({"disk_bytes": 5}, f"disk: 5 bytes hold no page; legal: at least {PAGE_BYTES}"),
        ({"disk_bytes": -5}, f"disk: -5 bytes hold no page; legal: at least {PAGE_BYTES}"),
        ({"queue_bytes": 5}, f"queue: 5 bytes hold no page; legal: at least {PAGE_BYTES}"),
        ({"ttl": 0}, "ttl: 0 is not legal; legal: a time above 0, in seconds"),
        ({"ttl": math.nan}, "ttl: nan is not legal; legal: a time above 0, in seconds"),
        ({"folder": None}, "store: has no tier; legal: at least one of memory, disk and remote"),
        ({"folder": None, "memory_bytes": 9000, "disk_bytes": 9000}, "disk: there is no folder for it"),
        ({"folder": None, "memory_bytes": 9000, "fsync": True}, "fsync: there is no folder for it"),
        ({"identity": dataclasses.replace(IDENTITY, page_bytes=0)}, "page_bytes: 0 is not legal; legal: at least 1"),
        ({"remote": MemoryStore(OTHER, capacity=PAGE_BYTES)}, "remote: holds pages of .*another model"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_nothing_is_left_open(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"folder": tmp_path / "store", "identity": IDENTITY} | values
    with pytest.raises(InputError, match=message):
        open_store(**given)
    open_store(tmp_path / "store", IDENTITY).close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    with pytest.raises(InputError, match="file cannot be made"):
        open_store(tmp_path / "file", IDENTITY)
