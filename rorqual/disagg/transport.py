"""How a parcel gets from one worker to another. One interface; within a process, and `rorqual.disagg.mooncake`.

    sender      offer -> a ticket, or no credit        settled -> which tickets are over, and how
    receiver    pull(ticket) -> bytes                  done(ticket): the sender may let go

The ticket is a small value that travels with whatever the two have in common: a call, a pipe, Ray. A transport has no
messages of its own but bytes and the word that they are done with.

Every state has a bound. An offer is over when its receiver says `done`, when either side cancels, or when its time has
passed, whatever was lost: `settled` names it then, once, and the sender gives its pages back. A pull ends by its own
deadline, with the bytes or with an error.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rorqual.disagg.parcel import Parcel
from rorqual.errors import HandoverError, InputError

CREDIT_BYTES = 1 << 30
CREDIT_PARCELS = 64
OUTCOMES = ("done", "cancelled", "expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Where an offered parcel is: all that a receiver has to be told.

    request: whose it is. nbytes: of the whole message. place: in the transport's own words.
    """

    request: str
    nbytes: int
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """An offer that is over, in one of `OUTCOMES`."""

    ticket: Ticket
    outcome: str


class Transport(Protocol):
    """One side's end, of one sender; within a process its receivers share it. Calls may come from any thread."""

    def offer(self, parcel: Parcel, hold_s: float) -> Ticket | None:
        """Let a receiver have the parcel for `hold_s` seconds; None where there is no credit for it now.

        The parcel's buffers must stay as they are until the ticket is settled. If they do not, a receiver finds the
        parcel damaged.

        Raises:
            HandoverError: it could never be offered: larger than all credit there is.
        """

    def settled(self) -> list[Settled]:
        """Offers that have ended since the last call, each once. Their credit is free again."""

    def pull(self, ticket: Ticket, timeout_s: float) -> bytes | bytearray | memoryview:
        """The message of a ticket; it is still offered then, for another try.

        Raises:
            HandoverError: it is not offered any more, its sender is gone, or the time has passed.
        """

    def done(self, ticket: Ticket) -> None:
        """The receiver has what it needs, or needs it no more. Never fails: what gets lost is found by the deadline."""

    def cancel(self, ticket: Ticket) -> None:
        """The sender takes an offer back; one that is over stays so."""

    def close(self) -> None:
        """Cancel what is offered and let go of what the transport holds."""


@dataclass(slots=True)
class _Offer:
    ticket: Ticket
    parcel: Parcel
    until: float


def check_credit(credit_bytes: int, credit_parcels: int) -> None:
    """Raises InputError where there is none."""
    for name, value in (("credit_bytes", credit_bytes), ("credit_parcels", credit_parcels)):
        if value < 1:
            raise InputError(f"{name}: {value} is not legal; legal: at least 1")


class InProcess:
    """Both ends within one process.

    Args:
        credit_bytes: of parcels that may be offered at once. credit_parcels: how many.
        clock: seconds.

    Raises:
        InputError: no credit at all.
    """

    def __init__(
        self,
        *,
        credit_bytes: int = CREDIT_BYTES,
        credit_parcels: int = CREDIT_PARCELS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_credit(credit_bytes, credit_parcels)
        self.credit_bytes, self.credit_parcels = credit_bytes, credit_parcels
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._offers: dict[str, _Offer] = {}
        self._over: list[Settled] = []

    @property
    def offered_bytes(self) -> int:
        with self._lock:
            return sum(offer.ticket.nbytes for offer in self._offers.values())

    def offer(self, parcel: Parcel, hold_s: float) -> Ticket | None:
        size = parcel.nbytes
        if size > self.credit_bytes:
            raise HandoverError(
                f"hand-over of {parcel.header.request!r}: {size} bytes; the transport takes {self.credit_bytes} at most"
            )
        with self._lock:
            self._expire()
            taken = sum(offer.ticket.nbytes for offer in self._offers.values())
            if taken + size > self.credit_bytes or len(self._offers) >= self.credit_parcels:
                return None
            ticket = Ticket(request=parcel.header.request, nbytes=size, place=str(next(self._numbers)))
            self._offers[ticket.place] = _Offer(ticket, parcel, self._clock() + hold_s)
            return ticket

    def settled(self) -> list[Settled]:
        with self._lock:
            self._expire()
            found, self._over = self._over, []
            return found

    def pull(self, ticket: Ticket, timeout_s: float) -> bytearray:
        with self._lock:
            self._expire()
            offer = self._offers.get(ticket.place)
        if offer is None:
            raise HandoverError(f"hand-over of {ticket.request!r}: it is not offered any more")
        return offer.parcel.to_bytes()

    def done(self, ticket: Ticket) -> None:
        self._end(ticket.place, "done")

    def cancel(self, ticket: Ticket) -> None:
        self._end(ticket.place, "cancelled")

    def close(self) -> None:
        for place in list(self._offers):
            self._end(place, "cancelled")

    def _end(self, place: str, outcome: str) -> None:
        with self._lock:
            offer = self._offers.pop(place, None)
            if offer is not None:
                self._over.append(Settled(ticket=offer.ticket, outcome=outcome))

    def _expire(self) -> None:
        now = self._clock()
        for place in [place for place, offer in self._offers.items() if offer.until <= now]:
            self._over.append(Settled(ticket=self._offers.pop(place).ticket, outcome="expired"))
