"""Whatever is lost, damaged, late or taken back: pages return on both sides; the text is right, or an error.

Field cases 54 and 55, in one process: every state of a request, every event that may meet it there.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
from engines import Said, asked, said
from models import golden, random_ids
from splits import Clock, assert_both_clean, encoder_of, joint, split_of

from rorqual.disagg.pair import Split
from rorqual.disagg.prefill import Offer
from rorqual.disagg.transport import InProcess, Ticket
from rorqual.errors import HandoverError
from rorqual.planner.traffic import HANDOVERS

HOLD_S, WAIT_S = 30.0, 60.0
ROUNDS = 40
FULL_ROUNDS = 2000
FAULTS = ("lost ticket", "dead sender", "damaged", "cut off", "late", "lost done", "another model", "another prompt")


class Faulty(InProcess):
    """A transport that does what it is told, once for each time it is told."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.clock, self.next, self.drawn = clock, "", random.Random(1)

    def pull(self, ticket: Ticket, timeout_s: float) -> bytearray:
        fault, self.next = self.next, "" if self.next != "lost done" else self.next
        if fault == "dead sender":
            raise HandoverError(f"hand-over of {ticket.request!r}: its sender is gone")
        if fault == "late":
            self.clock.now += HOLD_S
        data = super().pull(ticket, timeout_s)
        if fault == "damaged":
            data[self.drawn.randrange(len(data))] ^= 1 << self.drawn.randrange(8)
        return data[: len(data) // 2] if fault == "cut off" else data

    def done(self, ticket: Ticket) -> None:
        if self.next == "lost done":
            self.next = ""
        else:
            super().done(ticket)


def faulty(handover: str = "streams", **options: object) -> tuple[Split, Faulty, Clock]:
    clock = Clock()
    transport = Faulty(clock)
    model = golden("fp32-dspark", "fast")
    encoder = None if handover == "rings" else encoder_of("fp32-dspark")
    timed = {"hold_s": HOLD_S, "wait_s": WAIT_S, "clock": clock, "transport": transport}
    return split_of(model, encoder=encoder, handover=handover, **timed, **options), transport, clock


@cache
def wanted(tokens: int, seed: int, new: int = 6) -> Said:
    return joint(golden("fp32-dspark", "fast"), random_ids(tokens, seed=seed), new)


def lose_tickets(split: Split) -> None:
    """What the prefill worker says of its offers does not arrive."""
    inner = split.prefill.step

    def step() -> list[Offer]:
        inner()
        return []

    split.prefill.step = step  # type: ignore[method-assign]


def plant(split: Split, transport: Faulty, fault: str) -> None:
    if fault == "lost ticket":
        lose_tickets(split)
    elif fault == "another model":
        split.prefill.fingerprint = split.prefill._whole = "0" * 64
    elif fault == "another prompt":
        inner = split.prefill.submit
        split.prefill.submit = lambda prompt, **options: inner([7, *prompt[1:].tolist()], **options)  # type: ignore
    else:
        transport.next = fault


def run_out(split: Split, clock: Clock, names: list[str]) -> None:
    """Step to the end of these; where nothing moves, time passes."""
    while any(name in split for name in names):
        split.step()
        split.check_integrity()
        clock.now += 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("handover", HANDOVERS)
def test_a_failed_hand_over_is_computed_where_it_decodes(fault: str, handover: str) -> None:
    split, transport, clock = faulty(handover)
    plant(split, transport, fault)
    name = split.submit(random_ids(50, seed=3), asked(6))
    run_out(split, clock, [name])
    output = split.output(name)
    assert output.counts.handed == (50 if fault == "lost done" else 0)
    if output.counts.handed == 0 or handover != "replay":
        assert said(output) == wanted(50, 3)
    assert clock.now <= WAIT_S + HOLD_S
    clock.now += HOLD_S  # a lost `done` is found by then
    assert_both_clean(split)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "lost done"])
def test_or_the_client_gets_an_error(fault: str) -> None:
    split, transport, clock = faulty(recompute=False)
    plant(split, transport, fault)
    name = split.submit(random_ids(50, seed=3), asked(6, n=2, temperature=1.0))
    deltas = []
    while name in split:
        deltas += split.step()
        split.check_integrity()
        clock.now += 1
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(0, "error"), (1, "error")]
    output = split.output(name)
    assert output.finished and str(output.completions[0].stopped_by).startswith("hand-over of")
    clock.now += HOLD_S
    assert_both_clean(split)


