"""The transport between machines: Mooncake's transfer engine reads a parcel out of the sender's memory.

Everything is one-sided: the receiver reads the bytes and writes one word back, and the sender's code takes no part, so
there is no message of ours but the ticket. The sender registers one block of memory once and for all:

    | word, word, ...  one an offer: the receiver writes the offer's nonce into it, which is `done` |
    | nonce, message | nonce, message | ...  parcels that are offered                                |

A ticket's place says whose memory, where in it, and the nonce. An offer that is over has its nonce wiped, so a late
receiver learns that it is not offered any more; one that was reading just then has mixed bytes, which the parcel's own
checks find. A late `done` writes an old nonce, which ends nothing. The block stays mapped for as long as the engine
lives, because nobody can know who still reads.

A receiver that gives up leaves a read behind, which ends in Mooncake's own time: on TCP after 10 s without progress, in
a first handshake after 60 s. Until then it holds its buffer and one of `PULLS` threads.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rorqual.disagg.arena import Arena
from rorqual.disagg.parcel import Parcel
from rorqual.disagg.transport import CREDIT_PARCELS, Settled, Ticket, check_credit
from rorqual.errors import HandoverError, InputError
from rorqual.log import logger
from rorqual.store import mooncake
from rorqual.store.bounded import BoundedCalls, OverdueError

NONCE_BYTES = 16
"""Of an offer, drawn at random: nobody holds two that are alike."""
CREDIT_BYTES = 256 << 20
"""Less than within a process: all of it is the sender's own memory, beside its pages."""
PULLS = 4
DONE_S = 1.0
"""That a receiver waits for its `done` to arrive; then the sender's deadline has to do."""
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """peer: host:port of the sender's engine. word, message: addresses in its memory. nonce: in hex."""

    peer: str
    word: int
    message: int
    nonce: str

    def spelled(self) -> str:
        return json.dumps([self.peer, self.word, self.message, self.nonce])

    @classmethod
    def of(cls, ticket: Ticket) -> _Place:
        try:
            peer, word, message, nonce = json.loads(ticket.place)
            if len(bytes.fromhex(nonce)) == NONCE_BYTES and min(word, message) > 0 and ticket.nbytes > 0:
                return cls(peer=str(peer), word=int(word), message=int(message), nonce=nonce)
        except (ValueError, TypeError):
            pass
        raise HandoverError(f"hand-over of {ticket.request!r}: {ticket.place!r} is no place of Mooncake's")


@dataclass(slots=True)
class _Offer:
    ticket: Ticket
    place: _Place
    slot: int
    start: int
    until: float


