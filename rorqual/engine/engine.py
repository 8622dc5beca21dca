"""Many requests over one model and one cache: what to do next, do it, and tell what came of it.

    submit -> a request waits -> step, step, ... -> deltas -> finished
                                  |
                                  scheduler: which rows (integers)
                                  runner: rows to logits
                                  samplers, drafts: logits to tokens
                                  scheduler: what stands in the cache now

One thread calls it. A server gives it a thread of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rorqual.cache.kv_cache import KVCache
from rorqual.engine.handed import Handed, same_pages, standing
from rorqual.engine.identity import store_identity
from rorqual.engine.images import ImageSource
from rorqual.engine.intake import Intake
from rorqual.engine.memory import plan_engine, spelled
from rorqual.engine.output import Counts, Delta, RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.engine.prompts import PromptInput
from rorqual.engine.request import Live, Request
from rorqual.engine.restore import AHEAD, restorer_of
from rorqual.engine.room import SchedulerLimits
from rorqual.engine.runner import Runner
from rorqual.engine.scheduler import Scheduler
from rorqual.engine.sequence import PREFILL_MODES, REPLAY_MODES, check_choice
from rorqual.engine.speculation import NO_DRAFTS, Speculator
from rorqual.engine.stats import EngineStats, Log, bytes_by_group
from rorqual.engine.stepper import Stepper
from rorqual.errors import InputError
from rorqual.log import logger
from rorqual.model.transformer import Transformer
from rorqual.pool.manager import KVManager
from rorqual.store.interface import PageStore

SLOTS = 16


class Engine:
    """A serving core.

    Args:
        model: of `rorqual.load`.
        memory: bytes in all, or a share of what is free (`rorqual.engine.memory`); None takes what the slots need.
        pages: of global KV instead, exactly.
        slots: sequences that run at once.
        speculative: requests are sped up by drafts unless they say otherwise; None where the model has drafts.
        draft_tokens: drafts a verification, at most; None for the draft's whole block.
        prefill: `ced` or `full`, unless a request says otherwise.
        replay: `bounded` or `exact`: what is computed again after a prefix hit.
        chunk_tokens: rows of a long prefill chunk.
        max_waiting: requests in the queue; None for any number.
        max_model_len: tokens of a request, prompt and new ones; None for the model's positions.
        store: keeps published pages beyond this engine's, and gives them back (`rorqual.store`); the caller closes it.
            One of another model is told of, and not used.
        freed_page, freed_slot: called as those of the pools; tests poison there.
        clock: seconds.

    Raises:
        InputError: an option that cannot be honoured, by name.
        CapacityError: the plan does not fit.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        memory: int | float | str | None = None,
        pages: int | None = None,
        slots: int = SLOTS,
        speculative: bool | None = None,
        draft_tokens: int | None = None,
        prefill: str = "ced",
        replay: str = "bounded",
        chunk_tokens: int = 512,
        max_waiting: int | None = None,
        max_model_len: int | None = None,
        store: PageStore | None = None,
        freed_page: Callable[[int], None] | None = None,
        freed_slot: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_choice("prefill", prefill, PREFILL_MODES)
        check_choice("replay", replay, REPLAY_MODES)
        positions = model.config.max_position_embeddings
        if max_model_len is not None and not 1 < max_model_len <= positions:
            raise InputError(
                f"max_model_len: {max_model_len} is not legal; legal: 2..{positions}, the model's positions"
            )
        if slots < 1:
            raise InputError(f"slots: {slots} is not legal; legal: at least 1")
        self.model, self.prefill, self.replay = model, prefill, replay
        self.max_model_len = max_model_len or positions
        block = model.config.dspark_block_size if model.draft is not None else 0
        limits = SchedulerLimits(
            step_tokens=max(32, slots * (1 + block)), chunk_tokens=chunk_tokens, waiting=max_waiting
        )
        self.plan = plan_engine(
            model,
            memory=memory,
            pages=pages,
            slots=slots,
            chunk_tokens=chunk_tokens,
            step_tokens=limits.step_tokens,
        )
        logger.info("engine: %s", spelled(self.plan))
        layout = model.layout
        self.cache = KVCache(model.config, layout, pages=self.plan.pages, slots=self.plan.slots, device=model.device)
        self.kv = KVManager(
            pages=self.plan.pages,
            slots=slots,
            page_tokens=layout.page_tokens,
            window=model.config.sliding_window,
            freed_page=freed_page,
            freed_slot=freed_slot,
            published=None if store is None else self._offer,
        )
        self.restorer = None
        if store is not None:
            self.restorer = restorer_of(store, store_identity(model), self.kv, self.cache.pages, clock)
        self.speculative = model.draft is not None if speculative is None else speculative
        wants = self.speculative or draft_tokens is not None
        self.speculator = Speculator(model, self.cache, draft_tokens) if wants else None
        self.scheduler = Scheduler(self.kv, self._replayed, limits, self.restorer)
        self.runner = Runner(model, self.cache)
        self._intake = Intake(model, layout.page_tokens, self.max_model_len, clock)
        self._log = Log()
        self._requests: dict[str, Request] = {}
        self._lives: dict[str, Live] = {}
        self._numbers = itertools.count()
        self._stepper = Stepper(self.scheduler, self.runner, self.speculator, self._lives, self._log, clock)

    @property
    def fingerprint(self) -> str:
        """Of the model, as page keys carry it."""
        return self._intake.fingerprint

    @property
    def waiting(self) -> int:
        """Completions in the queue."""
        return self.scheduler.waiting

    @property
    def drafts(self) -> bool:
        """Requests may be sped up by drafts."""
        return self.speculator is not None

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return bool(self._lives)

    @property
    def live(self) -> list[str]:
        """Ids of requests that have not ended, in the order of their arrival."""
        return list(self._requests)

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def output(self, request: str) -> RequestOutput:
        """A live request's output so far; it goes on filling. Raises InputError for an id that is not live."""
        return self._request(request).output

    def state(self, request: str) -> str:
        """Of a live request's first completion that goes on: `waiting`, `prefill` or `decode`. Raises InputError."""
        return self.scheduler.state(next(live.key for live in self._request(request).lives if not live.finished))

    def submit(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        request: str | None = None,
        priority: int = 0,
        salt: str = "",
        images: Sequence[ImageSource] = (),
        speculative: bool | None = None,
        prefill: str | None = None,
        handed: Handed | None = None,
    ) -> str:
        """Let a request wait; its id.

        Args:
            prompt: text or token ids.
            params: greedy, 128 tokens, if not given.
            request: an id of the caller's; it must not be live.
            priority: a lower one is served earlier.
            salt: of a tenant: two salts never share a page.
            images: one a span of image tokens, in order; of a text prompt they come before the text.
            speculative, prefill: the engine's unless given.
            handed: what was computed of the prompt elsewhere; the request begins with it.

        Raises:
            InputError: what could never run, or is not legal, by name; nothing is queued.
            CapacityError: the queue is full.
        """
        params = params or SamplingParams()
        speculative = self._speculative(speculative)
        own = self._intake.request(
            self._name(request),
            prompt,
            params,
            salt=salt,
            images=images,
            speculative=speculative,
            prefill=check_choice("prefill", prefill or self.prefill, PREFILL_MODES),
            priority=priority,
            handed=handed,
        )
        track = self.scheduler.submit(
            own.lives[0].key,
            own.chain,
            own.budget,
            priority=priority,
            prefill=own.prefill,
            logits_from=None if params.prompt_logprobs is None else 0,
            speculative=speculative,
            copies=params.n - 1,
            standing=None if handed is None else standing(handed, self.model.config.sliding_window),
            same=None if handed is None else partial(same_pages, handed, self.cache),
        )
        if self.restorer is not None:
            self.restorer.begin(track)
        return self._enter(own)

    def check(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        images: Sequence[ImageSource] = (),
        speculative: bool | None = None,
        **options: Any,
    ) -> None:
        """Refuse what `submit` would refuse whenever it came; nothing is queued or computed. options: of `submit`.

        Raises:
            InputError: as `submit`.
        """
        self._speculative(speculative)
        tokens = self._intake.check(prompt, params, images)
        self.scheduler.check(tokens, self._intake.budget(tokens, params), params.n - 1)

    def abort(self, request: str) -> RequestOutput:
        """End a request now; its pages and slots are free when this returns. Its output so far."""
        own = self._request(request)
        for live in own.lives:
            if not live.finished:
                live.end("abort")
            if live.key in self.scheduler:
                self.scheduler.finish(live.key)
        self._leave(own)
        self._log.aborted += 1
        return own.output

    def fork(self, request: str, child: str | None = None, params: SamplingParams | None = None) -> str:
        """A second request that goes on from where a first one is: all that it has said is the child's prompt.

        params: for what the child says from there on; the request's unless given.

        Raises:
            InputError: a request of several completions, or what is not legal for a new one.
        """
        live = self._single(request)
        own = self._intake.fork(live, self._name(child), params or live.request.params)
        made = self.scheduler.fork(live.key, own.lives[0].key, new_tokens=own.budget)
        if made is not None:
            self.runner.fork(made, self.kv.block_table(own.lives[0].key))
            if self.speculator is not None:
                self.speculator.fork(*made.slot)
        return self._enter(own)

    def rewind(self, request: str, new: int) -> None:
        """Keep the first `new` tokens of a request's one completion, and let it go on from there in its own way.

        What its windows need is computed again, as after a prefix hit. With a seed, or greedy, it says the same again
        as far as that is exact: with `exact` replay and `full` prefill, but where two tokens tie in the last bits.

        Raises:
            InputError: tokens that are not there, or several completions.
        """
        live = self._single(request)
        said = live.completion.token_ids
        if not 0 <= new <= len(said):
            raise InputError(f"rewind: {new} is not legal; legal: 0..{len(said)} tokens of {request!r}")
        position = live.request.counts.prompt + new
        self.scheduler.rewind(live.key, position)
        live.tokens.truncate(position)
        live.sampler.restart(said[:new], self._intake.matcher(live.request.params))
        live.request.counts.new -= len(said) - new
        live.rewind(new)

    def preempt(self, request: str) -> None:
        """Take a request's slots and pages; it waits, and comes back through the prefix index."""
        for live in self._request(request).lives:
            if live.key in self.scheduler:
                self.scheduler.preempt(live.key)
                live.drafts = NO_DRAFTS

    def step(self) -> list[Delta]:
        """Run one step; what it added to completions. Requests that have ended are live no more.

        Where all that could be done waits for pages of a store, it waits with them for a moment.
        """
        if self.restorer is not None:
            self.restorer.look(self.scheduler.ahead(AHEAD))
            if not self.scheduler.running:
                self.restorer.wait()
        deltas = self._stepper.step()
        for name in {delta.request for delta in deltas if delta.finish_reason is not None}:
            own = self._requests[name]
            if own.output.finished:
                self._leave(own)
                self._log.finished += 1
        return deltas

    def stream(self, request: str) -> Iterator[Delta]:
        """The deltas of one request, stepping the engine until it ends; others go on beside it.

        Whoever stops reading aborts it.
        """
        own = self._request(request)
        try:
            while not own.output.finished:
                yield from (delta for delta in self.step() if delta.request == request)
        finally:
            if self._requests.get(request) is own:
                self.abort(request)

    def stats(self) -> EngineStats:
        """A snapshot of pools, totals and recent steps."""
        total = Counts()
        total.add(self._log.counts)
        for own in self._requests.values():
            total.add(own.counts)
        pages, slots = self.kv.pages, self.kv.slots
        return EngineStats(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            requests=self._log.requests,
            finished=self._log.finished,
            aborted=self._log.aborted,
            steps=self._log.steps,
            preemptions=self.scheduler.preemptions,
            evictions=pages.evictions,
            pages=pages.pages,
            pages_free=pages.free,
            pages_used=pages.used,
            pages_cached=pages.cached,
            page_bytes=self.plan.page_bytes,
            page_tokens=self.plan.page_tokens,
            slots=slots.slots,
            slots_free=slots.free,
            bytes_by_group=bytes_by_group(self.cache),
            counts=total,
            recent=tuple(self._log.recent),
            store=None if self.restorer is None else self.restorer.store.stat(),
        )

    def drop_cached(self) -> int:
        """Empty the prefix index of what nobody uses; pages that became free."""
        return self.kv.pages.drop_cached()

    def check_integrity(self) -> None:
        """Of pools and scheduler; and every completion that has not ended is in the scheduler, and no other."""
        self.scheduler.check_integrity()
        if self.restorer is not None:
            self.restorer.check_integrity(self.scheduler.ahead(self.scheduler.waiting))
        waiting = {live.key for live in self._lives.values() if live.key in self.scheduler}
        assert len(waiting) == self.scheduler.running + self.scheduler.waiting
        for own in self._requests.values():
            unborn = [] if own.begun else own.lives[1:]
            assert all(live.finished or live in unborn or live.key in waiting for live in own.lives)

    def _request(self, request: str) -> Request:
        if request not in self._requests:
            raise InputError(f"request: {request!r} is not live; {len(self._requests)} are")
        return self._requests[request]

    def _single(self, request: str) -> Live:
        lives = self._request(request).lives
        if len(lives) != 1:
            raise InputError(f"request: {request!r} has {len(lives)} completions; legal: 1")
        return lives[0]

    def _speculative(self, asked: bool | None) -> bool:
        speculative = self.speculative if asked is None else asked
        if speculative and self.speculator is None:
            raise InputError("speculative: this engine was made without; legal: False")
        return speculative

    def _name(self, request: str | None) -> str:
        if request is None:
            return next(name for number in self._numbers if (name := f"request-{number}") not in self._requests)
        if request in self._requests:
            raise InputError(f"request: {request!r} is live already; legal: an id of its own")
        return request

    def _enter(self, own: Request) -> str:
        self._requests[own.id] = own
        self._lives.update((live.key, live) for live in own.lives)
        self._log.requests += 1
        return own.id

    def _leave(self, own: Request) -> None:
        del self._requests[own.id]
        for live in own.lives:
            del self._lives[live.key]
        self._log.counts.add(own.counts)

    def _offer(self, page: int, key: bytes) -> None:
        if self.restorer is not None:
            self.restorer.offer(page, key)

    def _replayed(self, hit: int, length: int, prefill: str) -> int:
        return self.model.layout.replay_tokens(hit, self.replay, prefill, length)
