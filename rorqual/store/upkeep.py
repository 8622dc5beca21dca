"""A store's folder as a whole, every model and format in it: what there is, and looking after it.

Pages are read and moved only in subfolders of this format that say whose they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rorqual.store import folder as folders
from rorqual.store.index import count_rows
from rorqual.store.interface import StoreIdentity

if TYPE_CHECKING:
    from rorqual.store.disk import DiskStore

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One subfolder. identity: None where it is of another format, or does not say. pages: None where its index cannot
    be read; used: bytes of all its files."""

    path: Path
    format: int
    identity: StoreIdentity | None
    pages: int | None
    used: int

    @property
    def readable(self) -> bool:
        """Whether a store of today would find pages in it."""
        return self.format == folders.FORMAT and self.identity is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """checked: pages that were read. damaged: those of them, and rows of the index, that were wrong and are gone; 1 for
    a subfolder that does not say whose it is, which is left as it is."""

    path: Path
    checked: int
    damaged: int


def held(folder: Path) -> list[Held]:
    """Every subfolder, beside whoever writes there. Raises InputError where there is no such folder."""
    return [_held(path) for path in folders.subfolders(folder)]


def verify(folder: Path, progress: Progress | None = None) -> list[Verified]:
    """Read every page; damaged ones are removed.

    Raises:
        InputError: no such folder, or a process has it open.
    """
    found = []
    for one in held(folder):
        if not one.readable:
            damaged = int(one.format == folders.FORMAT)
            found.append(Verified(path=one.path, checked=0, damaged=damaged))
            continue
        with _opened(folder, one) as store:
            checked = store.verify(progress)
            found.append(Verified(path=one.path, checked=checked, damaged=store.stat().damaged))
    return found


def compact(folder: Path) -> dict[Path, int]:
    """Bytes that each subfolder has shrunk by. Raises as `verify`."""
    shrunk = {}
    for one in held(folder):
        if one.readable:
            with _opened(folder, one) as store:
                store.compact()
            shrunk[one.path] = one.used - _held(one.path).used
    return shrunk


def clear(paths: Sequence[Path]) -> None:
    """Delete subfolders with all their pages, all or none. Raises InputError where a process has one open."""
    with ExitStack() as locks:
        for path in paths:
            locks.enter_context(folders.locked(path))
        for path in paths:
            shutil.rmtree(path)


@contextmanager
def _opened(folder: Path, one: Held) -> Iterator[DiskStore]:
    from rorqual.store.disk import DiskStore  # not for those who only look: it loads numpy

    assert one.identity is not None
    store = DiskStore(folder, one.identity, disk_bytes=None)
    try:
        yield store
    finally:
        store.close()


def _held(path: Path) -> Held:
    version = folders.format_of(path)
    current = version == folders.FORMAT
    return Held(
        path=path,
        format=version,
        identity=folders.identity_of(path) if current else None,
        pages=count_rows(path) if current else None,
        used=sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
    )
