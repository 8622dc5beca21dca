"""A prefill worker and a decode worker in one process, to be called as `LLM` is.

    split = Split(handover="streams")
    split.generate(["The whale"], SamplingParams(max_tokens=20))[0].text

A request is in one place at a time: `prefill`, `handover` (offered, not pulled yet), or the engine that decodes.
Whatever is lost between them is found by a deadline, and the engine computes the prompt itself, or the request ends
with an error.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rorqual.disagg.decode import PULL_S, DecodeWorker
from rorqual.disagg.prefill import HOLD_S, MODE, Offer, PrefillWorker
from rorqual.disagg.transport import InProcess, Ticket, Transport
from rorqual.engine.engine import SLOTS, Engine
from rorqual.engine.images import ImageSource, read_images
from rorqual.engine.llm import Prompts, as_asked
from rorqual.engine.output import Completion, Counts, Delta, RequestOutput, Times, compact
from rorqual.engine.params import SamplingParams
from rorqual.engine.prompts import PromptInput
from rorqual.engine.sequence import PREFILL_MODES, check_choice
from rorqual.errors import HandoverError, InputError
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.planner.traffic import HANDOVERS

WAIT_S = 120.0
"""Seconds from its arrival until a request that has not been handed over is computed where it is to decode."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Away:
    """A request that the engine does not have yet."""

    prompt: PromptInput
    params: SamplingParams
    images: Sequence[ImageSource]
    options: dict[str, Any]
    until: float
    ticket: Ticket | None = None


