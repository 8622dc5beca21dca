"""What a tier of the KV pool can do: keep the bytes of full, accepted pages under the keys of `PrefixChain`.

A key stands for a model, a page size, a tenant and everything up to the end of its page (`rorqual.pool.prefix`), so a
store never compares tokens. Only global KV is stored: windows come back by replay.

A store may lose any page at any time and say so; it never hands out bytes other than those that were put. Whoever asks
computes again what is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PageBytes = bytes | bytearray | memoryview
"""A page: `page_bytes` contiguous bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """Whose pages a store holds; one of another identity is never read.

    fingerprint: of the model and its cache formats (`rorqual.engine.identity`). page_tokens, page_bytes: of one page.
    """

    fingerprint: str
    page_tokens: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStat:
    """Counts since it was opened, and what there is now.

    pages, bytes: held now; bytes are those of pages, without what is stored about them. capacity: bytes of pages that
    it may hold, None where there is no bound. used: bytes taken where they are, index and waste included.
    puts, gets, hits: calls. dropped: pages that it did not take. evicted, expired, damaged: pages that went for room,
    for their age, because their bytes were wrong.
    """

    pages: int = 0
    bytes: int = 0
    capacity: int | None = None
    used: int = 0
    puts: int = 0
    gets: int = 0
    hits: int = 0
    dropped: int = 0
    evicted: int = 0
    expired: int = 0
    damaged: int = 0


class PageStore(Protocol):
    """One tier, or several that act as one. Calls may come from any thread.

    No call raises for what happens to the medium after it was opened (full, damaged, gone): a page is not kept, or not
    there, and `stat` counts it.
    """

    @property
    def identity(self) -> StoreIdentity: ...

    def put(self, key: bytes, page: PageBytes) -> bool:
        """Keep a page; True where it is kept, or was there already. The bytes are copied before it returns."""

    def get(self, key: bytes) -> bytes | None:
        """The page, verified; None where it is not there (any more)."""

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading keys it holds, by its index; a page may still be lost before it is got."""

    def delete(self, key: bytes) -> bool:
        """Forget a page; whether it was there."""

    def stat(self) -> StoreStat: ...

    def flush(self) -> None:
        """Everything that was put is where a later process finds it."""

    def close(self) -> None:
        """Flush, and let go of files. Calls after it find nothing and keep nothing."""
