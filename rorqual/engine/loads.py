"""What a scheduler asks about pages that are elsewhere, in keys and page numbers alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from rorqual.engine.queue import Track


class Loads(Protocol):
    """Of requests that wait: what a store has for them."""

    def loaded(self, track: Track) -> Collection[bytes] | None:
        """Keys of a waiting request whose bytes are at hand; None while it had better wait for more."""

    def admitted(self, request: str, keys: Sequence[bytes], restored: Sequence[tuple[int, bytes]]) -> None:
        """It waits no more, and has pages of these keys; those `restored` get their bytes before this returns."""

    def dropped(self, request: str) -> None:
        """It waits no more, and needs nothing."""


class NoStore:
    """Nothing is elsewhere."""

    def loaded(self, track: Track) -> Collection[bytes]:
        return ()

    def admitted(self, request: str, keys: Sequence[bytes], restored: Sequence[tuple[int, bytes]]) -> None:
        assert not restored

    def dropped(self, request: str) -> None:
        pass
