"""Mooncake's transfer engine as a transport, between real processes on loopback.

A parcel comes whole or not at all, whoever dies, hangs or takes back at whatever moment; and within a bound both sides
have let go.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from mooncake_here import needs_mooncake
from mooncake_peer import Peer, parcel_of
from stopping import stop

from rorqual.disagg.mooncake import MooncakeTransport, _Block
from rorqual.disagg.parcel import Parcel
from rorqual.disagg.transport import Settled, Ticket, Transport
from rorqual.errors import HandoverError, InputError

pytestmark = needs_mooncake

SMALL, LARGE = 300_000, 32 << 20
LONG = 60.0
"""For what ends by itself."""
HOLD = 1.0
CUTS = (0.0, 0.3, 0.6)
"""Shares of a message that have come when something happens to its sender."""
FULL_CUTS = tuple(number / 40 for number in range(40))


@pytest.fixture(scope="module")
def transport() -> Iterator[MooncakeTransport]:
    transport = MooncakeTransport()
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


def settled_by(transport: Transport, within_s: float) -> list[Settled]:
    until, found = time.monotonic() + within_s, []
    while not found and time.monotonic() < until:
        found = transport.settled()
        time.sleep(0.02)
    return found


def came(transport: MooncakeTransport, ticket: Ticket, timeout_s: float = LONG) -> bool:
    """Whether the parcel came; that it is the right one is asserted here."""
    try:
        parcel = Parcel.from_bytes(transport.pull(ticket, timeout_s))
    except HandoverError:
        return False
    seed = int(ticket.request.split()[1])
    assert parcel.head == parcel_of(seed, parcel.sizes().pages).head
    return True


def test_a_parcel_crosses_and_done_goes_back(transport: MooncakeTransport, peer: Peer) -> None:
    sizes = (1, SMALL, 3_000_001)
    for seed, nbytes in enumerate(sizes):
        ticket = peer.ticket(seed, nbytes, LONG)
        assert ticket.nbytes == parcel_of(seed, nbytes).nbytes
        message = transport.pull(ticket, LONG)
        assert bytes(message) == bytes(parcel_of(seed, nbytes).to_bytes())
        assert bytes(transport.pull(ticket, LONG)) == bytes(message), "it is offered until it is done"
        transport.done(ticket)
        assert peer.ask("settled") == [[ticket.request, "done"]]
    assert peer.ask("settled") == []
    peer.ask("integrity")


def test_and_the_other_way_round(transport: MooncakeTransport, peer: Peer) -> None:
    ticket = transport.offer(parcel_of(5, SMALL), LONG)
    assert ticket is not None and transport.settled() == []
    asked = {"request": ticket.request, "nbytes": ticket.nbytes, "place": ticket.place}
    assert peer.ask("pull", asked, LONG) == ticket.request
    assert transport.settled() == []
    peer.ask("done")
    assert transport.settled() == [Settled(ticket=ticket, outcome="done")]
    assert transport.offered_bytes == 0
    transport.check_integrity()


def test_both_ends_in_one(transport: MooncakeTransport) -> None:
    tickets = [transport.offer(parcel_of(seed, SMALL), LONG) for seed in range(3)]
    assert all(ticket is not None and came(transport, ticket) for ticket in tickets)
    for ticket in tickets:
        assert ticket is not None
        transport.done(ticket)
        transport.done(ticket)
    assert [settled.outcome for settled in transport.settled()] == ["done"] * 3


def test_an_offer_that_is_over_cannot_be_pulled(transport: MooncakeTransport, peer: Peer) -> None:
    ticket = peer.ticket(1, SMALL, LONG)
    peer.ask("cancel")
    with pytest.raises(HandoverError, match="request 1': it is not offered any more"):
        transport.pull(ticket, LONG)
    again = peer.ticket(2, SMALL, LONG)
    with pytest.raises(HandoverError, match="request 1': it is not offered any more"):
        transport.pull(ticket, LONG)
    transport.done(ticket)  # of the one that is over: whatever took its place goes on
    assert peer.ask("settled") == [["request 1", "cancelled"]]
    assert came(transport, again)
    transport.done(again)
    assert peer.ask("settled") == [["request 2", "done"]]


def test_an_offer_ends_by_its_time(transport: MooncakeTransport, peer: Peer) -> None:
    ticket = peer.ticket(1, SMALL, 0.05)
    time.sleep(0.1)
    assert peer.ask("settled") == [["request 1", "expired"]]
    assert not came(transport, ticket)
    transport.done(ticket)
    assert peer.ask("settled") == []


def test_credit_is_bounded_and_comes_back() -> None:
    transport = MooncakeTransport(credit_bytes=3 * parcel_of(0, SMALL).nbytes, credit_parcels=4)
    held = [transport.offer(parcel_of(seed, SMALL), LONG) for seed in range(10)]
    assert [ticket is not None for ticket in held] == [True] * 3 + [False] * 7
    assert transport.offered_bytes == transport.credit_bytes
    with pytest.raises(HandoverError, match="the transport takes"):
        transport.offer(parcel_of(0, 4 * SMALL), LONG)
    assert held[1] is not None and held[0] is not None
    transport.cancel(held[1])
    transport.cancel(held[1])
    assert transport.offer(parcel_of(9, SMALL), LONG) is not None
    assert came(transport, held[0]), "the one in front stands as it was"
    assert [settled.outcome for settled in transport.settled()] == ["cancelled"]
    for _ in range(3):
        transport.check_integrity()
        for own in list(transport._offers.values()):
            transport.cancel(own.ticket)
    small = [transport.offer(parcel_of(seed, 10), LONG) for seed in range(6)]
    assert [ticket is not None for ticket in small] == [True] * 4 + [False] * 2
    transport.close()
    assert {settled.outcome for settled in transport.settled()} == {"cancelled"}
    assert transport.offer(parcel_of(0, 10), LONG) is None


def test_a_flipped_bit_is_found(transport: MooncakeTransport) -> None:
    ticket = transport.offer(parcel_of(0, SMALL), LONG)
    assert ticket is not None
    start = transport._offers[ticket.place].start
    for at in (20, 200, 1000, 150_000, SMALL):
        transport._block.view[start + at] ^= 1
        assert not came(transport, ticket)
        transport._block.view[start + at] ^= 1
    assert came(transport, ticket)
    transport.cancel(ticket)
    transport.settled()


def test_who_only_pulls_needs_no_credit(peer: Peer) -> None:
    receiver = MooncakeTransport(credit_bytes=1, credit_parcels=1)
    ticket = peer.ticket(3, SMALL, LONG)
    assert came(receiver, ticket)
    receiver.done(ticket)
    assert peer.ask("settled") == [["request 3", "done"]]
    for nbytes in (1 << 46, 1 << 70):
        with pytest.raises(HandoverError):
            receiver.pull(replace(ticket, nbytes=nbytes), LONG)
    receiver.close()


@pytest.mark.parametrize("place", ["", "7", "[]", '["127.0.0.1:1", 0, 0, ""]', "[1, 2, 3, 4]", '["a", 64, 64, "zz"]'])
def test_a_place_of_something_else_is_refused(place: str, transport: MooncakeTransport) -> None:
    ticket = Ticket(request="r", nbytes=10, place=place)
    with pytest.raises(HandoverError, match="hand-over of 'r'"):
        transport.pull(ticket, LONG)
    transport.done(ticket)
    transport.cancel(ticket)


def test_a_wrong_place_of_a_living_peer_is_an_error(transport: MooncakeTransport, peer: Peer) -> None:
    ticket = peer.ticket(0, SMALL, LONG)
    host, word, message, nonce = json.loads(ticket.place)
    beyond = replace(ticket, place=json.dumps([host, word, message + (1 << 40), nonce]))
    with pytest.raises(HandoverError, match="gone"):
        transport.pull(beyond, LONG)
    assert came(transport, ticket), "the engine goes on"
    peer.ask("cancel")
    peer.ask("settled")


def test_the_sender_is_killed_before_the_pull(transport: MooncakeTransport) -> None:
    with Peer() as peer:
        ticket = peer.ticket(1, SMALL, LONG)
        peer.kill()
        with pytest.raises(HandoverError, match="is gone"):
            transport.pull(ticket, LONG)
        transport.done(ticket)


class Pull:
    """A pull in a thread, of which one can see how far it is."""

    def __init__(self, transport: MooncakeTransport, ticket: Ticket, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[_Block] = []
        self.found: list[bool] = []
        real = transport._read

        def read(place: Any, nbytes: int) -> memoryview | None:
            with monkeypatch.context() as patch:
                patch.setattr(
                    "rorqual.disagg.mooncake._Block", lambda *args: self.blocks.append(_Block(*args)) or self.blocks[-1]
                )
                return real(place, nbytes)

        monkeypatch.setattr(transport, "_read", read)
        self.thread = threading.Thread(target=lambda: self.found.append(came(transport, ticket)))
        self.thread.start()

    def _block(self, engine: Any, size: int) -> _Block:
        self.blocks.append(_Block(engine, size))
        return self.blocks[-1]

    def until(self, share: float) -> None:
        """That share of the bytes has come; none where it is 0."""
        while share and self.thread.is_alive():
            if self.blocks:
                at = int(share * len(self.blocks[0].view))
                if any(self.blocks[0].view[at : at + 64]):
                    return

    def whole(self) -> bool:
        self.thread.join(LONG)
        assert len(self.found) == 1, "no end, or wrong bytes"
        return self.found[0]


@pytest.mark.parametrize("cuts", [CUTS, pytest.param(FULL_CUTS, marks=pytest.mark.full)], ids=["a few", "many"])
def test_the_sender_is_killed_while_it_is_read(
    cuts: tuple[float, ...], transport: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = []
    for cut in cuts:
        with Peer() as peer, monkeypatch.context() as patch:
            ticket = peer.ticket(1, LARGE, LONG)
            pull = Pull(transport, ticket, patch)
            pull.until(cut)
            peer.kill()
            whole.append(pull.whole())
        assert not came(transport, ticket)
        transport.done(ticket)
    assert False in whole, "no kill was early enough to cut a transfer"
    assert transport._calls.late == 0


def test_the_sender_is_killed_after_the_pull(transport: MooncakeTransport) -> None:
    with Peer() as peer:
        ticket = peer.ticket(1, SMALL, LONG)
        message = transport.pull(ticket, LONG)
        peer.kill()
        begun = time.monotonic()
        transport.done(ticket)
        assert time.monotonic() - begun < LONG
        assert Parcel.from_bytes(message).header.request == ticket.request, "what came is the receiver's own"


def test_a_sender_that_hangs_costs_the_deadline() -> None:
    transport = MooncakeTransport()
    with Peer() as peer, Peer() as other:
        known = peer.ticket(1, SMALL, LONG)
        assert came(transport, known)
        stop(peer.process.pid)
        begun = time.monotonic()
        with pytest.raises(HandoverError, match=r"did not come from .* within 0\.5 s"):
            transport.pull(known, 0.5)
        transport.done(known)
        assert time.monotonic() - begun < 20, "Mooncake itself waits 30 s"
        assert came(transport, other.ticket(2, SMALL, LONG)), "others are served meanwhile"
        os.kill(peer.process.pid, signal.SIGCONT)
        assert came(transport, peer.ticket(3, SMALL, LONG))
    transport.close()


@pytest.mark.parametrize("state", ["before the pull", "during the pull", "after the pull"])
def test_the_receiver_is_killed(state: str, transport: MooncakeTransport) -> None:
    with Peer() as peer:
        ticket = transport.offer(parcel_of(1, LARGE), HOLD)
        assert ticket is not None
        asked = {"request": ticket.request, "nbytes": ticket.nbytes, "place": ticket.place}
        if state == "during the pull":
            peer.send("pull", asked, LONG)
            time.sleep(0.05)
        elif state == "after the pull":
            assert peer.ask("pull", asked, LONG) in (
                ticket.request,
                f"hand-over of {ticket.request!r}: it is not offered any more",
            )
        peer.kill()
    assert settled_by(transport, LONG) == [Settled(ticket=ticket, outcome="expired")]
    assert transport.offered_bytes == 0
    transport.check_integrity()
    assert not came(transport, ticket)


@pytest.mark.parametrize("cuts", [CUTS, pytest.param(FULL_CUTS, marks=pytest.mark.full)], ids=["a few", "many"])
def test_a_reader_that_is_overtaken_gets_nothing_mixed(
    cuts: tuple[float, ...], transport: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offer is taken back, and another put in its place, while it is read: whole and right, or an error."""
    with Peer(credit_parcels=1) as peer:
        for cut in cuts:
            with monkeypatch.context() as patch:
                pull = Pull(transport, peer.ticket(1, LARGE, LONG), patch)
                pull.until(cut)
                peer.ask("cancel")
                after = peer.ticket(2, LARGE, LONG)
                pull.whole()
            assert came(transport, after)
            peer.ask("cancel")
        peer.ask("integrity")


def test_what_is_not_legal_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="credit_bytes: 0 is not legal; legal: at least 1"):
        MooncakeTransport(credit_bytes=0)
    with pytest.raises(InputError, match="credit_parcels: 0 is not legal; legal: at least 1"):
        MooncakeTransport(credit_parcels=0)
    with pytest.raises(InputError, match="protocol 'ether' is not legal; legal: tcp, rdma"):
        MooncakeTransport(protocol="ether")
