"""The prefill side: prompts in, parcels out, pages kept until they have arrived.

    submit -> waits -> chunks of its prompt -> offered -> done, cancelled or expired -> pages and slot are back

It plans and runs with the engine's own scheduler and runner, so a prompt is cut as it would be by an engine that goes
on decoding, and pages are found again by later prompts. What it lacks is everything behind the prompt: it samples
nothing. With a model of `load(part="encoder")` it holds no weights of decoder, drafts and head.

One thread calls it; the transport has its own word on threads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.cache.state import window_rows
from rorqual.disagg.packing import pack
from rorqual.disagg.parcel import Header, Parcel
from rorqual.disagg.transport import Ticket, Transport
from rorqual.engine.draft import Fed, feed
from rorqual.engine.handed import take_out
from rorqual.engine.identity import fingerprint, store_identity
from rorqual.engine.images import ImageSource
from rorqual.engine.memory import plan_engine, spelled
from rorqual.engine.plan import SequencePlan
from rorqual.engine.prompts import PromptInput, read_prompt
from rorqual.engine.restore import AHEAD, restorer_of
from rorqual.engine.room import SchedulerLimits
from rorqual.engine.runner import Runner
from rorqual.engine.scheduler import Scheduler
from rorqual.engine.sequence import REPLAY_MODES, check_choice
from rorqual.engine.tokens import Tokens
from rorqual.errors import HandoverError, InputError
from rorqual.log import logger
from rorqual.model.step import SequenceOutput
from rorqual.model.transformer import Transformer
from rorqual.planner.traffic import HANDOVERS
from rorqual.pool.manager import KVManager
from rorqual.pool.prefix import ImageSpan, PrefixChain, root_key
from rorqual.store.interface import PageStore

SLOTS = 16
HOLD_S = 30.0
"""Seconds that a computed prompt keeps its pages, at most: waiting for credit, and offered."""
STATES = ("waiting", "prefill", "ready", "offered")
MODE = "streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a request came to. ticket: for its receiver; None where there is none, and `error` says why.

    hit, computed: prompt tokens found in the prefix index, and rows run.
    """

    request: str
    ticket: Ticket | None
    error: str | None = None
    hit: int = 0
    computed: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    id: str
    mode: str
    tokens: Tokens
    chain: PrefixChain
    images: tuple[ImageSpan, ...]
    plan: SequencePlan | None = None
    """The last one of its prompt, once that has run."""
    logits: Tensor | None = None
    parcel: Parcel | None = None
    ticket: Ticket | None = None
    until: float = 0.0
    hit: int = 0
    computed: int = 0


