"""Prefill and decode workers in processes of their own, over Mooncake, killed in every state (field case 54).

Whoever is left has its pages and slots back within a bound, ends every request with the text that an engine alone
gives, and goes on serving.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from functools import cache

import pytest
from engines import Said, asked, assert_clean, engine_of, said
from models import golden, random_ids
from mooncake_here import needs_mooncake
from split_peer import CASE, Forge, Worker
from splits import CHUNK, assert_worker_clean, encoder_of, joint, poisoned

from rorqual.disagg.decode import Arrival, DecodeWorker
from rorqual.disagg.mooncake import MooncakeTransport
from rorqual.disagg.prefill import PrefillWorker
from rorqual.disagg.transport import Ticket
from rorqual.errors import HandoverError

pytestmark = needs_mooncake

IDS = random_ids(140, seed=3)
OTHER = random_ids(33, seed=4)
HOLD_S = 3600.0
PATIENCE_S = 120.0
KILLS = 60
"""At random moments, in the long run."""


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with Forge(tmp_path_factory.mktemp("split")) as forge:
        yield forge


class Clock:
    """Real seconds, and those that a test skips."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def transport(clock: Clock) -> Iterator[MooncakeTransport]:
    transport = MooncakeTransport(clock=clock)
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def decode() -> DecodeWorker:
    return DecodeWorker(engine_of(golden(CASE, "fast"), chunk_tokens=CHUNK), pull_s=PATIENCE_S)


@pytest.fixture(scope="module")
def prefill(transport: MooncakeTransport, clock: Clock) -> PrefillWorker:
    return poisoned(encoder_of(CASE), transport, hold_s=HOLD_S, clock=clock)  # type: ignore[arg-type]


@cache
def alone() -> Said:
    """What an engine alone says to `IDS`."""
    return joint(golden(CASE, "fast"), IDS)


def assert_said(decode: DecodeWorker, arrival: Arrival, *, handed: bool) -> None:
    """The request ends as an engine alone ends it, and leaves nothing behind."""
    assert arrival.handed == handed, arrival.error
    engine = decode.engine
    output = engine.output(arrival.request)
    while not output.finished:
        engine.step()
        engine.check_integrity()
    assert output.counts.handed == (len(IDS) if handed else 0)
    assert said(output) == alone()
    assert_clean(engine)


def assert_lets_go(prefill: PrefillWorker, clock: Clock, skip_s: float = HOLD_S) -> None:
    clock.skipped += skip_s
    until = time.monotonic() + PATIENCE_S
    while prefill.has_work:
        assert time.monotonic() < until, prefill.live
        prefill.step()
        prefill.check_integrity()
        time.sleep(0.01)
    assert_worker_clean(prefill)
    assert isinstance(prefill.transport, MooncakeTransport)
    assert prefill.transport.offered_bytes == 0
    prefill.transport.check_integrity()


def ticket_of(worker: Worker) -> Ticket:
    return Ticket(**worker.ask("offer", "a", IDS.tolist()))


def gone(decode: DecodeWorker) -> Arrival:
    """What a router does with a request whose prefill worker died before it offered anything."""
    return decode.without(HandoverError("hand-over of 'a': its prefill worker is gone"), IDS, asked())


@pytest.mark.parametrize("state", ["waiting", "prefill", "ready"])
def test_prefill_dies_before_it_has_offered(state: str, forge: Forge, decode: DecodeWorker) -> None:
    worker = forge.worker("prefill", slots=1 if state == "waiting" else 2, credit_parcels=1)
    if state != "prefill":
        worker.ask("offer", "before", OTHER.tolist())
    worker.ask("submit", "a", IDS.tolist())
    states = worker.ask("step")
    while state == "ready" and states["a"] != "ready":
        states = worker.ask("step")
    assert states["a"] == state
    worker.kill()
    assert_said(decode, gone(decode), handed=False)


def test_prefill_dies_when_it_has_offered(forge: Forge, transport: MooncakeTransport, decode: DecodeWorker) -> None:
    worker = forge.worker("prefill")
    ticket = ticket_of(worker)
    worker.kill()
    assert_said(decode, decode.fetch(transport, ticket, IDS, asked()), handed=False)


def test_prefill_dies_while_it_is_read(forge: Forge, transport: MooncakeTransport, decode: DecodeWorker) -> None:
    """Stopped first: the pull is under way for certain when it dies."""
    worker = forge.worker("prefill")
    ticket = ticket_of(worker)
    assert len(transport.pull(ticket, PATIENCE_S)) == ticket.nbytes
    worker.stop()
    timer = threading.Timer(0.3, worker.kill)
    timer.start()
    assert_said(decode, decode.fetch(transport, ticket, IDS, asked()), handed=False)
    timer.join()


def test_prefill_hangs(forge: Forge, transport: MooncakeTransport, decode: DecodeWorker) -> None:
    worker = forge.worker("prefill")
    ticket = ticket_of(worker)
    worker.stop()
    hasty = DecodeWorker(decode.engine, pull_s=0.5)
    begun = time.monotonic()
    arrival = hasty.fetch(transport, ticket, IDS, asked())
    assert time.monotonic() - begun < 25, "Mooncake itself waits 30 s and more"
    worker.kill()
    assert_said(decode, arrival, handed=False)


