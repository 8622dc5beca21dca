"""Segment files: pages one behind the other, written once and never changed, read by position.

A page has no header: its key and its check are in the index. So reading one is a single pread of nothing but itself,
and a segment is a multiple of the page size. What was written without being indexed (the process was killed) is cut off
when the segment is continued.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from rorqual.store.interface import PageBytes

SUFFIX = ".pages"
OPEN_FILES = 64
"""Segments that are kept open for reading; a process may have far fewer descriptors than a store has segments."""


class Place(NamedTuple):
    """Page `position` of a segment."""

    segment: int
    position: int


class _File:
    """A descriptor that lives as long as anybody reads from it: a reader outlasts the removal of the segment."""

    __slots__ = ("fd",)

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = -1
        self.fd = os.open(path, flags, 0o644)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Segments:
    """The segment files of one subfolder. Reads may come from any thread, everything else from one at a time.

    Args:
        folder: of the files.
        page_bytes: of one page.
        slots: pages of a segment that is begun from now on.
        fsync: whether `sync` has anything to do.
    """

    def __init__(self, folder: Path, page_bytes: int, slots: int, *, fsync: bool = False) -> None:
        assert slots >= 1, slots
        self.slots = slots
        self.room = 0
        """Pages that still go into the segment that is written to."""
        self._fsync = fsync
        self._folder, self._page_bytes = folder, page_bytes
        self._lock = Lock()
        self._open: dict[int, _File] = {}
        self._sizes = dict(_listed(folder))
        self._next = max(self._sizes, default=0) + 1
        self._active: int | None = None
        self._unsynced: dict[int, _File] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def active(self) -> int | None:
        """The segment that is written to."""
        return self._active

    @property
    def nbytes(self) -> int:
        return sum(list(self._sizes.values()))

    @property
    def numbers(self) -> list[int]:
        return list(self._sizes)

    def pages(self, number: int) -> int:
        """Whole pages that a segment holds, wanted or not; 0 where there is no such segment."""
        return self._sizes.get(number, 0) // self._page_bytes

    def resume(self, number: int, pages: int) -> None:
        """Go on in a segment behind its first `pages` pages; what follows them goes. Raises OSError."""
        os.truncate(self._path(number), pages * self._page_bytes)
        self._sizes[number] = pages * self._page_bytes
        self._active, self.room = number, max(0, self.slots - pages)

    def begin(self) -> None:
        """Begin the next segment; a number is never used twice. Raises OSError."""
        number, self._next = self._next, self._next + 1
        self._keep_open(number, _File(self._path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL))
        self._sizes[number] = 0
        self._active, self.room = number, self.slots

    def append(self, page: PageBytes) -> Place:
        """Write a page behind the last one. Raises OSError, and then the page is not there."""
        number, size = self._active, self._page_bytes
        assert number is not None and self.room
        start, file = self._sizes[number], self._file(number)
        done = 0
        try:
            done = os.pwrite(file.fd, page, start)
            if done != size:
                assert memoryview(page).nbytes == size, (memoryview(page).nbytes, size)
            while done < size:
                done += os.pwrite(file.fd, memoryview(page).cast("B")[done:], start + done)
        except OSError:
            if done:
                os.ftruncate(file.fd, start)
            raise
        self._sizes[number] = start + size
        self.room -= 1
        if self._fsync:
            self._unsynced[number] = file
        return Place(number, start // size)

    def read(self, place: Place) -> bytes | None:
        """The bytes at a place as they are now; None where there are none."""
        try:
            page = os.pread(self._file(place.segment).fd, self._page_bytes, place.position * self._page_bytes)
        except (OSError, OverflowError):
            return None
        return page if len(page) == self._page_bytes else None

    def sync(self) -> None:
        """Bring everything written since the last call to the medium, the files' names included. Raises OSError."""
        if not self._fsync:
            return
        for file in self._unsynced.values():
            os.fsync(file.fd)
        self._unsynced.clear()
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, number: int) -> None:
        """Delete a segment; who reads from it still can."""
        with self._lock:
            self._open.pop(number, None)
        self._unsynced.pop(number, None)
        del self._sizes[number]
        if self._active == number:
            self._active, self.room = None, 0
        try:
            self._path(number).unlink(missing_ok=True)
        except OSError:
            # It takes room until the store is opened next, and then goes as one without pages.
            return

    def close(self) -> None:
        with self._lock:
            self._open.clear()
        self._unsynced.clear()

    def _path(self, number: int) -> Path:
        return self._folder / _name(number)

    def _file(self, number: int) -> _File:
        file = self._open.get(number)
        return file or self._keep_open(number, _File(self._path(number), os.O_RDWR))

    def _keep_open(self, number: int, file: _File) -> _File:
        with self._lock:
            self._open[number] = file
            while len(self._open) > OPEN_FILES:
                del self._open[next(iter(self._open))]
            return file


def _name(number: int) -> str:
    return f"{number:08}{SUFFIX}"


def _listed(folder: Path) -> list[tuple[int, int]]:
    """Number and size of every segment file there is."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if path.stem.isdecimal() and path.name == _name(int(path.stem)) and path.is_file():
            found.append((int(path.stem), path.stat().st_size))
    return found
