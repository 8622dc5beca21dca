"""What a decode worker owes its fronts: reports of their runs, kept until they are asked for.

A front asks again and again (`poll`), and each answer waits until there is something to say. A front that does not ask
for long is dead: its runs end, their pages come back. Everything here happens on the worker's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from rorqual.disagg.cluster.job import Bulletin, Report
from rorqual.engine.stats import EngineStats

POLL_SECONDS = 1.0
"""How long a poll waits for something to say."""
STATS_SECONDS = 0.5
"""Between two statistics to one front, at least."""
RECENT = 32
"""Steps in them."""


@dataclass(slots=True)
class _Desk:
    """Of one front. seen: when it asked last. told: when it had statistics."""

    seen: float
    told: float = -STATS_SECONDS
    reports: dict[str, Report] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Desks:
    """Of one worker.

    Args:
        incarnation: of the worker's process.
        stats: the worker's latest statistics.
        clock: seconds.
    """

    def __init__(
        self, incarnation: str, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._incarnation, self._stats, self._clock = incarnation, stats, clock
        self._desks: dict[str, _Desk] = {}
        self._front_of: dict[str, str] = {}

    @property
    def runs(self) -> int:
        """That live."""
        return len(self._front_of)

    def __contains__(self, run: str) -> bool:
        return run in self._front_of

    def open(self, front: str, run: str) -> None:
        """A front has sent a run."""
        desk = self._desk(front)
        desk.seen = self._clock()
        desk.runs.add(run)
        self._front_of[run] = front

    def drop(self, run: str) -> bool:
        """A run is over and nobody wants to hear of it; whether it was live."""
        front = self._front_of.pop(run, None)
        if front is not None:
            self._desks[front].runs.discard(run)
            self._desks[front].reports.pop(run, None)
        return front is not None

    def file(self, reports: Iterable[Report], ended: Iterable[str]) -> None:
        """Keep reports for whoever they are for. ended: runs that these are the last of."""
        for report in reports:
            front = self._front_of.get(report.name)
            if front is None:
                continue
            desk = self._desks[front]
            before = desk.reports.get(report.name)
            if before is not None:
                report = replace(
                    report,
                    deltas=before.deltas + report.deltas,
                    prompt_logprobs=report.prompt_logprobs or before.prompt_logprobs,
                )
            desk.reports[report.name] = report
            desk.ready.set()
        for run in ended:
            front = self._front_of.pop(run, None)
            if front is not None:
                self._desks[front].runs.discard(run)

    async def poll(self, front: str) -> Bulletin:
        """What there is for a front, as soon as there is something, or after `POLL_SECONDS`."""
        desk = self._desk(front)
        desk.seen = self._clock()
        if not desk.reports:
            desk.ready.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(desk.ready.wait(), POLL_SECONDS)
        desk.seen, reports, desk.reports = self._clock(), tuple(desk.reports.values()), {}
        stats = None
        # With the last of its runs a front stops asking.
        if desk.seen - desk.told >= STATS_SECONDS or not desk.runs:
            desk.told, own = desk.seen, self._stats()
            stats = replace(own, recent=own.recent[-RECENT:])
        return Bulletin(incarnation=self._incarnation, reports=reports, live=frozenset(desk.runs), stats=stats)

    def deserted(self, seconds: float) -> list[str]:
        """Runs of fronts that have not asked for so long; their desks are cleared."""
        now = self._clock()
        gone = [front for front, desk in self._desks.items() if now - desk.seen > seconds]
        runs = [run for front in gone for run in self._desks[front].runs]
        for run in runs:
            del self._front_of[run]
        for front in gone:
            del self._desks[front]
        return runs

    def _desk(self, front: str) -> _Desk:
        return self._desks.setdefault(front, _Desk(self._clock()))
