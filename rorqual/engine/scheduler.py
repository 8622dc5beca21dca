"""Which rows are computed next, in integers only: it sees no tensor, no token and no text.

A step takes decode and verification rows of every running request first, then prefill rows in order of service, as far
as its budget goes. A request that needs a page when none is left takes those of the one served last, which waits again
and comes back through the prefix index. What is running alone always fits (`submit`), so the one served first always
ends.

Cold, chunked, resumed and preempted requests differ in their numbers alone: `computed`, and three floors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rorqual.engine.plan import SequencePlan, StepPlan
from rorqual.engine.queue import Track, WaitingQueue
from rorqual.errors import CapacityError, InputError
from rorqual.pool.manager import KVManager
from rorqual.pool.prefix import PrefixChain


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """step_tokens: rows of a step. patience: steps after which a waiting request goes before every other.

    waiting: requests that may wait; None for any number.
    """

    step_tokens: int = 512
    patience: int = 1000
    waiting: int | None = None

    def __post_init__(self) -> None:
        for name in ("step_tokens", "patience", "waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: {value} is not legal; legal: at least 1")


class Scheduler:
    """Requests over one cache.

    Args:
        kv: who owns which page and slot.
        replay: (hit, length, prefill) -> tokens below the hit that are computed again (`KVLayout.replay_tokens`).
        limits: of a step and of the queue.
    """

    def __init__(
        self, kv: KVManager, replay: Callable[[int, int, str], int], limits: SchedulerLimits | None = None
    ) -> None:
        self.kv, self.limits = kv, limits or SchedulerLimits()
        self.preemptions = 0
        self._replay = replay
        self._waiting = WaitingQueue(self.limits.patience)
        self._running: dict[str, Track] = {}
        self._arrivals = 0
        self._steps = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: str) -> bool:
        return request in self._running or request in self._waiting

    def track(self, request: str) -> Track:
        """Of a request that is running or waiting."""
        return self._running[request] if request in self._running else self._waiting.get(request)

    def submit(
        self,
        request: str,
        chain: PrefixChain,
        new_tokens: int,
        *,
        priority: int = 0,
        prefill: str = "ced",
        logits_from: int | None = None,
        speculative: bool = False,
    ) -> Track:
        """Let a request wait. chain: of its prompt, extended by `accepted` from then on. new_tokens: at most.

        Raises:
            InputError: it could never run.
            CapacityError: too many wait already. Nothing is queued.
        """
        assert request not in self, f"{request} is there already"
        # The last token is sampled and never computed.
        limit = len(chain) + new_tokens - 1
        if not len(chain) or new_tokens < 1:
            raise InputError(f"prompt: {len(chain)} tokens with {new_tokens} new ones; legal: at least 1 of each")
        if not self.kv.fits(limit):
            room = self.kv.pages.pages * self.kv.page_tokens
            raise InputError(f"prompt: {len(chain)} tokens with {new_tokens} new ones never fit the cache's {room}")
        if self.limits.waiting is not None and len(self._waiting) >= self.limits.waiting:
            raise CapacityError(f"queue: {len(self._waiting)} requests wait already, which is the limit")
        track = Track(
            id=request,
            priority=priority,
            arrival=self._arrivals,
            chain=chain,
            limit=limit,
            prefill=prefill,
            logits_from=logits_from,
            speculative=speculative,
        )
        self._arrivals += 1
        self._waiting.add(track, self._steps)
        return track

    def step(self) -> StepPlan:
        """The next step; falsy when there is nothing to do. Its results come back by `accepted`, or `abort`."""
        preempted: list[str] = []
        plans: list[SequencePlan] = []
        budget = self.limits.step_tokens
        for track in self._served():
            if track.decoding and track.id in self._running and budget:
                budget -= self._plan(track, budget, plans, preempted)
        for track in self._served():
            if not track.decoding and track.id in self._running and budget:
                budget -= self._plan(track, budget, plans, preempted)
        # Whoever lost its pages in this step does not take them back in it.
        while budget and not preempted and (admitted := self._admit()) is not None:
            budget -= self._plan(admitted, budget, plans, preempted)
        made = StepPlan(number=self._steps, sequences=tuple(plans), preempted=tuple(preempted))
        self._steps += 1
        return made

    def computed(self, plan: SequencePlan) -> None:
        """The rows of a prefill chunk stand in the cache; no token came of it."""
        track = self._running[plan.request]
        assert plan.end < track.tokens
        self._stands(track, plan, plan.end)

    def accepted(self, plan: SequencePlan, ids: list[int], proposed: int = 0) -> None:
        """Tokens came of a plan that reached the newest one: accepted drafts in their order, then the sampled one.

        The rows of rejected drafts are forgotten: the caller rewinds the slot to `track(...).computed`.
        proposed: drafts after the last of `ids`, to be verified next.
        """
        track = self._running[plan.request]
        assert 1 <= len(ids) <= plan.drafts + 1 and plan.end >= track.tokens
        before = track.tokens
        track.chain.extend(ids)
        self._stands(track, plan, before + len(ids) - 1)
        track.proposed, track.logits_from = proposed if track.speculative else 0, None

    def finish(self, request: str) -> None:
        """Give back what a request holds, whatever it was doing: at its end, or aborted."""
        track = self._running.pop(request, None)
        if track is None:
            self._waiting.remove(self._waiting.get(request))
            return
        self.kv.release(request)
        track.slot = None

    def check_integrity(self) -> None:
        """Of the pools; and running requests, and they alone, hold something."""
        self.kv.check_integrity()
        assert self.kv.slots.slots - self.kv.slots.free == len(self._running)
        for track in self._running.values():
            assert track.slot is not None and track.id in self.kv
            assert 0 <= track.computed < track.tokens <= track.limit + 1
        assert all(track.slot is None and track.id not in self.kv for track in self._waiting)

    def _served(self) -> Iterator[Track]:
        """Running requests, first served first; a copy, because planning may preempt."""
        return iter(sorted(self._running.values(), key=lambda track: track.place))

    def _plan(self, track: Track, budget: int, plans: list[SequencePlan], preempted: list[str]) -> int:
        """Rows planned for a running request, 0 where it was preempted itself."""
        known = track.tokens + (track.proposed if track.decoding else 0)
        end = min(known, track.limit, track.computed + budget)
        while not self.kv.extend(track.id, end):
            # Only decode rows come here, a prefill has all of its pages: everybody planned so far is served before it.
            victim = max(self._running.values(), key=lambda other: other.place)
            assert all(plan.request != victim.id for plan in plans)
            self._preempt(victim, preempted)
            if victim is track:
                return 0
        pages = tuple(self.kv.block_table(track.id, track.told))
        reached = end >= track.tokens
        first = track.tokens - 1 if track.logits_from is None else max(track.logits_from, track.computed)
        plans.append(
            SequencePlan(
                request=track.id,
                start=track.computed,
                end=end,
                slot=self.kv.slot(track.id),
                new_pages=pages,
                reset=not track.told,
                drafts=max(0, end - track.tokens),
                write_floor=track.write_floor,
                window_floor=track.window_floor,
                decoder_floor=track.decoder_floor,
                run_decoder=track.prefill == "full" or reached,
                logits_from=min(first, end) if reached or track.logits_from is not None else end,
            )
        )
        track.told += len(pages)
        return end - track.computed

    def _admit(self) -> Track | None:
        """The next waiting request, with a slot and pages for all that it knows; None where it has to go on waiting."""
        for track in self._waiting.ordered(self._steps):
            # Logits of the prompt are computed, and so is the prompt.
            keys = track.chain.keys if track.logits_from is None else []
            if not self.kv.admits(keys, track.tokens, track.tokens):
                return None  # nobody overtakes: what is free is being saved for it
            found = self.kv.admit(track.id, keys, track.tokens, track.tokens)
            self._waiting.remove(track)
            start = found.hit - (self._replay(found.hit, track.tokens, track.prefill) if found.hit else 0)
            track.slot, track.told, track.target = found.slot, 0, track.tokens
            track.computed, track.write_floor, track.window_floor = start, found.hit, start
            late = track.target - self.kv.window  # what of a CED prefill the decoder runs on
            track.decoder_floor = start if track.prefill == "full" else late if late > start else 0
            self._running[track.id] = track
            return track
        return None

    def _preempt(self, track: Track, preempted: list[str]) -> None:
        del self._running[track.id]
        self.kv.release(track.id)
        track.slot, track.computed, track.proposed = None, 0, 0
        self._waiting.add(track, self._steps)
        self.preemptions += 1
        preempted.append(track.id)

    def _stands(self, track: Track, plan: SequencePlan, computed: int) -> None:
        assert plan.start == track.computed < computed <= plan.end
        track.computed, track.proposed = computed, 0
        self.kv.publish(track.id, track.chain.keys[: computed // self.kv.page_tokens])