def test_prefill_dies_after_the_pull(forge: Forge, transport: MooncakeTransport, decode: DecodeWorker) -> None:
    worker = forge.worker("prefill")
    ticket = ticket_of(worker)
    data = transport.pull(ticket, PATIENCE_S)
    worker.kill()
    transport.done(ticket)
    name = decode.receive(data, asked(), prompt=IDS)
    assert_said(decode, Arrival(request=name, handed=True), handed=True)


def test_prefill_dies_while_the_other_decodes(forge: Forge, transport: MooncakeTransport, decode: DecodeWorker) -> None:
    worker = forge.worker("prefill")
    ticket = ticket_of(worker)
    arrival = decode.fetch(transport, ticket, IDS, asked())
    states = worker.ask("step")
    while "a" in states:
        states = worker.ask("step")
    decode.engine.step()
    worker.kill()
    assert_said(decode, arrival, handed=True)


def offered(prefill: PrefillWorker) -> Ticket:
    name = prefill.submit(IDS)
    while True:
        for offer in prefill.step():
            assert offer.request == name and offer.ticket is not None, offer.error
            return offer.ticket


def told(ticket: Ticket) -> dict[str, object]:
    return {"request": ticket.request, "nbytes": ticket.nbytes, "place": ticket.place}


STEPS = {
    "before the pull": 0,
    "after the pull": 1,
    "after done": 2,
    "with the request in its engine": 3,
    "while it decodes": 4,
}


@pytest.mark.parametrize("state", STEPS)
def test_decode_dies(state: str, forge: Forge, prefill: PrefillWorker, clock: Clock) -> None:
    worker = forge.worker("decode")
    ticket = offered(prefill)
    orders = [("pull", told(ticket)), ("done", told(ticket)), ("receive", IDS.tolist()), ("step",)]
    for order in orders[: STEPS[state]]:
        worker.ask(*order)
    worker.kill()
    assert_lets_go(prefill, clock, HOLD_S if STEPS[state] < STEPS["after done"] else 0)


def test_decode_dies_while_it_reads(forge: Forge, prefill: PrefillWorker, clock: Clock) -> None:
    for seed in range(3):
        worker = forge.worker("decode")
        worker.send("pull", told(offered(prefill)))
        time.sleep(0.002 * seed)
        worker.kill()
        assert_lets_go(prefill, clock)


def test_who_is_left_goes_on_serving(
    forge: Forge, transport: MooncakeTransport, decode: DecodeWorker, prefill: PrefillWorker, clock: Clock
) -> None:
    """After all of the above, with the same workers: each with a living other side."""
    worker = forge.worker("prefill")
    assert_said(decode, decode.fetch(transport, ticket_of(worker), IDS, asked()), handed=True)
    other = forge.worker("decode")
    ticket = offered(prefill)
    for order in (("pull", told(ticket)), ("done", told(ticket)), ("receive", IDS.tolist())):
        other.ask(*order)
    said_there: list[int] = []
    while len(said_there) < 8:
        said_there = other.ask("step")
    assert said_there == alone()[0]
    assert_lets_go(prefill, clock, 0)


def served(worker: Worker, ticket: Ticket) -> bool:
    """A decode worker goes through all its states; False where it died in one."""
    for order in (("pull", told(ticket)), ("done", told(ticket)), ("receive", IDS.tolist()), ("step",)):
        try:
            worker.ask(*order)
        except (OSError, ValueError):
            return False
    return True


@pytest.mark.full
def test_kills_at_random_moments(
    forge: Forge, transport: MooncakeTransport, decode: DecodeWorker, prefill: PrefillWorker, clock: Clock
) -> None:
    """Moments are drawn within the time that the same takes unharmed, so that a fast machine sees both ends too."""
    draw = random.Random(8)
    lived = {(role, end): 0 for role in ("prefill", "decode") for end in (True, False)}
    unharmed = dict.fromkeys(("prefill", "decode"), 0.0)
    for turn in range(KILLS):
        role = ("prefill", "decode")[turn] if turn < len(unharmed) else draw.choice(["prefill", "decode"])
        worker = forge.worker(role)
        ticket = ticket_of(worker) if role == "prefill" else offered(prefill)
        timer = threading.Timer(draw.uniform(0, 1.2 * unharmed[role]), worker.kill)
        begun = time.monotonic()
        if unharmed[role]:
            timer.start()
        if role == "prefill":
            arrival = decode.fetch(transport, ticket, IDS, asked())
            survived = arrival.handed
        else:
            survived = served(worker, ticket)
        if unharmed[role]:
            timer.join()
            lived[role, survived] += 1
        else:
            assert survived
            unharmed[role] = time.monotonic() - begun
        if role == "prefill":
            assert_said(decode, arrival, handed=survived)
        else:
            assert_lets_go(prefill, clock)
    assert all(lived.values()), lived