class Split:
    """Two workers and what carries parcels between them.

    Args:
        model: a checkpoint folder, a loaded whole model, or None for the shipped one.
        encoder: what the prefill worker runs: a model of `load(part="encoder")`, or None for the whole one.
        handover: what is handed over of a prompt, of `HANDOVERS`.
        transport: None for one within the process.
        recompute: compute a prompt whose hand-over failed where it is to decode; False ends it with an error.
        hold_s: seconds that the prefill worker keeps a computed prompt. wait_s: `WAIT_S`. pull_s: of a pull.
        prefill_pages, prefill_slots: of the prefill worker; the engine's unless given.
        freed: (page, slot) callbacks of the prefill worker, as `freed_page` and `freed_slot` of `Engine`.
        clock: seconds.
        options: of `Engine`; `replay` and `chunk_tokens` are both workers'.

    Raises:
        InputError: an option that cannot be honoured.
    """

    def __init__(
        self,
        model: str | Path | Transformer | None = None,
        *,
        encoder: Transformer | None = None,
        handover: str = MODE,
        transport: Transport | None = None,
        recompute: bool = True,
        hold_s: float = HOLD_S,
        wait_s: float = WAIT_S,
        pull_s: float = PULL_S,
        prefill_pages: int | None = None,
        prefill_slots: int | None = None,
        freed: tuple[Callable[[int], None], Callable[[int], None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self.handover = check_choice("handover", handover, HANDOVERS)
        whole = model if isinstance(model, Transformer) else load(None if model is None else Path(model))
        if not whole.has_decoder:
            raise InputError("model: it was loaded without its decoder; legal: a whole one, and this as encoder")
        self.engine = Engine(whole, **options)
        shared = {name: options[name] for name in ("replay", "chunk_tokens") if name in options}
        self.transport = InProcess(clock=clock) if transport is None else transport
        self.prefill = PrefillWorker(
            encoder or whole,
            self.transport,
            pages=self.engine.plan.pages if prefill_pages is None else prefill_pages,
            slots=prefill_slots or options.get("slots", SLOTS),
            hold_s=hold_s,
            freed_page=None if freed is None else freed[0],
            freed_slot=None if freed is None else freed[1],
            clock=clock,
            **shared,
        )
        self.decode = DecodeWorker(self.engine, recompute=recompute, pull_s=pull_s)
        self.wait_s = wait_s
        self._clock = clock
        self._away: dict[str, _Away] = {}
        self._outputs: dict[str, RequestOutput] = {}
        self._numbers = itertools.count()

    @property
    def model(self) -> Transformer:
        return self.engine.model

    @property
    def has_work(self) -> bool:
        """A step would do something, if only wait for a deadline."""
        return bool(self._away) or self.engine.has_work or self.prefill.has_work

    def __contains__(self, request: str) -> bool:
        return request in self._away or request in self.engine

    def state(self, request: str) -> str:
        """`prefill`, `handover`, or that of the engine. Raises InputError for an id that is not live."""
        away = self._away.get(request)
        if away is None:
            return self.engine.state(request)
        return "prefill" if away.ticket is None else "handover"

    def output(self, request: str) -> RequestOutput:
        """Of a request that the engine has, or that ended: it goes on filling. Kept until `forget`.

        Raises:
            InputError: there is none yet.
        """
        if request not in self._outputs:
            raise InputError(f"request: {request!r} has no output; it is not here, or its prompt is being computed")
        return self._outputs[request]

    def forget(self, request: str) -> None:
        """Keep no output of a request that ended."""
        self._outputs.pop(request, None)

    def submit(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        request: str | None = None,
        images: Sequence[ImageSource] = (),
        prefill: str | None = None,
        **options: Any,
    ) -> str:
        """Let a request wait; its id. Arguments as of `Engine.submit`.

        A request for `full` prefill, or for its prompt's log-probabilities, is the engine's alone: the encoder does not
        compute them.

        Raises:
            InputError, CapacityError: as `Engine.submit` and `PrefillWorker.submit`; nothing is queued.
        """
        params = params or SamplingParams()
        name = request or next(own for n in self._numbers if (own := f"request-{n}") not in self)
        if name in self:
            raise InputError(f"request: {name!r} is live already; legal: an id of its own")
        self.prefill.settle()  # an id of before may be used again
        how = check_choice("prefill", prefill or self.engine.prefill, PREFILL_MODES)
        if how == "full" or params.prompt_logprobs is not None:
            self._enter(self.engine.submit(prompt, params, request=name, images=images, prefill=prefill, **options))
            return name
        pictures = read_images(self.model, images)
        self.engine.check(prompt, params, images=pictures, **options)
        known = {key: options[key] for key in ("salt", "priority") if key in options}
        self.prefill.submit(prompt, request=name, mode=self.handover, images=pictures, **known)
        until = self._clock() + self.wait_s
        self._outputs.pop(name, None)
        self._away[name] = _Away(prompt=prompt, params=params, images=pictures, options=options, until=until)
        return name

    def step(self) -> list[Delta]:
        """One step of both workers, and what lies between them; what it added to completions."""
        deltas = []
        for offer in self.prefill.step():
            deltas += self._offered(offer)
        for name, away in list(self._away.items()):
            if away.ticket is not None and self._takes:
                deltas += self._arrive(name, away)
            elif away.until <= self._clock():
                self.prefill.cancel(name)
                error = HandoverError(f"hand-over of {name!r}: it did not come within {self.wait_s:g} s")
                deltas += self._arrive(name, away, error)
        return deltas + self.engine.step()

    def abort(self, request: str) -> RequestOutput | None:
        """End a request wherever it is; what both sides held is free when this returns. None if it had no output."""
        # Also where it has been pulled: the word that it was may not have been heard yet.
        self.prefill.cancel(request)
        if self._away.pop(request, None) is not None:
            return None
        return self.engine.abort(request)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        images: Sequence[Sequence[ImageSource]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The outputs of one or more prompts, in their order; arguments as of `LLM.generate`."""
        asked, names = as_asked(prompts, params, images), list[str]()
        try:
            for prompt, own, shown in asked:
                names.append(self.submit(prompt, own, images=shown, **options))
            while any(name in self for name in names):
                self.step()
            return [self.output(name) for name in names]
        finally:
            for name in names:
                if name in self:
                    self.abort(name)
                self.forget(name)

    def stream(self, request: str) -> Iterator[Delta]:
        """The deltas of one request, stepping until it ends, others beside it. Whoever stops reading aborts it."""
        try:
            while request in self:
                yield from (delta for delta in self.step() if delta.request == request)
        finally:
            if request in self:
                self.abort(request)

    def check_integrity(self) -> None:
        """Of both workers; and whoever is away is the prefill worker's, or has been offered."""
        self.engine.check_integrity()
        self.prefill.check_integrity()
        assert not any(name in self.engine for name in self._away)

    @property
    def _takes(self) -> bool:
        """The engine holds no more parcels than it has slots: those that wait have their bytes in memory."""
        return self.engine.scheduler.waiting < self.engine.kv.slots.slots

    def _offered(self, offer: Offer) -> list[Delta]:
        away = self._away.get(offer.request)
        if away is None:
            return []
        away.ticket = offer.ticket
        return [] if offer.error is None else self._arrive(offer.request, away, HandoverError(offer.error))

    def _arrive(self, name: str, away: _Away, error: HandoverError | None = None) -> list[Delta]:
        """Let the engine have a request, with what was handed over or without."""
        del self._away[name]
        options = {**away.options, "request": name, "images": away.images}
        try:
            if error is not None:
                self.decode.without(error, away.prompt, away.params, **options)
            else:
                assert away.ticket is not None
                self.decode.fetch(self.transport, away.ticket, away.prompt, away.params, **options)
        except HandoverError as failed:
            return self._failed(name, away, failed)
        self._enter(name)
        return []

    def _enter(self, name: str) -> None:
        self._outputs[name] = self.engine.output(name)

    def _failed(self, name: str, away: _Away, error: HandoverError) -> list[Delta]:
        """An output that ends with an error, and the deltas that say so."""
        ended = [
            Completion(index=index, finish_reason="error", stopped_by=str(error)) for index in range(away.params.n)
        ]
        times = Times(arrived=self._clock())
        self._outputs[name] = RequestOutput(
            request=name, prompt_ids=compact(()), completions=ended, counts=Counts(), times=times
        )
        return [
            Delta(request=name, index=one.index, text="", token_ids=(), finish_reason="error", stopped_by=str(error))
            for one in ended
        ]
