"""Which rows are computed next, in integers only: it sees no tensor, no token and no text.

A step takes decode and verification rows of every running request first, then prefill rows in order of service, as far
as its budget goes, and at most one chunk of more than `SHORT_SEGMENT` rows. Such a chunk begins and ends where it would
without any neighbour, and nobody shares its products, so that a request's tokens do not depend on who runs beside it
(DESIGN 12). A request that needs a page when none is left takes those of the one served last, which waits again and
comes back through the prefix index. What is running alone always fits (`submit`), so the one served first always ends.
Who waits for pages of a store is passed over until they are there, or have not come in time (`Loads`).

Cold, chunked, resumed and preempted requests differ in their numbers alone: `computed`, and three floors.
"""

from __future__ import annotations

from collections.abc import Callable

from rorqual.engine.loads import Loads, NoStore
from rorqual.engine.plan import SequencePlan, Standing, StepPlan
from rorqual.engine.queue import Same, Track, WaitingQueue
from rorqual.engine.room import Room, SchedulerLimits
from rorqual.errors import CapacityError, InputError
from rorqual.pool.manager import Fork, KVManager
from rorqual.pool.prefix import PrefixChain


class Scheduler:
    """Requests over one cache.

    Args:
        kv: who owns which page and slot.
        replay: (hit, length, prefill) -> tokens below the hit that are computed again (`KVLayout.replay_tokens`).
        limits: of a step and of the queue.
        loads: pages that come from a store.
    """

    def __init__(
        self,
        kv: KVManager,
        replay: Callable[[int, int, str], int],
        limits: SchedulerLimits | None = None,
        loads: Loads | None = None,
    ) -> None:
        self.kv, self.limits = kv, limits or SchedulerLimits()
        self._loads = loads or NoStore()
        self.preemptions = 0
        self._replay = replay
        self._waiting = WaitingQueue(self.limits.patience)
        self._running: dict[str, Track] = {}
        self._arrivals = 0
        self._steps = 0
        self._lost: list[str] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: str) -> bool:
        return request in self._running or request in self._waiting

    def ahead(self, count: int) -> list[Track]:
        """The first so many of the queue that will look for pages; what was handed over needs none."""
        return [track for track in self._waiting.ordered(self._steps) if track.standing is None][:count]

    def track(self, request: str) -> Track:
        """Of a request that is running or waiting."""
        return self._running[request] if request in self._running else self._waiting.get(request)

    def state(self, request: str) -> str:
        """`waiting` for a slot, in `prefill` (the first one, or one after a preemption), or in `decode`."""
        track = self.track(request)
        return "waiting" if track.slot is None else "decode" if track.decoding else "prefill"

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
        copies: int = 0,
        standing: Standing | None = None,
        same: Same | None = None,
    ) -> Track:
        """Let a request wait. chain: of its prompt, extended by `accepted` from then on. new_tokens: at most.

        copies: forks that will be made of it at the end of its prefill, for which slots are kept free.
        standing: where it begins with what was handed over. If it loses that, it computes its prompt.
        same: of that; without, none of its pages is found in the prefix index.

        Raises:
            InputError: it could never run.
            CapacityError: too many wait already. Nothing is queued.
        """
        assert request not in self, f"{request} is there already"
        limit = self.check(len(chain), new_tokens, copies)
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
            copies=copies,
            standing=standing,
            same=same,
        )
        self._wait(track)
        return track

    def check(self, tokens: int, new_tokens: int, copies: int = 0) -> int:
        """Refuse what could never run: InputError. Positions that a request of so many tokens may ever have."""
        # The last token is sampled and never computed.
        limit = tokens + new_tokens - 1
        if not tokens or new_tokens < 1:
            raise InputError(f"prompt: {tokens} tokens with {new_tokens} new ones; legal: at least 1 of each")
        if not self.kv.fits(limit):
            room = self.kv.pages.pages * self.kv.page_tokens
            raise InputError(f"prompt: {tokens} tokens with {new_tokens} new ones never fit the cache's {room}")
        if copies >= self.kv.slots.slots:
            raise InputError(f"n: {copies + 1} completions at once need as many slots; there are {self.kv.slots.slots}")
        return limit

    def step(self) -> StepPlan:
        """The next step; falsy when there is nothing to do. Its results come back by `accepted`, or `abort`."""
        room = Room(self.limits)
        preempted: list[str] = []
        plans: list[SequencePlan] = []
        served = sorted(self._running.values(), key=lambda track: track.place)
        decoding = [track.decoding for track in served]
        for wanted in (True, False):
            for track, decodes in zip(served, decoding, strict=True):
                # Planning may have preempted it.
                if decodes == wanted and track.id in self._running:
                    self._plan(track, room, plans, preempted)
        # Whoever lost its pages in this step does not take them back in it.
        while not preempted and room.any and (admitted := self._admit()) is not None:
            self._plan(admitted, room, plans, preempted)
        made = StepPlan(number=self._steps, sequences=tuple(plans), preempted=tuple(self._lost + preempted))
        self._lost = []
        self._steps += 1
        return made

    def computed(self, plan: SequencePlan) -> None:
        """The rows of a prefill chunk stand in the cache; no token came of it."""
        track = self._running[plan.request]
        assert plan.end < track.tokens
        self._stands(track, plan, plan.end)

    def held(self, plan: SequencePlan) -> None:
        """The whole prompt stands in the cache, and that is all: it keeps slot and pages, and runs no more rows."""
        track = self._running[plan.request]
        assert plan.end == track.tokens
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
        # Nobody is told of it any more; the next request of this id has lost nothing.
        self._lost = [lost for lost in self._lost if lost != request]
        track = self._running.pop(request, None)
        if track is None:
            self._waiting.remove(self._waiting.get(request))
            self._loads.dropped(request)
            return
        self.kv.release(request)
        track.slot = None

    def fork(self, request: str, child: str, *, new_tokens: int, plan: SequencePlan | None = None) -> Fork | None:
        """A second request with the tokens of a first one, which goes on apart; what to copy for it.

        Without a copy (None) the child waits, to come through the prefix index: the request is not decoding, or there
        is no slot or page.

        Args:
            request: running or waiting.
            child: an id that is not there.
            new_tokens: that the child may have, at most.
            plan: the step's, that has just reached the request's newest token: all of it stands in the cache, and both
                are to be told their next tokens by `accepted`, the child by the plan with its own id.
        """
        assert child not in self, f"{child} is there already"
        track = self.track(request)
        twin = track.fork(child, self._arrivals, new_tokens)
        if not self.kv.fits(twin.limit):
            raise InputError(f"fork: {track.tokens} tokens with {new_tokens} new ones never fit the cache")
        if plan is None and not track.decoding:
            self._wait(twin)
            return None
        end = track.computed if plan is None else plan.end
        if plan is not None:
            self.kv.publish(track.id, track.chain.keys[: end // self.kv.page_tokens])
            track.copies = max(0, track.copies - 1)
        try:
            made = self.kv.fork(track.id, child, end)
        except CapacityError:
            self._wait(twin)
            return None
        twin.slot, twin.computed, twin.told, twin.begun = made.slot[1], track.computed, self.kv.pages_of(end), True
        self._arrivals += 1
        self._running[child] = twin
        return made

    def drop_copy(self, request: str) -> None:
        """One of the forks to come is not needed: its slot need not be kept."""
        track = self.track(request)
        track.copies = max(0, track.copies - 1)

    def rewind(self, request: str, position: int) -> None:
        """Forget tokens at positions >= `position`, at least 1: the request comes back through the prefix index."""
        track = self.track(request)
        assert 0 < position <= track.tokens
        track.chain.truncate(position)
        track.standing = track.same = None
        self.preempt(request)

    def preempt(self, request: str) -> None:
        """Let a running request wait again, without slot and pages; a waiting one goes on waiting."""
        if request in self._running:
            self._preempt(self._running[request], self._lost)

    def check_integrity(self) -> None:
        """Of the pools; and running requests, and they alone, hold something."""
        self.kv.check_integrity()
        assert self.kv.slots.slots - self.kv.slots.free == len(self._running)
        for track in self._running.values():
            assert track.slot is not None and track.id in self.kv
            assert 0 <= track.computed <= track.tokens <= track.limit + 1
        assert all(track.slot is None and track.id not in self.kv for track in self._waiting)

    def _plan(self, track: Track, room: Room, plans: list[SequencePlan], preempted: list[str]) -> None:
        """Plan rows of a running request, as many as there is room for; none where it is preempted itself."""
        tokens = track.tokens
        known = tokens + (track.proposed if track.decoding else 0)
        take = room.take_short if track.decoding else room.take
        handed = "" if track.standing is None else track.standing.kind
        if handed in ("streams", "rings"):
            take = room.take_whole
        end = track.computed + take(min(known, track.limit) - track.computed)
        if end == track.computed:
            return
        while not self.kv.extend(track.id, end):
            # Only decode rows come here, a prefill has all of its pages: everybody planned so far is served before it.
            victim = max(self._running.values(), key=lambda other: other.place)
            assert all(plan.request != victim.id for plan in plans)
            self._preempt(victim, preempted)
            if victim is track:
                return
        pages = tuple(self.kv.block_table(track.id, track.told))
        reached = end >= tokens
        first = tokens - 1 if track.logits_from is None else max(track.logits_from, track.computed)
        plans.append(
            SequencePlan(
                request=track.id,
                start=track.computed,
                end=end,
                slot=self.kv.slot(track.id),
                new_pages=pages,
                reset=not track.begun,
                handed=handed,
                restored=track.restored,
                shared=track.shared if handed else 0,
                drafts=max(0, end - tokens),
                write_floor=track.write_floor,
                window_floor=track.window_floor,
                decoder_floor=track.decoder_floor,
                run_decoder=track.prefill == "full" or (reached and track.prefill == "ced"),
                logits_from=min(first, end) if reached or track.logits_from is not None else end,
            )
        )
        track.told, track.begun = track.told + len(pages), True
        track.standing = track.same = None

    def _wait(self, track: Track) -> None:
        self._arrivals += 1
        self._waiting.add(track, self._steps)

    def _admit(self) -> Track | None:
        """The next waiting request, with a slot and pages for all that it knows; None where it has to go on waiting."""
        kept = sum(track.copies for track in self._running.values())
        for track in self._waiting.ordered(self._steps):
            # Nobody overtakes: what is free is being saved for it.
            if self.kv.slots.free <= kept + track.copies:
                return None
            keys = self._adoptable(track)
            # What was handed over needs nothing of a store.
            loaded = () if track.standing is not None else self._loads.loaded(track)
            if loaded is None:
                continue  # its pages are on their way, and others need not wait for them
            if not self.kv.admits(keys, track.tokens, track.tokens, loaded):
                return None
            found = self.kv.admit(track.id, keys, track.tokens, track.tokens, loaded)
            self._waiting.remove(track)
            self._loads.admitted(track.id, keys[: found.hit // self.kv.page_tokens], found.restored)
            track.restored = len(found.restored) * self.kv.page_tokens
            track.slot, track.told, track.begun, track.target = found.slot, 0, False, track.tokens
            track.shared = found.hit // self.kv.page_tokens
            self._begin(track, found.hit)
            self._running[track.id] = track
            return track
        return None

    def _adoptable(self, track: Track) -> list[bytes]:
        """Keys of the pages that it may take over where the index has them."""
        keys = track.chain.keys
        if track.logits_from is not None:
            return []  # logits of the prompt are computed, and so is the prompt
        if track.standing is None:
            return keys
        return keys[: track.same(self.kv.pages.match(keys))] if track.same is not None else []

    def _begin(self, track: Track, hit: int) -> None:
        """Where an admitted request starts to compute, and its floors."""
        if (given := track.standing) is not None:
            track.computed, track.write_floor = given.start, given.write_floor
            track.window_floor, track.decoder_floor = given.window_floor, given.decoder_floor
            return
        start = hit - (self._replay(hit, track.tokens, track.prefill) if hit else 0)
        track.computed, track.write_floor, track.window_floor = start, hit, start
        late = track.target - self.kv.window  # what of a CED prefill the decoder runs on
        track.decoder_floor = start if track.prefill == "full" else late if late > start else 0

    def _preempt(self, track: Track, preempted: list[str]) -> None:
        del self._running[track.id]
        self.kv.release(track.id)
        track.slot, track.computed, track.proposed = None, 0, 0
        track.standing = track.same = None
        self._waiting.add(track, self._steps)
        self.preemptions += 1
        preempted.append(track.id)

    def _stands(self, track: Track, plan: SequencePlan, computed: int) -> None:
        assert plan.start == track.computed < computed <= plan.end
        track.computed, track.proposed = computed, 0
        self.kv.publish(track.id, track.chain.keys[: computed // self.kv.page_tokens])
