"""A decode worker as Ray runs it: runs of fronts come in, their parcels from prefill workers, reports go out."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from rorqual.disagg.cluster.build import end_process, engine_of, facts_of, host_of, receiver_of
from rorqual.disagg.cluster.config import ClusterConfig
from rorqual.disagg.cluster.desk import STATS_SECONDS, Desks
from rorqual.disagg.cluster.job import Bulletin, Facts, Holding, Job, Report
from rorqual.disagg.cluster.loop import Loop
from rorqual.disagg.decode import DecodeWorker
from rorqual.engine.output import Counts, Delta, RequestOutput
from rorqual.engine.stats import EngineStats
from rorqual.errors import HandoverError, RorqualError
from rorqual.log import logger
from rorqual.store.interface import PageStore


class DecodeActor:
    """A decode worker. Its methods are what a `Handle` calls.

    Args:
        config: the cluster's.
        name: the worker's.
        master: of the store, where it has one.
    """

    def __init__(self, config: ClusterConfig, name: str, master: str = "") -> None:
        self._config = config
        self._engine = engine_of(config, name, master)
        self._worker = DecodeWorker(self._engine)
        self._receive = receiver_of(config)
        self._facts = facts_of(self._engine, name, "decode", config.decode.slots, host_of(config))
        self._stats = self._engine.stats()
        self._counted = 0.0
        self._desks = Desks(self._facts.incarnation, lambda: self._stats)
        self._outputs: dict[str, RequestOutput] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._events: asyncio.AbstractEventLoop | None = None
        self._loop = Loop(self._engine, self._stepped, end_process)

    @property
    def store(self) -> PageStore | None:
        """Of its pages, where it has one."""
        return None if self._engine.restorer is None else self._engine.restorer.store

    async def hello(self) -> tuple[Facts, EngineStats]:
        """What it is, and how it does."""
        self._begin()
        return self._facts, self._stats

    async def holding(self, keys: Sequence[bytes]) -> Holding:
        """How much of a prefix it has, by its index as it is now."""
        return Holding(held=len(self._engine.kv.pages.match(keys)), load=self._desks.runs)

    async def decode(self, front: str, job: Job, parcel: Sequence[Any]) -> None:
        """Take a run. parcel: what its prefill worker will give, or nothing."""
        self._begin()
        self._desks.open(front, job.name)
        self._tasks[job.name] = asyncio.create_task(self._enter(job, parcel))

    async def abort(self, run: str) -> None:
        """End a run, wherever it is, and say nothing of it."""
        if (task := self._tasks.pop(run, None)) is not None:
            task.cancel()
        if self._desks.drop(run):
            self._loop.call(lambda: self._leave(run))

    async def poll(self, front: str) -> Bulletin:
        """What there is to tell a front of its runs."""
        self._begin()
        return await self._desks.poll(front)

    async def audit(self) -> EngineStats:
        """Statistics of now, after a check that every page and slot is somebody's who is there.

        Raises:
            AssertionError: something leaked.
        """

        def look() -> EngineStats:
            self._engine.check_integrity()
            assert self._outputs.keys() == set(self._engine.live), "runs and requests differ"
            return self._engine.stats()

        return await asyncio.wrap_future(self._loop.call(look))

    def close(self) -> None:
        """End after the step that runs, for a worker that is no process of its own."""
        self._loop.close()

    def _begin(self) -> None:
        """Once there is an event loop."""
        if self._events is None:
            self._events = asyncio.get_running_loop()
            self._sweep = self._events.create_task(self._watch())

    async def _watch(self) -> None:
        """Runs of fronts that are gone end."""
        seconds = self._config.deadlines.silent
        while True:
            await asyncio.sleep(seconds / 4)
            for run in self._desks.deserted(seconds):
                logger.warning("cluster: nobody asks for %s any more", run)
                if (task := self._tasks.pop(run, None)) is not None:
                    task.cancel()
                self._loop.call(lambda run=run: self._leave(run))  # type: ignore[misc]

    async def _enter(self, job: Job, parcel: Sequence[Any]) -> None:
        """Wait for the parcel; with or without it, the engine has the run then."""
        try:
            data = await self._parcel(job, parcel[0]) if parcel else None
            await asyncio.wrap_future(self._loop.call(lambda: self._submit(job, data)))
        except Exception as error:
            if not isinstance(error, RorqualError):
                logger.exception("cluster: %s could not be begun", job.name)
            self._refuse(job, error)
        finally:
            self._tasks.pop(job.name, None)

    async def _parcel(self, job: Job, answer: Awaitable[Any]) -> Any:
        """The message of a prefill worker; None where it does not come, whatever the reason: that is no error."""
        end = time.monotonic() + self._config.deadlines.handover
        try:
            offered = await asyncio.wait_for(answer, self._config.deadlines.handover)
            return await asyncio.to_thread(self._receive, offered, end - time.monotonic())
        except Exception as error:
            why = str(error).strip().rpartition("\n")[2] or type(error).__name__
            logger.info("cluster: no parcel for %s (%s); its prompt is computed here", job.name, why)
            return None

    def _submit(self, job: Job, data: Any) -> None:
        """In the engine's thread. A run that was ended meanwhile is not begun."""
        if job.name not in self._desks:
            return
        prompt = list(job.ids)
        options: dict[str, Any] = {
            "images": job.images,
            "request": job.name,
            "priority": job.priority,
            "salt": job.salt,
            "speculative": job.speculative,
        }
        try:
            if data is None:
                self._engine.submit(prompt, job.params, prefill=job.prefill, **options)
            else:
                self._worker.receive(data, job.params, prompt=prompt, **options)
        except HandoverError as error:
            self._worker.without(error, prompt, job.params, prefill=job.prefill, **options)
        self._outputs[job.name] = self._engine.output(job.name)

    def _refuse(self, job: Job, error: Exception) -> None:
        """What the front let pass and the engine does not take ends the run."""
        deltas = [
            Delta(request=job.name, index=index, text="", token_ids=(), finish_reason="error", stopped_by=str(error))
            for index in range(job.params.n)
        ]
        report = Report(name=job.name, deltas=tuple(deltas), counts=Counts(prompt=len(job.ids)))
        self._desks.file([report], [job.name])

    def _leave(self, run: str) -> None:
        """In the engine's thread."""
        if self._outputs.pop(run, None) is not None and run in self._engine:
            self._engine.abort(run)
        self._stats = self._engine.stats()

    def _stepped(self, deltas: list[Delta]) -> None:
        """In the engine's thread: what a step gave, as reports."""
        now = time.monotonic()
        if now - self._counted >= STATS_SECONDS or not self._engine.has_work:
            self._counted, self._stats = now, self._engine.stats()
        by_run: dict[str, list[Delta]] = {}
        for delta in deltas:
            by_run.setdefault(delta.request, []).append(delta)
        reports, ended = [], []
        for run, own in by_run.items():
            output = self._outputs[run]
            logprobs = output.prompt_logprobs
            first = logprobs is not None and len(output.token_ids) == len(own[0].token_ids)
            reports.append(
                Report(
                    name=run,
                    deltas=tuple(own),
                    counts=copy.deepcopy(output.counts),
                    prompt_logprobs=tuple(logprobs) if first and logprobs is not None else None,
                )
            )
            if output.finished:
                ended.append(run)
                del self._outputs[run]
        if reports and self._events is not None:
            self._events.call_soon_threadsafe(self._desks.file, reports, ended)
