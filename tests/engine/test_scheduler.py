"""The scheduler against a runner that only writes down what a real one would read: nobody reads what is not theirs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rorqual.engine.plan import SequencePlan, StepPlan
from rorqual.engine.queue import Track
from rorqual.engine.scheduler import Scheduler, SchedulerLimits
from rorqual.errors import CapacityError, InputError
from rorqual.pool.manager import KVManager
from rorqual.pool.prefix import PrefixChain, root_key

PAGE, WINDOW = 4, 4
ROOT = root_key("model", PAGE)
GONE = -1


def replay(hit: int, length: int, prefill: str) -> int:
    return WINDOW if hit > WINDOW else hit


class Runner:
    """Pages hold token ids by position, slots the interval of positions that their rings saw. Freed ones are poisoned.

    A token is a function of everything before it, so a wrong one shows; drafts are right with probability `skill`.
    """

    def __init__(self, pages: int, slots: int, limits: SchedulerLimits, seed: int = 0, skill: float = 0.5) -> None:
        self.pages = [[GONE] * PAGE for _ in range(pages)]
        self.slots = [(GONE, GONE)] * slots
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.draw, self.skill = Random(seed), skill
        kv = KVManager(
            pages=pages,
            slots=slots,
            page_tokens=PAGE,
            window=WINDOW,
            freed_page=self._poison_page,
            freed_slot=self._poison_slot,
        )
        self.scheduler = Scheduler(kv, replay, limits)
        self.ids: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.done: dict[str, list[int]] = {}
        self.rows = 0

    def _poison_page(self, page: int) -> None:
        self.pages[page] = [GONE] * PAGE

    def _poison_slot(self, slot: int) -> None:
        self.slots[slot] = (GONE, GONE)

    def submit(self, name: str, ids: Sequence[int], new: int, **options: Any) -> None:
        chain = PrefixChain(ROOT, PAGE)
        chain.extend(ids)
        self.scheduler.submit(name, chain, new, **options)
        self.ids[name], self.ends[name] = list(ids), len(ids) + new

    def step(self) -> StepPlan:
        made = self.scheduler.step()
        assert made.rows <= self.scheduler.limits.step_tokens
        assert len({plan.slot for plan in made.sequences}) == len(made.sequences)
        for name in made.preempted:
            assert all(plan.request != name for plan in made.sequences)
            self.drafts.pop(name, None)
        for plan in made.sequences:
            self._run(plan)
        self.scheduler.check_integrity()
        return made

    def _run(self, plan: SequencePlan) -> None:
        name, ids = plan.request, self.ids[plan.request]
        fed = ids + self.drafts.pop(name, [])[: plan.drafts]
        table = self.tables[plan.slot]
        assert plan.rows > 0 and plan.end <= len(fed)
        if plan.reset:
            table.clear()
            self.slots[plan.slot] = (plan.start, plan.start)
        table += plan.new_pages
        low, high = self.slots[plan.slot]
        assert (low, high) == (plan.window_floor, plan.start), "the rings stand elsewhere"
        assert plan.write_floor % PAGE == 0 and plan.window_floor <= plan.start
        for at in range(plan.end):
            page, row = self.pages[table[at // PAGE]], at % PAGE
            if at >= max(plan.start, plan.write_floor):
                assert self.scheduler.kv.pages.key(table[at // PAGE]) is None, "a published page is written"
                page[row] = fed[at]
            assert page[row] == fed[at], f"position {at} of {name} reads what is not its own"
        self.slots[plan.slot], self.rows = (low, plan.end), self.rows + plan.rows
        if plan.end < len(ids):
            self.scheduler.computed(plan)
            return
        assert plan.logits == plan.drafts + 1 and plan.run_decoder
        found: list[int] = []
        for draft in fed[len(ids) : plan.end]:
            found.append(token_after(ids + found))
            if found[-1] != draft:
                break
        else:
            found.append(token_after(ids + found))
        ids += found
        left = self.ends[name] - len(ids)
        drafts = self._propose(name) if left > 0 else []
        self.scheduler.accepted(plan, found, len(drafts))
        self.slots[plan.slot] = (low, self.scheduler.track(name).computed)
        if left <= 0:
            self.done[name] = ids
            self.scheduler.finish(name)

    def _propose(self, name: str) -> list[int]:
        if not self.scheduler.track(name).speculative:
            return []
        right: list[int] = []
        for _ in range(self.draw.randrange(4)):
            right.append(token_after(self.ids[name] + right))
        self.drafts[name] = [token if self.draw.random() < self.skill else token + 1 for token in right]
        return self.drafts[name]

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.step():
                break
        assert not self.scheduler.running and not self.scheduler.waiting, "it stands still"


def token_after(ids: Sequence[int]) -> int:
    return (sum((i + 1) * token for i, token in enumerate(ids)) + len(ids)) % 3


def expected(ids: Sequence[int], new: int) -> list[int]:
    made = list(ids)
    for _ in range(new):
        made.append(token_after(made))
    return made


def runner(pages: int = 16, slots: int = 4, **limits: int) -> Runner:
    return Runner(pages, slots, SchedulerLimits(**limits))


def test_alone_in_one_step_and_then_token_by_token() -> None:
    run = runner()
    run.submit("a", [1, 2, 3, 4, 5], 3)
    steps = [run.step() for _ in range(4)]
    found = [(p.start, p.end, p.reset) for s in steps for p in s.sequences]
    assert found == [(0, 5, True), (5, 6, False), (6, 7, False)]
    assert not steps[3] and run.done["a"] == expected([1, 2, 3, 4, 5], 3)
    assert run.scheduler.kv.slots.free == 4


def test_a_chunked_prefill_runs_beside_decode_rows() -> None:
    run = runner(step_tokens=5)
    run.submit("a", [1, 2], 8)
    run.step()
    run.submit("b", range(13), 2)
    steps = [run.step() for _ in range(4)]
    spans = [[(p.request, p.start, p.end) for p in s.sequences] for s in steps]
    assert spans[:2] == [[("a", 2, 3), ("b", 0, 4)], [("a", 3, 4), ("b", 4, 8)]]
    assert [p.run_decoder for s in steps for p in s.sequences if p.request == "b"] == [False, False, False, True]
    assert [p.logits for s in steps for p in s.sequences if p.request == "b"] == [0, 0, 0, 1]
    run.run()
    assert run.done == {"a": expected([1, 2], 8), "b": expected(range(13), 2)}


@pytest.mark.parametrize("prefill", ["ced", "full"])
@pytest.mark.parametrize(("hit", "length", "ced_floor"), [(0, 3, 0), (0, 9, 5), (8, 9, 5), (8, 8, 0), (12, 20, 16)])
def test_floors_are_those_of_a_single_sequence(prefill: str, hit: int, length: int, ced_floor: int) -> None:
    run = runner(step_tokens=64)
    ids = list(range(length))
    if hit:
        run.submit("first", ids[:hit], 1)
        run.run()
    run.submit("second", ids, 4, prefill=prefill)
    (plan,) = run.step().sequences
    start = hit - WINDOW if hit else 0
    assert (plan.start, plan.end, plan.write_floor, plan.window_floor) == (start, length, hit, start)
    assert plan.decoder_floor == (start if prefill == "full" else ced_floor) and plan.reset


def test_the_same_prompt_twice_is_a_hit_and_one_row_at_least_is_computed() -> None:
    run = runner()
    for name in ("a", "b", "other", "c"):
        run.submit(name, [7] * 8 if name == "other" else [1] * 8, 2)
        before = run.rows
        run.run()
        assert run.rows - before == {"a": 9, "b": 5, "other": 9, "c": 5}[name]
    assert run.done["a"] == run.done["b"] == run.done["c"]


def test_first_come_first_served_within_priorities() -> None:
    run = runner(slots=1)
    for name, priority in (("a", 0), ("low", 5), ("b", 0), ("high", -1)):
        run.submit(name, [1, 2, 3], 2, priority=priority)
    run.run()
    assert list(run.done) == ["high", "a", "b", "low"]


def test_nobody_waits_for_ever() -> None:
    run = runner(slots=1, patience=6)
    run.submit("low", [1], 1, priority=9)
    for number in range(20):
        run.submit(f"high {number}", [number], 3, priority=0)
    run.run()
    assert list(run.done).index("low") <= 3


def test_nobody_overtakes_whom_room_is_saved_for() -> None:
    run = runner(pages=6, slots=4)
    run.submit("a", range(16), 4)
    run.step()
    run.submit("large", range(50, 62), 1)
    run.submit("small", [1], 1)
    run.run()
    assert list(run.done) == ["a", "large", "small"]


class Loading:
    """Says of each request when its pages have come, and which."""

    def __init__(self) -> None:
        self.ready: dict[str, list[bytes] | None] = {}
        self.told: list[tuple[str, int]] = []

    def loaded(self, track: Track) -> Collection[bytes] | None:
        return self.ready.get(track.id, ())

    def admitted(self, request: str, keys: Sequence[bytes], restored: Sequence[tuple[int, bytes]]) -> None:
        assert len(restored) <= len(keys)
        self.told.append((request, len(restored)))

    def dropped(self, request: str) -> None:
        self.told.append((request, -1))


def test_who_waits_for_pages_is_passed_over() -> None:
    """It keeps its place in front, takes what has come then, and nobody asks while there is no slot."""
    kv, loads, chains = KVManager(pages=16, slots=1, page_tokens=PAGE, window=WINDOW), Loading(), {}
    scheduler = Scheduler(kv, replay, SchedulerLimits(), loads)
    for name, first in (("a", 0), ("b", 50), ("c", 70), ("gone", 90)):
        chains[name] = PrefixChain(ROOT, PAGE)
        chains[name].extend(range(first, first + 12))
        scheduler.submit(name, chains[name], 1)
    assert [track.id for track in scheduler.ahead(2)] == ["a", "b"]
    loads.ready = {"a": None, "gone": None}
    (plan,) = scheduler.step().sequences
    assert (plan.request, plan.restored, loads.told) == ("b", 0, [("b", 0)])
    loads.ready["a"] = chains["a"].keys[:2]
    scheduler.finish("gone")
    assert not scheduler.step().sequences[1:] and scheduler.state("a") == "waiting"
    scheduler.finish("b")
    (plan,) = scheduler.step().sequences
    assert (plan.request, plan.start, plan.write_floor, plan.restored) == ("a", 4, 8, 8)
    assert loads.told == [("b", 0), ("gone", -1), ("a", 2)]
    scheduler.check_integrity()


def test_what_lost_its_pages_comes_back_through_the_index() -> None:
    run = runner(pages=6, slots=2)
    prompts = {"a": list(range(7)), "b": list(range(30, 37))}
    for name, ids in prompts.items():
        run.submit(name, ids, 14)
    run.run()
    assert run.scheduler.preemptions >= 1
    assert run.done == {name: expected(ids, 14) for name, ids in prompts.items()}
    assert run.rows < sum(len(ids) + 13 for ids in prompts.values()) + 14, "what was published was computed again"


def test_the_one_served_first_is_never_preempted() -> None:
    run = runner(pages=6, slots=3)
    for name in "cba":
        run.submit(name, [ord(name)] * 3, 18)
    lost: list[str] = []
    while made := run.step():
        lost += made.preempted
    assert lost and "c" not in lost and next(iter(run.done)) == "c"


@pytest.mark.parametrize(("prompt", "new", "fits"), [(13, 4, True), (14, 4, False), (16, 1, True), (17, 1, False)])
def test_what_can_never_run_is_refused_at_once(prompt: int, new: int, fits: bool) -> None:
    run = runner(pages=4)
    if fits:
        run.submit("a", range(prompt), new)
        run.run()
        return
    with pytest.raises(InputError, match=f"prompt: {prompt} tokens with {new} new ones never fit the cache's 16"):
        run.submit("a", range(prompt), new)
    assert not run.step() and "a" not in run.scheduler


def test_bad_requests_and_limits() -> None:
    run = runner(waiting=1)
    with pytest.raises(InputError, match="0 tokens with 1 new ones; legal: at least 1 of each"):
        run.submit("a", [], 1)
    with pytest.raises(InputError, match="1 tokens with 0 new"):
        run.submit("a", [1], 0)
    run.submit("a", [1], 1)
    with pytest.raises(CapacityError, match="queue: 1 requests wait already"):
        run.submit("b", [1], 1)
    for name in ("step_tokens", "patience", "waiting"):
        with pytest.raises(InputError, match=f"{name}: 0 is not legal"):
            SchedulerLimits(**{name: 0})


def test_logits_of_a_prompt_come_in_every_chunk_and_take_no_hit() -> None:
    run = runner(step_tokens=4)
    run.submit("a", range(8), 1)
    run.run()
    run.submit("b", range(8), 2, prefill="full", logits_from=1)
    steps = [run.scheduler.step()]
    run.scheduler.computed(steps[0].sequences[0])
    steps.append(run.scheduler.step())
    assert [(p.start, p.end, p.logits_from) for s in steps for p in s.sequences] == [(0, 4, 1), (4, 8, 4)]
    run.scheduler.accepted(steps[1].sequences[0], [5])
    assert run.scheduler.step().sequences[0].logits_from == 8
    run.scheduler.check_integrity()


def test_verification_rows_stop_where_the_request_ends() -> None:
    run = runner()
    run.submit("a", [1, 2, 3], 3, speculative=True)
    (plan,) = run.scheduler.step().sequences
    run.scheduler.accepted(plan, [0], proposed=5)
    (plan,) = run.scheduler.step().sequences
    assert (plan.start, plan.end, plan.drafts, plan.logits) == (3, 5, 1, 2)
    run.scheduler.accepted(plan, [9, 8])
    assert run.scheduler.track("a").tokens == 6 and run.scheduler.track("a").computed == 5


def test_cancelled_requests_leave_nothing() -> None:
    run = Runner(24, 4, SchedulerLimits(step_tokens=7), seed=3)
    draw, live = Random(1), []
    for number in range(1000):
        ids = [draw.randrange(2) for _ in range(draw.randrange(1, 30))]
        run.submit(str(number), ids, draw.randrange(1, 9), speculative=draw.random() < 0.5)
        live.append(str(number))
        if draw.random() < 0.7:
            run.step()
        live = [name for name in live if name not in run.done]
        while live and (draw.random() < 0.5 or len(live) > 6):
            free = run.scheduler.kv.slots.free
            gone = live.pop(draw.randrange(len(live)))
            held = gone in run.scheduler.kv
            run.scheduler.finish(gone)
            run.drafts.pop(gone, None)
            assert run.scheduler.kv.slots.free == free + held
            run.scheduler.check_integrity()
    run.run()
    run.scheduler.kv.pages.drop_cached()
    assert run.scheduler.kv.pages.free == 24 and run.scheduler.kv.slots.free == 4


class Machine(RuleBasedStateMachine):
    """Requests of a few likely prompts, submitted, run and aborted in any order, in too small a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Runner(9, 3, SchedulerLimits(step_tokens=6, patience=20))
        self.count = 0
        self.asked: dict[str, list[int]] = {}

    @rule(
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        new=st.integers(1, 12),
        options=st.fixed_dictionaries(
            {"priority": st.integers(0, 2), "speculative": st.booleans(), "prefill": st.sampled_from(["ced", "full"])}
        ),
    )
    def submit(self, ids: list[int], new: int, options: dict[str, Any]) -> None:
        name, self.count = str(self.count), self.count + 1
        self.run.submit(name, ids, new, **options)
        self.asked[name] = expected(ids, new)

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.run.step()

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._live()))
        self.run.scheduler.finish(name)
        self.run.drafts.pop(name, None)
        del self.asked[name]

    @rule()
    def evict(self) -> None:
        self.run.scheduler.kv.pages.drop_cached()

    def _live(self) -> list[str]:
        return [name for name in self.asked if name not in self.run.done]

    @invariant()
    def integrity(self) -> None:
        self.run.scheduler.check_integrity()
        for name, ids in self.run.done.items():
            assert ids == self.asked[name]

    def teardown(self) -> None:
        self.run.run()
        assert set(self.run.done) == set(self.asked)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)