class PrefillWorker:
    """Computes prompts and offers what they leave.

    Args:
        model: of `rorqual.load`, of which an encoder is enough for `streams` and `replay`.
        transport: where it offers.
        memory, pages, slots, replay, chunk_tokens, max_waiting: as of `Engine`. Chunks should be those of the engines
            that decode, which then give the very bits that they would give alone.
        hold_s: `HOLD_S`.
        store, freed_page, freed_slot: as of `Engine`.
        clock: seconds.

    Raises:
        InputError: an option that cannot be honoured, or a model without a KV source.
        CapacityError: the plan does not fit.
    """

    def __init__(
        self,
        model: Transformer,
        transport: Transport,
        *,
        memory: int | float | str | None = None,
        pages: int | None = None,
        slots: int = SLOTS,
        replay: str = "bounded",
        chunk_tokens: int = 512,
        max_waiting: int | None = None,
        hold_s: float = HOLD_S,
        store: PageStore | None = None,
        freed_page: Callable[[int], None] | None = None,
        freed_slot: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_choice("replay", replay, REPLAY_MODES)
        if not model.backbone.has_seam:
            raise InputError("model: it has no KV source, so its layers cannot be split; legal: a model with one")
        if hold_s <= 0:
            raise InputError(f"hold_s: {hold_s} is not legal; legal: above 0")
        if slots < 1:
            raise InputError(f"slots: {slots} is not legal; legal: at least 1")
        self.model, self.transport, self.replay, self.hold_s = model, transport, replay, hold_s
        limits = SchedulerLimits(step_tokens=max(32, slots), chunk_tokens=chunk_tokens, waiting=max_waiting)
        sizes = {"slots": slots, "chunk_tokens": chunk_tokens, "step_tokens": limits.step_tokens}
        self.plan = plan_engine(model, memory=memory, pages=pages, **sizes)
        logger.info("prefill worker: %s", spelled(self.plan))
        self.cache = KVCache(model.config, model.layout, pages=self.plan.pages, slots=slots, device=model.device)
        self.kv = KVManager(
            pages=self.plan.pages,
            slots=slots,
            page_tokens=model.layout.page_tokens,
            window=model.config.sliding_window,
            freed_page=freed_page,
            freed_slot=freed_slot,
            published=None if store is None else self._published,
        )
        self.restorer = (
            None if store is None else restorer_of(store, store_identity(model), self.kv, self.cache.pages, clock)
        )
        self.scheduler = Scheduler(self.kv, self._replayed, limits, self.restorer)
        self.runner = Runner(model, self.cache)
        self.fingerprint = fingerprint(model)
        self._whole = fingerprint(model, decoder=True) if model.has_decoder else ""
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        self._numbers = itertools.count()

    @property
    def has_work(self) -> bool:
        """Some request waits, runs, or keeps its pages."""
        return bool(self._jobs)

    @property
    def live(self) -> list[str]:
        """Ids of requests that hold or will hold something, in the order of their arrival."""
        return list(self._jobs)

    @property
    def computing(self) -> bool:
        """A step would compute rows; if not, it only lets go of what is over, and offers what finds credit."""
        return any(job.plan is None for job in self._jobs.values())

    def __contains__(self, request: str) -> bool:
        return request in self._jobs

    def state(self, request: str) -> str:
        """One of `STATES`; `ready` is a computed prompt for which there is no credit yet."""
        job = self._jobs[request]
        if job.plan is not None:
            return "offered" if job.ticket is not None else "ready"
        return self.scheduler.state(request)

    def submit(
        self,
        prompt: PromptInput,
        *,
        request: str | None = None,
        mode: str = MODE,
        salt: str = "",
        priority: int = 0,
        images: Sequence[ImageSource] = (),
    ) -> str:
        """Let a prompt wait; its id. Arguments as of `Engine.submit`, and what is to be handed over of it.

        Raises:
            InputError: what could never run, or is not legal, by name; nothing is queued.
            CapacityError: the queue is full.
        """
        check_choice("mode", mode, HANDOVERS)
        if mode == "rings" and not self.model.has_decoder:
            raise InputError(
                "mode: 'rings' needs the decoder, which this model was loaded without; legal: streams, replay"
            )
        name = request or next(own for n in self._numbers if (own := f"prompt-{n}") not in self._jobs)
        if name in self._jobs:
            raise InputError(f"request: {name!r} is live already; legal: an id of its own")
        made, spans, _ = read_prompt(self.model, prompt, images)
        size = self.model.layout.page_tokens
        chain = PrefixChain(root_key(self.fingerprint, size, salt), size, spans)
        chain.extend(made.ids.tolist())
        prefill = "ced" if mode == "rings" else "encoder"
        self.scheduler.submit(name, chain, 1, priority=priority, prefill=prefill)
        self._jobs[name] = _Job(id=name, mode=mode, tokens=Tokens(made), chain=chain, images=tuple(spans))
        return name

    def step(self) -> list[Offer]:
        """Let go of what is over, run one step, offer what is ready: requests that came to an offer, or to none."""
        self.settle()
        if self.restorer is not None:
            self.restorer.look(self.scheduler.ahead(AHEAD))
            if not self.scheduler.running:
                self.restorer.wait()
        plan = self.scheduler.step()
        if plan:
            outputs = self.runner.run(plan, {own.request: self._jobs[own.request].tokens for own in plan.sequences})
            for own, output in zip(plan.sequences, outputs, strict=True):
                self._ran(self._jobs[own.request], own, output)
        return self._offer()

    def cancel(self, request: str) -> None:
        """Give up a request, whatever it does; pages and slot are free when this returns. Unknown ids are ignored."""
        job = self._jobs.get(request)
        if job is None:
            return
        if job.ticket is not None:
            self.transport.cancel(job.ticket)
        self._leave(job)

    def close(self) -> None:
        """Cancel everything."""
        for request in self.live:
            self.cancel(request)

    def drop_cached(self) -> int:
        """Empty the prefix index of what nobody uses; pages that became free."""
        return self.kv.pages.drop_cached()

    def check_integrity(self) -> None:
        """Of pools and scheduler; and every request that is live is in the scheduler, and no other."""
        self.scheduler.check_integrity()
        assert len(self._jobs) == self.scheduler.running + self.scheduler.waiting
        assert all(name in self.scheduler for name in self._jobs)

    def _ran(self, job: _Job, own: SequencePlan, output: SequenceOutput) -> None:
        if own.reset:
            job.hit = own.write_floor
        job.computed += own.rows
        if own.end < len(job.tokens):
            self.scheduler.computed(own)
            return
        self.scheduler.held(own)
        job.plan, job.until = own, self._clock() + self.hold_s
        if job.mode == "rings":
            assert output.logits is not None
            job.logits = output.logits[-1].clone()
            if self.model.draft is not None and output.main_hidden is not None:
                feed(self.model, self.cache, [Fed(slot=own.slot, first=output.first, hidden=output.main_hidden)])

    def _offer(self) -> list[Offer]:
        found = []
        for job in [job for job in self._jobs.values() if job.plan is not None and job.ticket is None]:
            try:
                left = job.until - self._clock()
                if left <= 0:
                    raise HandoverError(f"hand-over of {job.id!r}: no credit for it within {self.hold_s:g} s")
                if job.parcel is None:
                    job.parcel = self._parcel(job)
                job.ticket = self.transport.offer(job.parcel, left)
            except HandoverError as error:
                self._leave(job)
                found.append(Offer(request=job.id, ticket=None, error=str(error), hit=job.hit, computed=job.computed))
                continue
            if job.ticket is not None:
                found.append(Offer(request=job.id, ticket=job.ticket, hit=job.hit, computed=job.computed))
        return found

    def _parcel(self, job: _Job) -> Parcel:
        own = job.plan
        assert own is not None
        end, slot = len(job.tokens), own.slot
        first = end - window_rows(self.model.layout, end)
        # Rows that an engine would have run through the decoder as they came: its first layer writes their global KV.
        whole = own.reset and own.start >= own.decoder_floor and job.mode == "streams"
        handed = take_out(
            self.model,
            self.cache,
            slot,
            self.kv.block_table(job.id),
            kind=job.mode,
            tokens=end,
            write_floor=own.write_floor if whole else end,
            decoder_floor=own.decoder_floor,
            logits_V=job.logits,
        )
        header = Header(
            request=job.id,
            mode=job.mode,
            ids=tuple(job.tokens.prompt.ids.tolist()),
            images=job.images,
            fingerprint=self._whole if job.mode == "rings" else self.fingerprint,
            page_tokens=self.model.layout.page_tokens,
            first=first,
            write_floor=handed.write_floor,
            decoder_floor=handed.decoder_floor,
        )
        return pack(header, handed)

    def _published(self, page: int, key: bytes) -> None:
        if self.restorer is not None:
            self.restorer.offer(page, key)

    def settle(self) -> None:
        """Let go of what its receiver has, what was taken back, and what nobody came for; `step` begins with it."""
        for over in self.transport.settled():
            job = self._jobs.get(over.ticket.request)
            if job is not None and job.ticket == over.ticket:
                self._leave(job)
        now = self._clock()
        for job in [job for job in self._jobs.values() if job.ticket is not None and job.until <= now]:
            self.cancel(job.id)

    def _leave(self, job: _Job) -> None:
        del self._jobs[job.id]
        self.scheduler.finish(job.id)

    def _replayed(self, hit: int, length: int, prefill: str) -> int:
        # An encoder prefill is the encoder's share of a CED one.
        return self.model.layout.replay_tokens(hit, self.replay, "ced", length)
