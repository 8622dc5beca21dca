"""A prefill worker as Ray runs it: a job comes in, and the answer of the call is its parcel, or where that is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rorqual.disagg.cluster.build import end_process, facts_of, host_of, prefill_stats, prefill_worker_of, sender_of
from rorqual.disagg.cluster.config import ClusterConfig
from rorqual.disagg.cluster.job import Facts, Holding, Job
from rorqual.disagg.cluster.loop import Loop
from rorqual.disagg.prefill import Offer
from rorqual.engine.stats import EngineStats
from rorqual.errors import HandoverError
from rorqual.store.interface import PageStore


class PrefillActor:
    """Its methods are what a `Handle` calls.

    Args:
        config: the cluster's.
        name: the worker's.
        master: of the store, where it has one.
    """

    def __init__(self, config: ClusterConfig, name: str, master: str = "") -> None:
        self._config = config
        self._sender = sender_of(config)
        self._worker = prefill_worker_of(config, self._sender.transport, name, master)
        self._facts = facts_of(self._worker, name, "prefill", config.prefill.slots, host_of(config))
        self._waits: dict[str, asyncio.Future[Offer]] = {}
        self._events: asyncio.AbstractEventLoop | None = None
        self._loop = Loop(self._worker, self._stepped, end_process, lambda: self._worker.computing)

    @property
    def store(self) -> PageStore | None:
        """Of its pages, where it has one."""
        return None if self._worker.restorer is None else self._worker.restorer.store

    async def hello(self) -> tuple[Facts, EngineStats]:
        """What it is, and how it does."""
        return self._facts, prefill_stats(self._worker)

    async def holding(self, keys: Sequence[bytes]) -> Holding:
        """How much of a prefix it has, by its index as it is now."""
        return Holding(held=len(self._worker.kv.pages.match(keys)), load=len(self._waits))

    async def prefill(self, job: Job) -> Any:
        """Compute a prompt; what its decode worker gets it by.

        Raises:
            InputError: a prompt that could never run here.
            HandoverError: it was not computed in time, there was no credit, or it was aborted.
        """
        self._events = asyncio.get_running_loop()
        offered = self._waits[job.name] = self._events.create_future()
        try:
            await asyncio.wrap_future(self._loop.call(lambda: self._submit(job)))
            offer = await asyncio.wait_for(offered, self._config.deadlines.handover)
        except (TimeoutError, asyncio.CancelledError):
            self._loop.call(lambda: self._worker.cancel(job.name))
            raise HandoverError(f"hand-over of {job.name!r}: not computed in time, or aborted") from None
        finally:
            self._waits.pop(job.name, None)
        if offer.ticket is None:
            raise HandoverError(offer.error or f"hand-over of {job.name!r}: nothing was offered")
        return self._sender.answer(offer.ticket)

    async def settled(self, run: str) -> None:
        """Its decode worker has begun, with the parcel or without: what was kept for it may go."""
        self._sender.release(run)
        self._loop.call(lambda: self._worker.cancel(run))

    async def abort(self, run: str) -> None:
        """Give a run up."""
        waits = self._waits.pop(run, None)
        if waits is not None and not waits.done():
            waits.cancel()
        await self.settled(run)

    async def audit(self) -> EngineStats:
        """Statistics of now, after a check that every page and slot is somebody's who is there.

        Raises:
            AssertionError: something leaked.
        """

        def look() -> EngineStats:
            self._worker.check_integrity()
            return prefill_stats(self._worker)

        return await asyncio.wrap_future(self._loop.call(look))

    async def kept(self) -> int:
        """Bytes of parcels that are under way."""
        return self._sender.kept()

    def close(self) -> None:
        """End after the step that runs, for a worker that is no process of its own."""
        self._loop.close()

    def _submit(self, job: Job) -> None:
        """In the worker's thread. A run that was ended meanwhile is not begun."""
        if job.name in self._waits:
            self._worker.submit(
                list(job.ids),
                request=job.name,
                mode=self._config.handover.mode,
                salt=job.salt,
                priority=job.priority,
                images=job.images,
            )

    def _stepped(self, offers: list[Offer]) -> None:
        """In the worker's thread."""
        if offers and self._events is not None:
            self._events.call_soon_threadsafe(self._tell, offers)

    def _tell(self, offers: list[Offer]) -> None:
        for offer in offers:
            waits = self._waits.get(offer.request)
            if waits is not None and not waits.done():
                waits.set_result(offer)
            else:
                self._sender.release(offer.request)