STATES = ("waiting", "prefill", "handover", "arrived", "decode")


def reach(split: Split, name: str, state: str) -> None:
    """Step until a request is there; for `handover` the engine has to take nothing. Nobody runs before `arrived`."""
    inner = split.engine.step
    if state == "arrived":
        split.engine.step = list  # type: ignore[method-assign]
    while True:
        now = split.state(name)
        if name in split._away and now == "prefill":
            now = split.prefill.state(name)
        elif now == "waiting":
            now = "arrived"
        if now == state:
            break
        split.step()
    split.engine.step = inner  # type: ignore[method-assign]


@pytest.mark.parametrize("who", ["client", "prefill side", "both"])
@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state(state: str, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the client; by the prefill side alone, which the decode side makes up for; by both at once."""
    split, _, clock = faulty(prefill_slots=1)
    other = split.submit(random_ids(60, seed=8), asked(6))
    name = split.submit(random_ids(130, seed=2), asked(6))
    if state == "handover":
        monkeypatch.setattr(Split, "_takes", property(lambda self: False))
        split.abort(other)
    reach(split, name, state)
    if who in ("prefill side", "both"):
        split.prefill.cancel(name)
    if who in ("client", "both"):
        split.abort(name)
        assert name not in split and name not in split.prefill
    monkeypatch.undo()
    split.check_integrity()
    live = [own for own in (name, other) if own in split]
    run_out(split, clock, live)
    if who == "prefill side":
        assert said(split.output(name)) == wanted(130, 2)
    if state != "handover":
        assert said(split.output(other)) == wanted(60, 8)
    assert_both_clean(split)


def test_a_prefill_side_that_dies_costs_time_and_nothing_else() -> None:
    """Its requests, waiting and running, are computed by the other side when their time is over."""
    split, _, clock = faulty()
    names = [split.submit(random_ids(n, seed=n), asked(6)) for n in (130, 50, 17)]
    split.step()
    split.prefill.step = list  # type: ignore[method-assign]
    run_out(split, clock, names)
    assert [said(split.output(name)) for name in names] == [wanted(n, n) for n in (130, 50, 17)]
    assert clock.now <= 2 * WAIT_S
    del split.prefill.step
    assert_both_clean(split)


def test_a_decode_side_that_dies_gets_its_pages_back_to_the_prefill_side() -> None:
    split, transport, clock = faulty()
    split.submit(random_ids(50, seed=1), asked(6))
    while not transport.offered_bytes:
        split.prefill.step()
    assert split.prefill.has_work
    clock.now += HOLD_S
    split.prefill.step()
    assert not split.prefill.has_work and not transport.offered_bytes


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(FULL_ROUNDS, marks=pytest.mark.full)])
@pytest.mark.parametrize("handover", ["streams", "rings"])
def test_at_random(handover: str, rounds: int) -> None:
    """Requests come, are cancelled, preempted, lost, damaged and late, a few at a time; every text is the joint one."""
    split, transport, clock = faulty(handover, prefill_slots=2, prefill_pages=24)
    drawn, live, ended = random.Random(11), {}, 0
    for number in range(rounds):
        event = drawn.choice(("submit", "submit", "step", "step", "step", "abort", "preempt", "fault", "time"))
        if event == "submit" and len(live) < 6:
            case = drawn.choice(((1, 1), (16, 16), (33, 33), (60, 8), (97, 97), (130, 2)))
            # A salt of its own, so that no text depends on who came before.
            live[split.submit(random_ids(case[0], seed=case[1]), asked(6), salt=str(number))] = case
        elif event == "abort" and live:
            name = drawn.choice(sorted(live))
            if name in split:
                split.abort(name)
                live.pop(name)
        elif event == "preempt" and live:
            name = drawn.choice(sorted(live))
            if name in split.engine:
                split.engine.preempt(name)
        elif event == "fault":
            transport.next = drawn.choice(("dead sender", "damaged", "cut off", "late", "lost done"))
        elif event == "time":
            clock.now += drawn.choice((1, HOLD_S, WAIT_S))
        split.step()
        split.check_integrity()
        for name in [name for name in live if name not in split]:
            output = split.output(name)
            assert output.finish_reason == "length"
            if not output.counts.preempted:
                assert said(output) == wanted(*live[name])
            live.pop(name)
            ended += 1
    run_out(split, clock, list(live))
    for name in live:
        assert split.output(name).finish_reason == "length"
    clock.now += HOLD_S
    assert ended + len(live) > rounds // 20
    assert_both_clean(split)