class MooncakeTransport:
    """One side's end, or both.

    Args:
        host: of this machine, as the others reach it.
        protocol, devices: of `mooncake.PROTOCOLS`; RDMA devices by comma, empty for any.
        credit_bytes: memory for parcels that are offered at once; who only pulls needs next to none.
        credit_parcels: how many.
        clock: seconds.

    Raises:
        InputError: Mooncake is not installed or does not start, no credit, or an option that is not legal.
    """

    def __init__(
        self,
        *,
        host: str = mooncake.HOST,
        protocol: str = "tcp",
        devices: str = "",
        credit_bytes: int = CREDIT_BYTES,
        credit_parcels: int = CREDIT_PARCELS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_credit(credit_bytes, credit_parcels)
        mooncake.check_protocol(protocol, devices)
        self.credit_bytes, self.credit_parcels = credit_bytes, credit_parcels
        self._engine = mooncake.engine_module().TransferEngine()
        code = self._engine.initialize(host, mooncake.HANDSHAKE, protocol, devices)
        if code != 0:
            raise InputError(f"Mooncake's transfer engine does not start at {host} with {protocol} (code {code})")
        self.peer = f"{host}:{self._engine.get_rpc_port()}"
        self._clock = clock
        self._lock = threading.Lock()
        self._offers: dict[str, _Offer] = {}
        self._over: list[Settled] = []
        self._lost: set[str] = set()
        self._closed = False
        self._free_slots = list(range(credit_parcels))
        words = -(-credit_parcels * NONCE_BYTES // ALIGNMENT) * ALIGNMENT
        room = credit_bytes + credit_parcels * (NONCE_BYTES + ALIGNMENT)
        self._block = _Block(self._engine, words + room)
        self._arena = Arena(words, words + room, ALIGNMENT)
        self._calls = BoundedCalls(PULLS, "mooncake-transfer")

    @property
    def offered_bytes(self) -> int:
        with self._lock:
            return self._taken()

    def offer(self, parcel: Parcel, hold_s: float) -> Ticket | None:
        ticket = Ticket(request=parcel.header.request, nbytes=parcel.nbytes, place="")
        if ticket.nbytes > self.credit_bytes:
            most = f"the transport takes {self.credit_bytes} at most"
            raise HandoverError(f"hand-over of {ticket.request!r}: {ticket.nbytes} bytes; {most}")
        with self._lock:
            self._settle()
            offer = None if self._closed else self._reserve(ticket, hold_s)
            if offer is None:
                return None
            at = offer.start + NONCE_BYTES
            for own in parcel.buffers():
                self._block.view[at : at + own.nbytes] = own.cast("B")
                at += own.nbytes
            self._block.view[offer.start : offer.start + NONCE_BYTES] = bytes.fromhex(offer.place.nonce)
            return offer.ticket

    def settled(self) -> list[Settled]:
        with self._lock:
            self._settle()
            found, self._over = self._over, []
            return found

    def pull(self, ticket: Ticket, timeout_s: float) -> memoryview:
        place = _Place.of(ticket)
        self._lost.add(ticket.place)
        try:
            message = self._calls.run(lambda: self._read(place, ticket.nbytes), timeout_s)
        except OverdueError:
            raise HandoverError(
                f"hand-over of {ticket.request!r}: it did not come from {place.peer} within {timeout_s:g} s"
            ) from None
        if message is None:
            raise HandoverError(f"hand-over of {ticket.request!r}: its sender at {place.peer} is gone")
        self._lost.discard(ticket.place)
        if message[:NONCE_BYTES] != bytes.fromhex(place.nonce):
            raise HandoverError(f"hand-over of {ticket.request!r}: it is not offered any more")
        return message[NONCE_BYTES:]

    def done(self, ticket: Ticket) -> None:
        try:
            place = _Place.of(ticket)
            if place.peer == self.peer:
                self._end(ticket, "done")
            elif ticket.place in self._lost:
                # Who did not answer the pull would keep the receiver waiting once more.
                self._lost.discard(ticket.place)
            else:
                self._calls.run(lambda: self._write(place), DONE_S)
        except (HandoverError, OverdueError) as error:
            logger.info("hand-over of %r: done did not arrive (%s)", ticket.request, error or "no answer")

    def cancel(self, ticket: Ticket) -> None:
        self._end(ticket, "cancelled")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for place in list(self._offers):
                self._over_with(place, "cancelled")
        if self._calls.close(DONE_S):
            # The engine first: its threads must not find the block gone.
            self._engine = None

    def check_integrity(self) -> None:
        """Room and words that are not an offer's are free."""
        with self._lock:
            self._arena.check_integrity()
            assert len(self._free_slots) + len(self._offers) == self.credit_parcels

    def _taken(self) -> int:
        return sum(offer.ticket.nbytes for offer in self._offers.values())

    def _reserve(self, ticket: Ticket, hold_s: float) -> _Offer | None:
        if not self._free_slots or self._taken() + ticket.nbytes > self.credit_bytes:
            return None
        start = self._arena.take(NONCE_BYTES + ticket.nbytes)
        if start is None:
            return None
        slot = self._free_slots.pop()
        self._block.view[_word(slot)] = bytes(NONCE_BYTES)
        address = self._block.address
        place = _Place(
            peer=self.peer,
            word=address + slot * NONCE_BYTES,
            message=address + start,
            nonce=secrets.token_hex(NONCE_BYTES),
        )
        own = replace(ticket, place=place.spelled())
        offer = _Offer(own, place, slot, start, self._clock() + hold_s)
        self._offers[own.place] = offer
        return offer

    def _settle(self) -> None:
        now = self._clock()
        for spelled, offer in list(self._offers.items()):
            if self._block.view[_word(offer.slot)] == bytes.fromhex(offer.place.nonce):
                self._over_with(spelled, "done")
            elif offer.until <= now:
                self._over_with(spelled, "expired")

    def _end(self, ticket: Ticket, outcome: str) -> None:
        with self._lock:
            if ticket.place in self._offers:
                self._over_with(ticket.place, outcome)

    def _over_with(self, spelled: str, outcome: str) -> None:
        offer = self._offers.pop(spelled)
        self._block.view[offer.start : offer.start + NONCE_BYTES] = bytes(NONCE_BYTES)
        self._arena.give(offer.start, NONCE_BYTES + offer.ticket.nbytes)
        self._free_slots.append(offer.slot)
        self._over.append(Settled(ticket=offer.ticket, outcome=outcome))

    def _read(self, place: _Place, nbytes: int) -> memoryview | None:
        size = NONCE_BYTES + nbytes
        block = _Block(self._engine, size)
        try:
            code = self._engine.transfer_sync_read(place.peer, block.address, place.message, size)
        finally:
            block.forget(self._engine)
        return block.view if code == 0 else None

    def _write(self, place: _Place) -> None:
        block = _Block(self._engine, NONCE_BYTES)
        try:
            block.view[:] = bytes.fromhex(place.nonce)
            code = self._engine.transfer_sync_write(place.peer, block.address, place.word, NONCE_BYTES)
        finally:
            block.forget(self._engine)
        if code != 0:
            logger.info("hand-over: done did not arrive, %s is gone", place.peer)


class _Block:
    """Memory that the engine may read and write; unmapped with the last view of it.

    Raises:
        HandoverError: the engine does not take it.
    """

    def __init__(self, engine: Any, size: int) -> None:
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, OverflowError) as error:
            raise HandoverError(f"no memory for {size} bytes ({error})") from None
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = engine.register_memory(self.address, size)
        if code != 0:
            raise HandoverError(f"Mooncake does not register {size} bytes of memory (code {code})")

    def forget(self, engine: Any) -> None:
        """After it no transfer reaches the memory."""
        engine.unregister_memory(self.address)


def _word(slot: int) -> slice:
    return slice(slot * NONCE_BYTES, (slot + 1) * NONCE_BYTES)
