"""How a user asks for a store: a folder and its bounds, opened for one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rorqual.engine.identity import store_identity
from rorqual.errors import InputError
from rorqual.model.transformer import Transformer
from rorqual.planner.units import parse_bytes
from rorqual.store.interface import PageStore
from rorqual.store.opener import open_store

Amount = int | str
"""Bytes, or a text such as 2GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What is kept beyond an engine's cache, and where.

    folder: of pages on disk, which a later process finds; None for none. memory: bytes of pages kept in host memory in
    front of it, or alone. disk: bytes that pages on disk may take. ttl: seconds after its last use at which a page
    goes. fsync: what was written outlasts a power failure too, and not only a killed process.

    >>> StoreOptions().asked, StoreOptions(memory="1GiB").asked
    (False, True)
    """

    folder: Path | str | None = None
    memory: Amount | None = None
    disk: Amount | None = None
    ttl: float | None = None
    fsync: bool = False

    @property
    def asked(self) -> bool:
        """There is somewhere to keep pages."""
        return self.folder is not None or self.memory is not None

    def open(self, model: Transformer) -> PageStore | None:
        """The store, for pages of this model alone; None where none is asked for. Whoever opens it closes it.

        Raises:
            InputError: a value that cannot be honoured, by its name; a folder that another process has open.
        """
        if not self.asked:
            for name, value in (("disk", self.disk), ("ttl", self.ttl), ("fsync", self.fsync or None)):
                if value is not None:
                    raise InputError(f"{name}: there is no store; legal: with a folder, or memory, to keep pages in")
            return None
        return open_store(
            None if self.folder is None else Path(self.folder),
            store_identity(model),
            memory_bytes=0 if self.memory is None else parse_bytes(str(self.memory), "memory"),
            disk_bytes=None if self.disk is None else parse_bytes(str(self.disk), "disk"),
            ttl=self.ttl,
            fsync=self.fsync,
        )

    @contextmanager
    def opened(self, model: Transformer) -> Iterator[PageStore | None]:
        """The same, closed at the end: all that was put is where the next process finds it."""
        store = self.open(model)
        try:
            yield store
        finally:
            if store is not None:
                store.close()
