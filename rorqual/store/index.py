"""The index of a disk store: an sqlite file that says under which key each page of a segment was put.

It is read once, when the store is opened, and written in batches. The row id is the place of a page, so a batch goes
to the end of one B-tree, whatever its keys are: some pages of the file a commit, not one a key.

A write-ahead log, because a commit is then one append and, if asked for, one fsync; because sqlite itself drops what a
killed process left half written; and because `rorqual store stat` can read beside the process that writes. The log is
folded back often, so that it never weighs much beside the pages.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rorqual.errors import InputError
from rorqual.store.segments import Place

FILE = "index.sqlite"
POSITION_BITS = 24
"""Of a row id; the rest is the segment's number."""
LOG_PAGES = 64
"""Of sqlite's pages of 4 KiB: the size of the write-ahead log at which it is folded back."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS pages (place INTEGER PRIMARY KEY, key BLOB, digest BLOB, used INTEGER)"
_SELECT = "SELECT place, key, digest, used FROM pages"
_INSERT = "INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?)"
_DELETE = "DELETE FROM pages WHERE place = ?"
# What a healthy file can meet, by sqlite's primary codes: permission, busy, locked, out of memory, read-only, I/O
# error, full, cannot open, protocol. Everything else says that the file's content is wrong.
_SURROUNDINGS = {3, 5, 6, 7, 8, 10, 13, 14, 15}
_SHORT_READ = 522  # an I/O error by its code, a truncated file by its nature


class Row(NamedTuple):
    """used: microseconds since 1970 of the last use that was written down."""

    place: Place
    key: bytes
    digest: bytes
    used: int


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error comes from what is in the file, rather than from what is around it."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # of the module itself: a value that cannot be read
        return True
    return code == _SHORT_READ or code & 0xFF not in _SURROUNDINGS


class PageIndex:
    """The rows of one subfolder. One thread at a time.

    Args:
        folder: of the file; the one process that writes holds its lock.
        fsync: whether a commit is on the medium when it returns.

    Raises:
        sqlite3.Error: the file is damaged, or cannot be opened.
    """

    def __init__(self, folder: Path, *, fsync: bool = False) -> None:
        self._path = folder / FILE
        self._fsync = fsync
        self._base = self._connect()

    def load(self) -> tuple[list[Row], bool]:
        """All rows that can be read and make sense, and whether that is all there were."""
        rows: list[Row] = []
        whole = True
        try:
            for values in self._base.execute(_SELECT):
                row = _row(values)
                whole = whole and row is not None
                if row is not None:
                    rows.append(row)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            whole = False
        return rows, whole

    def write(self, gone: Iterable[Place], rows: Iterable[Row]) -> None:
        """Delete and add rows, all of them or none. Raises sqlite3.Error, and then nothing has changed."""
        base = self._base
        base.execute("BEGIN IMMEDIATE")
        try:
            base.executemany(_DELETE, ((_row_id(place),) for place in gone))
            base.executemany(_INSERT, map(_values, rows))
            base.execute("COMMIT")
        except BaseException:
            if base.in_transaction:
                base.execute("ROLLBACK")
            raise

    def renew(self) -> None:
        """Throw the file away and begin an empty one. Raises sqlite3.Error, OSError."""
        self.close()
        remove(self._path.parent)
        self._base = self._connect()

    def shrink(self) -> None:
        """Give back the room of deleted rows. Raises sqlite3.Error."""
        self._base.execute("VACUUM")
        self._base.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @property
    def nbytes(self) -> int:
        """Bytes on disk, the log included."""
        return sum(_size(path) for path in _files(self._path.parent))

    def close(self) -> None:
        """Never raises: what was committed stays committed."""
        try:
            self._base.close()
        except sqlite3.Error:
            return

    def _connect(self) -> sqlite3.Connection:
        base = sqlite3.connect(self._path, timeout=5, isolation_level=None, check_same_thread=False)
        try:
            base.text_factory = bytes
            base.execute("PRAGMA journal_mode = WAL").fetchall()
            base.execute(f"PRAGMA synchronous = {'FULL' if self._fsync else 'OFF'}")
            base.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}").fetchall()
            base.execute("BEGIN IMMEDIATE")
            base.execute(_SCHEMA)
            base.execute("COMMIT")
        except BaseException:
            base.close()
            raise
        return base


def open_index(folder: Path, *, fsync: bool) -> tuple[PageIndex, list[Row], bool]:
    """The index of a folder with what can be read of it, and whether it was whole; a damaged one begins again, empty.

    Raises:
        InputError: the file is not damaged, but cannot be opened.
    """
    try:
        try:
            index = PageIndex(folder, fsync=fsync)
        except sqlite3.Error as error:
            # A flipped bit in the header can make sqlite take a file for one that it may not write.
            forbidden = not os.access(folder / FILE, os.R_OK | os.W_OK)
            if not is_damage(error) and (forbidden or getattr(error, "sqlite_errorcode", 0) & 0xFF != 8):
                raise
            remove(folder)
            return PageIndex(folder, fsync=fsync), [], False
        rows, whole = index.load()
        if not whole:
            index.renew()
        return index, rows, whole
    except (sqlite3.Error, OSError) as error:
        raise InputError(f"store: {folder / FILE} cannot be opened ({error})") from error


def count_rows(folder: Path) -> int | None:
    """Rows of a folder's index, read beside whoever writes it; None where they cannot be read."""
    if not (folder / FILE).is_file():
        return 0
    try:
        base = sqlite3.connect(f"{(folder / FILE).absolute().as_uri()}?mode=ro", uri=True, timeout=5)
        try:
            return int(base.execute("SELECT count(*) FROM pages").fetchone()[0])
        finally:
            base.close()
    except sqlite3.Error:
        return None


def remove(folder: Path) -> None:
    """Delete a folder's index files. Raises OSError."""
    for path in _files(folder):
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return [folder / f"{FILE}{suffix}" for suffix in ("", "-wal", "-shm")]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _row_id(place: Place) -> int:
    return place.segment << POSITION_BITS | place.position


def _values(row: Row) -> tuple[int, bytes, bytes, int]:
    (segment, position), key, digest, used = row
    return segment << POSITION_BITS | position, key, digest, used


def _row(values: tuple[object, ...]) -> Row | None:
    """A row as it was written; None for one that nobody wrote."""
    place, key, digest, used = values
    if not (isinstance(place, int) and isinstance(key, bytes) and isinstance(digest, bytes) and isinstance(used, int)):
        return None
    if place < 0:
        return None
    return Row(Place(place >> POSITION_BITS, place & ((1 << POSITION_BITS) - 1)), key, digest, used)
