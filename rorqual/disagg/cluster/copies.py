"""The plain way for a parcel between two workers: as the answer of a call. Ray's object store carries it then.

The sender's pages are free as soon as the copy is made. What the copies take is bounded by credit, which comes back
when the receiver has begun, or after a while.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rorqual.disagg.parcel import Parcel
from rorqual.disagg.transport import Settled, Ticket
from rorqual.errors import HandoverError


@dataclass(slots=True)
class _Copy:
    """data: until it is taken. until: when its credit is back at the latest."""

    ticket: Ticket
    data: bytes | None
    until: float


class Copies:
    """The sender's end of a `Transport` whose receiver gets the bytes handed.

    Args:
        credit_bytes: of copies under way, at most.
        clock: seconds.
    """

    def __init__(self, credit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.credit_bytes, self._clock = credit_bytes, clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._copies: dict[str, _Copy] = {}
        self._over: list[Settled] = []

    @property
    def out_bytes(self) -> int:
        """Of copies under way."""
        with self._lock:
            self._expire()
            return self._taken()

    def offer(self, parcel: Parcel, hold_s: float) -> Ticket | None:
        """A copy; the offer is settled at once. None and errors as of `Transport`."""
        name, size = parcel.header.request, parcel.nbytes
        if size > self.credit_bytes:
            raise HandoverError(f"hand-over of {name!r}: {size} bytes; handover.bytes is {self.credit_bytes}")
        with self._lock:
            self._expire()
            if self._taken() + size > self.credit_bytes:
                return None
            ticket = Ticket(request=name, nbytes=size, place=str(next(self._numbers)))
            self._copies[name] = _Copy(ticket, b"".join(parcel.buffers()), self._clock() + hold_s)
            self._over.append(Settled(ticket=ticket, outcome="done"))
            return ticket

    def take(self, ticket: Ticket) -> bytes:
        """The copy, once. Raises HandoverError where it is there no more."""
        with self._lock:
            own = self._copies.get(ticket.request)
            data = None if own is None or own.ticket != ticket else own.data
            if own is None or data is None:
                raise HandoverError(f"hand-over of {ticket.request!r}: it is not offered any more")
            own.data = None
            return data

    def settled(self) -> list[Settled]:
        with self._lock:
            found, self._over = self._over, []
            return found

    def pull(self, ticket: Ticket, timeout_s: float) -> bytes:
        """Within the sender's process. Raises HandoverError as `take`."""
        return self.take(ticket)

    def done(self, ticket: Ticket) -> None:
        self.cancel(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """The credit is back."""
        self.release(ticket.request)

    def release(self, request: str) -> None:
        """As `done`, by the name of the request."""
        with self._lock:
            self._copies.pop(request, None)

    def close(self) -> None:
        with self._lock:
            self._copies.clear()

    def _taken(self) -> int:
        return sum(own.ticket.nbytes for own in self._copies.values())

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, own in self._copies.items() if own.until <= now]:
            del self._copies[name]
