"""The tiers of one folder as one store."""

from __future__ import annotations

from pathlib import Path

from rorqual.errors import InputError
from rorqual.store.disk import DiskStore
from rorqual.store.folder import mention_others
from rorqual.store.interface import PageStore, StoreIdentity
from rorqual.store.memory import MemoryStore
from rorqual.store.tiers import Tiers
from rorqual.store.writer import WriteBehind

QUEUE_BYTES = 64 * 1024**2
"""Of pages that wait to be written, where a page is not larger: 589 of the release's."""


def open_store(
    folder: Path | None,
    identity: StoreIdentity,
    *,
    memory_bytes: int = 0,
    disk_bytes: int | None = None,
    ttl: float | None = None,
    fsync: bool = False,
    queue_bytes: int | None = None,
    remote: PageStore | None = None,
) -> Tiers:
    """Memory over disk over `remote`, each where it is asked for; closed as one.

    Args:
        folder: of the disk tier, made where it is missing; None for no disk tier.
        memory_bytes: of the memory tier; 0 for none.
        disk_bytes: that the disk tier's segments may take; None for no bound.
        ttl: seconds after its last use at which a page goes from memory and disk; None for never.
        fsync: whether what was flushed outlasts a power failure, and not only a killed process.
        queue_bytes: of pages that wait for disk, and again for `remote`; None for `QUEUE_BYTES`, or one page.

    Raises:
        InputError: a value that cannot be honoured, by its name; a folder that another process has open.
    """
    size = identity.page_bytes
    for name, value in (("page_tokens", identity.page_tokens), ("page_bytes", size)):
        _at_least(name, value, 1)
    _at_least("memory", memory_bytes, 0)
    if ttl is not None and not ttl > 0:
        raise InputError(f"ttl: {ttl} is not legal; legal: a time above 0, in seconds")
    if remote is not None and remote.identity != identity:
        raise InputError(f"remote: holds pages of {remote.identity}; legal: those of {identity}")
    if folder is None and (disk_bytes is not None or fsync):
        raise InputError(f"{'fsync' if disk_bytes is None else 'disk'}: there is no folder for it")
    queue = max(QUEUE_BYTES, size) if queue_bytes is None else queue_bytes
    if queue < size:
        raise InputError(f"queue: {queue} bytes hold no page; legal: at least {size}")
    tiers: list[PageStore] = []
    if memory_bytes:
        tiers.append(MemoryStore(identity, capacity=memory_bytes, ttl=ttl))
    if folder is not None:
        disk = DiskStore(folder, identity, disk_bytes=disk_bytes, ttl=ttl, fsync=fsync)
        mention_others(folder, identity)
        tiers.append(WriteBehind(disk, queue_bytes=queue))
    if remote is not None:
        tiers.append(WriteBehind(remote, queue_bytes=queue))
    return Tiers(*tiers)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name}: {value} is not legal; legal: at least {least}")
