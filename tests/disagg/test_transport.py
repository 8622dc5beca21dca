"""The transport within a process: credit, deadlines, and that every offer ends once."""

from __future__ import annotations

import threading

import pytest
from splits import Clock

from rorqual.disagg.parcel import Header, Parcel
from rorqual.disagg.transport import InProcess, Settled, Ticket
from rorqual.errors import HandoverError, InputError


def parcel(name: str = "a", size: int = 100) -> Parcel:
    header = Header(
        request=name, mode="replay", ids=(5,), fingerprint="f", page_tokens=16, first=0, write_floor=1, decoder_floor=0
    )
    return Parcel.of(header, {"pages": [memoryview(bytearray(size))]})


def offered(transport: InProcess, name: str = "a", hold_s: float = 10) -> Ticket:
    ticket = transport.offer(parcel(name), hold_s)
    assert ticket is not None and ticket.request == name and ticket.nbytes == parcel(name).nbytes
    return ticket


def test_offer_pull_done() -> None:
    transport = InProcess(clock=Clock())
    ticket = offered(transport)
    assert transport.settled() == []
    assert Parcel.from_bytes(transport.pull(ticket, 1)).header.request == "a"
    assert transport.pull(ticket, 1) == transport.pull(ticket, 1), "it is offered until somebody says done"
    transport.done(ticket)
    assert transport.settled() == [Settled(ticket=ticket, outcome="done")]
    assert transport.settled() == []
    with pytest.raises(HandoverError, match="hand-over of 'a': it is not offered any more"):
        transport.pull(ticket, 1)


@pytest.mark.parametrize("first", ["done", "cancel", "expire"])
@pytest.mark.parametrize("second", ["done", "cancel", "expire"])
def test_whatever_comes_first_ends_it_and_it_ends_once(first: str, second: str) -> None:
    clock = Clock()
    transport = InProcess(clock=clock)
    ticket = offered(transport)

    def act(what: str) -> None:
        if what == "expire":
            clock.now += 10
        else:
            getattr(transport, what)(ticket)

    act(first)
    act(second)
    (over,) = transport.settled()
    assert over.outcome == {"done": "done", "cancel": "cancelled", "expire": "expired"}[first] or first == "expire"
    assert transport.settled() == [] and transport.offered_bytes == 0


def test_credit_comes_back_with_whatever_ends_an_offer() -> None:
    clock, size = Clock(), parcel().nbytes
    transport = InProcess(credit_bytes=2 * size, credit_parcels=5, clock=clock)
    tickets = [offered(transport, name) for name in "ab"]
    assert transport.offer(parcel("c"), 10) is None
    transport.done(tickets[0])
    tickets.append(offered(transport, "c", hold_s=5))
    assert transport.offer(parcel("d"), 10) is None
    clock.now = 5
    offered(transport, "d")
    transport.cancel(tickets[1])
    assert {(own.ticket.request, own.outcome) for own in transport.settled()} == {
        ("a", "done"),
        ("b", "cancelled"),
        ("c", "expired"),
    }
    few = InProcess(credit_parcels=1, clock=clock)
    offered(few)
    assert few.offer(parcel("b"), 10) is None


def test_what_never_fits_is_an_error_and_no_wait() -> None:
    with pytest.raises(HandoverError, match="the transport takes 50 at most"):
        InProcess(credit_bytes=50).offer(parcel(), 10)
    with pytest.raises(InputError, match="credit_parcels: 0 is not legal"):
        InProcess(credit_parcels=0)


def test_close_cancels_what_is_offered() -> None:
    transport = InProcess()
    tickets = [offered(transport, name) for name in "ab"]
    transport.close()
    assert [own.outcome for own in transport.settled()] == ["cancelled", "cancelled"]
    for ticket in tickets:
        with pytest.raises(HandoverError):
            transport.pull(ticket, 1)


def test_threads_may_pull_and_end_at_once() -> None:
    transport, errors = InProcess(), []
    tickets = [offered(transport, f"r{n}") for n in range(32)]

    def receive(own: list[Ticket]) -> None:
        try:
            for ticket in own:
                Parcel.from_bytes(transport.pull(ticket, 1))
                transport.done(ticket)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=receive, args=(tickets[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(transport.settled()) == 32 and transport.offered_bytes == 0
