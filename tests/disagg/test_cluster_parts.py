"""The small parts of a cluster, each alone: copies, a worker's desk, its loop, statistics of several, who is asked."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from rorqual.disagg.cluster.copies import Copies
from rorqual.disagg.cluster.desk import Desks
from rorqual.disagg.cluster.job import Facts, Holding, Report
from rorqual.disagg.cluster.loop import Loop
from rorqual.disagg.cluster.placing import Placing, Post
from rorqual.disagg.cluster.totals import totals
from rorqual.disagg.parcel import Header, Parcel
from rorqual.engine.engine import Engine
from rorqual.engine.output import Counts, Delta
from rorqual.errors import HandoverError, RorqualError
from rorqual.model.load import load

SECONDS = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def parcel(name: str, size: int) -> Parcel:
    header = Header(
        request=name,
        mode="replay",
        ids=(1, 2),
        fingerprint="f",
        page_tokens=4,
        first=0,
        write_floor=0,
        decoder_floor=0,
    )
    return Parcel.of(header, {"pages": [memoryview(bytes(size))]})


def test_copies_are_taken_once_and_bounded_by_credit() -> None:
    clock, own = Clock(), parcel("a", 1000)
    copies = Copies(3 * own.nbytes, clock)
    first = copies.offer(own, 10)
    assert first is not None and copies.out_bytes == own.nbytes
    assert [over.outcome for over in copies.settled()] == ["done"] and copies.settled() == []
    assert Parcel.from_bytes(copies.take(first)).header == own.header
    with pytest.raises(HandoverError, match="not offered any more"):
        copies.take(first)
    assert copies.offer(parcel("b", 1000), 10) is not None
    assert copies.offer(parcel("c", 2000), 10) is None
    copies.release("a")
    assert copies.offer(parcel("c", 1000), 20) is not None
    clock.now = 10.0
    assert copies.out_bytes == parcel("c", 1000).nbytes
    with pytest.raises(HandoverError, match=r"handover\.bytes is"):
        copies.offer(parcel("d", 5000), 10)
    copies.close()
    assert copies.out_bytes == 0


def report(name: str, text: str, ends: bool = False) -> Report:
    delta = Delta(request=name, index=0, text=text, token_ids=(1,), finish_reason="stop" if ends else None)
    return Report(name=name, deltas=(delta,), counts=Counts(new=1))


def test_a_desk_keeps_reports_until_they_are_asked_for() -> None:
    engine = Engine(load(None), slots=1)

    async def talk() -> None:
        clock = Clock()
        desks = Desks("first", engine.stats, clock)
        desks.open("front", "a")
        desks.open("front", "b")
        desks.open("other", "c")
        desks.file([report("a", "x"), report("c", "z")], [])
        desks.file([report("a", "y", ends=True), report("unknown", "?")], ["a"])
        told = await desks.poll("front")
        assert [(own.name, [delta.text for delta in own.deltas]) for own in told.reports] == [("a", ["x", "y"])]
        assert (told.live, told.incarnation, told.stats is not None) == (frozenset("b"), "first", True)
        waits = asyncio.create_task(desks.poll("front"))
        await asyncio.sleep(0)
        assert not waits.done()
        desks.file([report("b", "late")], [])
        later = await asyncio.wait_for(waits, SECONDS)
        assert later.reports[0].name == "b" and later.stats is None
        assert desks.drop("b") and not desks.drop("b") and "b" not in desks
        assert desks.runs == 1
        clock.now = 9.0
        await desks.poll("front")
        assert desks.deserted(8.0) == ["c"] and desks.runs == 0
        assert desks.deserted(8.0) == []

    asyncio.run(talk())


class Steps:
    """Something to step: so many times, or until it fails."""

    def __init__(self, left: int, fails: bool = False) -> None:
        self.left, self.fails = left, fails

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> int:
        if self.fails:
            raise ValueError("broken")
        self.left -= 1
        return self.left


def test_a_loop_steps_and_obeys_between_steps() -> None:
    told, done = list[int](), threading.Event()
    steps = Steps(0)
    loop = Loop(steps, lambda left: (told.append(left), done.set() if not left else None), lambda error: None)
    assert loop.call(lambda: 6 * 7).result(SECONDS) == 42
    loop.call(lambda: setattr(steps, "left", 3)).result(SECONDS)
    assert done.wait(SECONDS) and told == [2, 1, 0]
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 / 0).result(SECONDS)
    loop.close()
    with pytest.raises(RorqualError, match="not running"):
        loop.call(lambda: None).result(SECONDS)


def test_a_step_that_fails_ends_the_loop() -> None:
    failed: Future[BaseException] = Future()
    loop = Loop(Steps(1, fails=True), lambda left: None, failed.set_result)
    assert isinstance(failed.result(SECONDS), ValueError)
    with pytest.raises(RorqualError, match="not running"):
        loop.call(lambda: None).result(SECONDS)


def test_statistics_of_several_are_their_sums() -> None:
    one, two = Engine(load(None), slots=1), Engine(load(None), slots=3)
    two.submit("The whale")
    two.step()
    both = totals([one.stats(), two.stats()], waiting=5, requests=7, finished=2, aborted=1)
    assert (both.slots, both.slots_free, both.running, both.waiting) == (4, 3, 1, 5)
    assert (both.requests, both.finished, both.aborted) == (7, 2, 1)
    assert both.page_bytes == one.stats().page_bytes and both.pages == one.stats().pages + two.stats().pages
    assert both.counts.prompt == two.stats().counts.prompt > 0
    assert both.bytes_by_group["window"] == 4 * one.stats().bytes_by_group["window"]
    assert both.recent == two.stats().recent


class Answers:
    """A handle that says what a test wants, or nothing."""

    def __init__(self, held: int | None, load: int = 0) -> None:
        self.held, self.load, self.asked = held, load, 0

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.asked += 1
        if self.held is not None:
            future.set_result(Holding(held=self.held, load=self.load))
        return future

    def begin(self, method: str, *args: Any) -> object:
        return None

    def kill(self) -> None:
        pass


def post(name: str, role: str, handle: Answers) -> Post:
    facts = Facts(
        name=name,
        role=role,
        incarnation="i",
        pid=1,
        node="n",
        config="c",
        fingerprint="f",
        page_tokens=128,
        window=128,
        slots=2,
        pages=9,
        max_model_len=1024,
        drafts=True,
        resident=0,
    )
    return Post(name=name, role=role, handle=handle, facts=facts, up=True)


def test_only_a_choice_is_asked_about() -> None:
    alone, one, two, deaf = Answers(9), Answers(2), Answers(4), Answers(None)
    posts = [
        post("p", "prefill", alone),
        post("d0", "decode", one),
        post("d1", "decode", two),
        post("d2", "decode", deaf),
    ]
    placing, heard = Placing(posts), dict[str, Holding]()
    inquiry = placing.ask([b"k"] * 8, 1.0, lambda name, done: heard.update({name: done.result()}))
    assert (alone.asked, one.asked, two.asked, deaf.asked) == (0, 1, 1, 1)
    assert inquiry.missing == {"d0", "d1", "d2"} and set(heard) == {"d0", "d1"}
    inquiry.answers.update(heard)
    inquiry.missing -= set(heard)

    def chosen(role: str) -> str | None:
        found = placing.choose(role, inquiry, 128, 128)
        return None if found is None else found.name

    assert (chosen("prefill"), chosen("decode")) == ("p", "d1")
    posts[2].runs |= {"a", "b"}  # placed since it answered: it is full now
    assert chosen("decode") == "d0"
    posts[1].down()
    posts[2].down()
    assert chosen("decode") == "d2"
    posts[3].down()
    assert chosen("decode") is None
