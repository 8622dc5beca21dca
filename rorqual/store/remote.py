"""The remote tier: pages in a Mooncake store, which every machine of a cluster shares.

A master knows which machine holds what; the bytes go straight from one machine's memory to another's. Mooncake keeps
objects under names:

    rorqual / version / identity (sha256) / key            the page, then its check

so a store of another model, page size or version is simply not seen, and a page put under a wrong name does not verify.
The master evicts; a machine that dies takes along what it held. Both are pages that are not there.

A call that gets no answer in time makes the whole tier count as away: until a call of its own gets through, nobody else
waits. Mooncake's client finds a master that comes back at its address.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rorqual.errors import InputError
from rorqual.log import logger
from rorqual.store import mooncake
from rorqual.store.bounded import BoundedCalls, OverdueError
from rorqual.store.checksum import CHECK_BYTES, PageCheck
from rorqual.store.interface import PageBytes, StoreIdentity, StoreStat

T = TypeVar("T")

PREFIX = "rorqual"
VERSION = 1
"""Of what an object holds."""
CALLS = 4
"""At a time; so many may hang before the tier counts as away."""
PROBE_S = 1.0
"""Between two looks whether a store that is away is back."""
OPEN_S, CLOSE_S = 15.0, 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Where the store is and how this process takes part.

    master: host:port. host: this machine's name to the others. memory_bytes: of this process, lent to the store; 0 for
    a process that only uses it. buffer_bytes: that pages pass through. protocol, devices: of `mooncake.PROTOCOLS`, and
    which RDMA devices, by comma; empty for any. deadline_s: of a call.
    """

    master: str
    host: str = mooncake.HOST
    memory_bytes: int = 0
    buffer_bytes: int = 64 << 20
    protocol: str = "tcp"
    devices: str = ""
    deadline_s: float = 2.0

    def __post_init__(self) -> None:
        for name, least in (("memory_bytes", 0), ("buffer_bytes", 1)):
            if getattr(self, name) < least:
                raise InputError(f"remote store: {name} {getattr(self, name)} is not legal; legal: at least {least}")
        if not self.deadline_s > 0:
            raise InputError(f"remote store: deadline_s {self.deadline_s} is not legal; legal: above 0")
        mooncake.check_protocol(self.protocol, self.devices)


class RemoteStore:
    """One identity's pages in a Mooncake store.

    What it holds is not known here: `stat` counts this process's calls, and no pages or bytes.

    Raises:
        InputError: Mooncake is not installed, no master answers, or an option is not legal.
    """

    def __init__(self, identity: StoreIdentity, options: RemoteOptions) -> None:
        self._identity = identity
        self._options = options
        self._folder = f"{PREFIX}/{VERSION}/{_digest(identity)}/"
        self._check = PageCheck(identity.page_bytes)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._away = False
        self._closed = threading.Event()
        if options.buffer_bytes < identity.page_bytes + CHECK_BYTES:
            raise InputError(f"remote store: buffer_bytes {options.buffer_bytes} hold no page of {identity.page_bytes}")
        self._client = mooncake.store_module().MooncakeDistributedStore()
        if not mooncake.answers(options.master, options.deadline_s):
            raise InputError(f"remote store: no Mooncake master answers at {options.master}")
        self._calls = BoundedCalls(CALLS, "mooncake-store")
        self._open()

    @property
    def identity(self) -> StoreIdentity:
        return self._identity

    def put(self, key: bytes, page: PageBytes) -> bool:
        size = self._identity.page_bytes
        assert memoryview(page).nbytes == size, (memoryview(page).nbytes, size)
        name = self._name(key)
        blob = b"".join((page, self._check(name.encode(), page)))
        kept = self._call(lambda: self._client.put(name, blob), -1) == 0
        self._count("puts", dropped=not kept)
        return kept

    def get(self, key: bytes) -> bytes | None:
        name = self._name(key)
        blob: bytes = self._call(lambda: self._client.get(name), b"")
        # Mooncake says what is not there, and what it could not fetch, by an empty object.
        page = self._verified(name, blob) if blob else None
        self._count("gets", hits=page is not None, damaged=bool(blob) and page is None)
        if blob and page is None:
            # A put keeps what is there, so it must go before the right page can come.
            self._remove(name)
        return page

    def match(self, keys: Sequence[bytes]) -> int:
        if not keys:
            return 0
        names = [self._name(key) for key in keys]
        found: list[int] = self._call(lambda: self._client.batch_is_exist(names), [])
        return next((i for i, there in enumerate(found) if there != 1), len(found))

    def delete(self, key: bytes) -> bool:
        return self._remove(self._name(key))

    def stat(self) -> StoreStat:
        with self._lock:
            return StoreStat(**self._counts)

    def flush(self) -> None:
        """Nothing to do: a put that returned True is where others find it."""

    def close(self) -> None:
        with self._lock:
            first = not self._closed.is_set()
            self._closed.set()
        # Mooncake crashes when it is called while it closes, or after. With a call that hangs it is left as it is.
        if not first or not self._calls.close(self._options.deadline_s):
            return
        closing = BoundedCalls(1, "mooncake-close")
        try:
            closing.run(self._client.close, CLOSE_S)
        except OverdueError:
            logger.warning("remote store: Mooncake did not close within %g s", CLOSE_S)
        closing.close(0)

    def _open(self) -> None:
        own = self._options
        places = own.host, mooncake.HANDSHAKE, own.memory_bytes, own.buffer_bytes
        try:
            code = self._calls.run(lambda: self._client.setup(*places, own.protocol, own.devices, own.master), OPEN_S)
        except OverdueError:
            raise InputError(f"remote store: no Mooncake master answers at {own.master} within {OPEN_S:g} s") from None
        if code != 0:
            raise InputError(f"remote store: Mooncake refuses master {own.master}, host {own.host} (code {code})")

    def _verified(self, name: str, blob: bytes) -> bytes | None:
        size = self._identity.page_bytes
        if len(blob) != size + CHECK_BYTES:
            return None
        page = blob[:size]
        return page if self._check(name.encode(), page) == blob[size:] else None

    def _name(self, key: bytes) -> str:
        return self._folder + key.hex()

    def _remove(self, name: str) -> bool:
        # By force: a page that was just looked at is held for some seconds otherwise.
        return self._call(lambda: self._client.remove(name, True), -1) == 0

    def _call(self, work: Callable[[], Any], otherwise: T) -> Any | T:
        if self._away or self._closed.is_set():
            return otherwise
        try:
            return self._calls.run(work, self._options.deadline_s)
        except OverdueError:
            self._lose()
            return otherwise

    def _lose(self) -> None:
        with self._lock:
            if self._away or self._closed.is_set():
                return
            self._away = True
        logger.warning(
            "remote store: no answer by way of %s within %g s; until there is one, its pages count as not there",
            self._options.master,
            self._options.deadline_s,
        )
        threading.Thread(target=self._look, name="mooncake-probe", daemon=True).start()

    def _look(self) -> None:
        """Until the store answers again."""
        while not self._closed.wait(PROBE_S):
            try:
                code = self._calls.run(lambda: self._client.is_exist(self._folder), self._options.deadline_s)
            except OverdueError:
                continue
            if code >= 0:
                self._away = False
                logger.info("remote store: %s answers again", self._options.master)
                return

    def _count(self, what: str, **events: bool) -> None:
        with self._lock:
            self._counts[what] += 1
            for name, happened in events.items():
                self._counts[name] += happened


def _digest(identity: StoreIdentity) -> str:
    return hashlib.sha256(json.dumps(asdict(identity), sort_keys=True).encode()).hexdigest()
