"""`Front`: many requests over many workers, asked as an engine is.

    submit -> who holds its prefix? -> a prefill worker begins, a decode worker is told where its parcel will be
                                            |
    step   <- bulletins of decode workers: deltas, counts, what still lives there

A front keeps its requests, and nothing about the workers that they do not tell again. A run whose worker fails is begun
anew elsewhere and goes on where the client is (`rorqual.disagg.cluster.told`). Every wait has a deadline.

One thread calls it; workers' answers come by other threads into one queue that `step` reads.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rorqual.disagg.cluster.config import DeadlineSection
from rorqual.disagg.cluster.entry import Entry
from rorqual.disagg.cluster.job import Bulletin, Facts, Job, Report
from rorqual.disagg.cluster.placing import HELLO_SECONDS, Inquiry, Placing, Post
from rorqual.disagg.cluster.told import Diverged, Told
from rorqual.disagg.cluster.totals import totals
from rorqual.engine.images import ImageSource
from rorqual.engine.output import Counts, Delta, RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.engine.prompts import PromptInput
from rorqual.engine.stats import EngineStats
from rorqual.engine.text_model import TextModel
from rorqual.errors import CapacityError, InputError
from rorqual.log import logger

STEP_SECONDS = 0.01
"""How long a step waits for something to happen; commands of a server wait as long."""
ASK_SECONDS = 1.0
"""How long workers may take to say what they hold."""


@dataclass(slots=True)
class Run:
    """A request of this front. job: without the name of a run. since: when it was last sent to a worker, or lost one.

    post: the decode worker that has it; prefill: the one that its parcel comes from, parcel: where it will be. sent:
    polls of that worker when it had accepted the job; None before.
    """

    job: Job
    told: Told
    keys: tuple[bytes, ...]
    since: float
    number: int = 0
    inquiry: Inquiry | None = None
    post: Post | None = None
    prefill: Post | None = None
    parcel: object = None
    sent: int | None = None
    losses: int = 0

    @property
    def name(self) -> str:
        """Of its present run."""
        return f"{self.job.name}~{self.number}"


class Front:
    """Requests over the workers of a cluster.

    Args:
        model: configuration and tokenizer, without weights.
        posts: the workers; at least one decode worker must answer in `deadlines.start` seconds.
        deadlines: of everything.
        clock: seconds.

    Raises:
        CapacityError: no decode worker answers.
    """

    def __init__(
        self,
        model: TextModel,
        posts: Iterable[Post],
        deadlines: DeadlineSection,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.id = f"front-{uuid.uuid4().hex[:12]}"
        self.model = model
        self._placing, self._deadlines, self._clock = Placing(posts), deadlines, clock
        self._events: queue.SimpleQueue[Callable[[], list[Delta]]] = queue.SimpleQueue()
        self._runs: dict[str, Run] = {}
        self._by_run: dict[str, Run] = {}
        self._numbers = itertools.count()
        self._requests = self._finished = self._aborted = 0
        self._facts = self._first_facts()
        self._entry = Entry(model, self._facts, clock)
        self.max_model_len = self._facts.max_model_len

    @property
    def drafts(self) -> bool:
        """Requests may be sped up by drafts."""
        return self._facts.drafts

    @property
    def has_work(self) -> bool:
        return bool(self._runs)

    @property
    def live(self) -> list[str]:
        """Ids of requests that have not ended, in the order of their arrival."""
        return list(self._runs)

    @property
    def waiting(self) -> int:
        """Requests without a worker, and those that wait at one."""
        there = sum(post.stats.waiting for post in self._placing.of("decode") if post.stats is not None)
        return there + sum(run.post is None for run in self._runs.values())

    @property
    def posts(self) -> list[Post]:
        return list(self._placing.posts.values())

    def __contains__(self, request: str) -> bool:
        return request in self._runs

    def output(self, request: str) -> RequestOutput:
        """A live request's output so far; it goes on filling. Raises InputError for an id that is not live."""
        return self._run(request).told.output

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
    ) -> str:
        """Let a request wait; its id. Arguments and errors as `Engine.submit`."""
        params = params or SamplingParams()
        if not params.greedy and params.seed is None:
            params = replace(params, seed=secrets.randbits(63))  # a second run draws the same
        if request is not None and request in self._runs:
            raise InputError(f"request: {request!r} is live already; legal: an id of its own")
        name = request or next(n for i in self._numbers if (n := f"request-{i}") not in self._runs)
        job, output, keys = self._entry.job(
            name, prompt, params, priority=priority, salt=salt, images=images, speculative=speculative, prefill=prefill
        )
        run = Run(job, Told(output), keys, self._clock())
        self._runs[name] = run
        self._requests += 1
        self._ask(run)
        return name

    def abort(self, request: str) -> RequestOutput:
        """End a request now; its worker gives back its pages within a step. Its output so far."""
        run = self._run(request)
        run.told.end("abort")
        self._leave(run)
        self._aborted += 1
        return run.told.output

    def step(self) -> list[Delta]:
        """What has come since; waits a moment where nothing has. Requests that have ended are live no more."""
        deltas: list[Delta] = []
        try:
            deltas += self._events.get(timeout=STEP_SECONDS)()
            while True:
                deltas += self._events.get_nowait()()
        except queue.Empty:
            pass
        return deltas + self._watch()

    def stats(self) -> EngineStats:
        """Of all decode workers together, as they last told."""
        told = [post.stats for post in self._placing.posts.values() if post.role == "decode" and post.stats is not None]
        return totals(
            told,
            waiting=sum(run.post is None for run in self._runs.values()),
            requests=self._requests,
            finished=self._finished,
            aborted=self._aborted,
        )

    def close(self) -> None:
        """End every request."""
        for request in self.live:
            self.abort(request)

    def _run(self, request: str) -> Run:
        if request not in self._runs:
            raise InputError(f"request: {request!r} is not live; {len(self._runs)} are")
        return self._runs[request]

    def _first_facts(self) -> Facts:
        """Of whoever answers first; all workers have one model."""
        end = self._clock() + self._deadlines.start
        while self._clock() < end:
            self._greet()
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=STEP_SECONDS)()
            known = [post.facts for post in self._placing.of("decode") if post.facts is not None]
            if known:
                return known[0]
        raise CapacityError(f"cluster: no decode worker answered within {self._deadlines.start:g} s")

    def _later(self, future: Future[Any], then: Callable[[Future[Any]], list[Delta]]) -> None:
        """Bring an answer into the queue."""
        future.add_done_callback(lambda done: self._events.put(lambda: then(done)))

    # Where a request goes.

    def _ask(self, run: Run) -> None:
        def answered(post: str, done: Future[Any]) -> None:
            self._events.put(lambda: self._answered(run, inquiry, post, done))

        inquiry = self._placing.ask(run.keys, self._clock() + ASK_SECONDS, answered)
        run.inquiry = inquiry
        if not inquiry.missing:
            self._place(run)

    def _answered(self, run: Run, inquiry: Inquiry, post: str, done: Future[Any]) -> list[Delta]:
        if done.exception() is not None:
            self._down(self._placing.posts[post], str(done.exception()))
        else:
            inquiry.answers[post] = done.result()
        inquiry.missing.discard(post)
        if run.inquiry is inquiry and not inquiry.missing:
            self._place(run)
        return []

    def _place(self, run: Run) -> None:
        """Send a run to the workers of its choice; without a decode worker it stays, and `_watch` comes back to it."""
        inquiry, facts = run.inquiry, self._facts
        if inquiry is None or run.job.name not in self._runs:
            return
        post = self._placing.choose("decode", inquiry, facts.page_tokens, facts.window)
        if post is None:
            return
        run.inquiry, run.post, run.number, run.sent, run.since = None, post, run.number + 1, None, self._clock()
        run.told.again()
        self._by_run[run.name] = run
        post.runs.add(run.name)
        job = replace(run.job, name=run.name)
        run.prefill = self._placing.choose("prefill", inquiry, facts.page_tokens, facts.window) if job.split else None
        if run.prefill is not None:
            run.prefill.runs.add(run.name)
            run.parcel = run.prefill.handle.begin("prefill", job)
        parcel = [] if run.parcel is None else [run.parcel]
        self._later(post.handle.call("decode", self.id, job, parcel), partial(self._accepted, run.name, post))
        self._poll(post)

    def _accepted(self, name: str, post: Post, done: Future[Any]) -> list[Delta]:
        error, run = done.exception(), self._by_run.get(name)
        if run is None:
            return []
        if error is not None:
            return self._failed(post, str(error))
        run.sent = post.polls
        return []

    # What workers tell.

    def _poll(self, post: Post) -> None:
        if post.polling is None and post.up and post.runs:
            post.polling, post.polls = self._clock(), post.polls + 1
            self._later(post.handle.call("poll", self.id), partial(self._polled, post, post.polls))

    def _polled(self, post: Post, number: int, done: Future[Any]) -> list[Delta]:
        if number != post.polls or post.polling is None:
            return []  # it was given up in between
        post.polling = None
        if (error := done.exception()) is not None:
            return self._failed(post, str(error))
        bulletin: Bulletin = done.result()
        if bulletin.stats is not None:
            post.stats = bulletin.stats
        deltas = [delta for report in bulletin.reports for delta in self._reported(report)]
        for name in [name for name in post.runs if name not in bulletin.live]:
            # What was accepted before this poll went out must be known there: a worker that began anew knows nothing.
            run = self._by_run[name]
            if run.sent is not None and run.sent < number:
                deltas += self._lost(run, f"{post.name} began anew")
        self._poll(post)
        return deltas

    def _reported(self, report: Report) -> list[Delta]:
        run = self._by_run.get(report.name)
        if run is None:
            return []
        self._settle(run, report.counts)
        self._count(run, report)
        deltas: list[Delta] = []
        try:
            for delta in report.deltas:
                fresh = run.told.take(delta)
                if fresh is not None:
                    deltas.append(fresh)
                    run.losses = 0 if fresh.token_ids else run.losses
        except Diverged:
            return deltas + self._end(run, "cluster: a worker was lost, and the text does not go on as it began")
        if run.told.output.finished:
            self._finished += 1
            if run.post is not None:
                run.post.runs.discard(run.name)  # it knows
            self._leave(run)
        return deltas

    def _settle(self, run: Run, counts: Counts) -> None:
        """A run has begun to speak: whatever it takes from a prefill worker it has.

        One whose parcel did not come gets no more work until it has answered a call.
        """
        if run.prefill is not None:
            run.prefill.runs.discard(run.name)
            run.prefill.handle.call("settled", run.name)
            if not counts.handed:
                self._down(run.prefill, f"the parcel of {run.name} did not come")
        run.parcel = run.prefill = None

    def _count(self, run: Run, report: Report) -> None:
        output, now = run.told.output, self._clock()
        output.counts = report.counts
        if report.prompt_logprobs is not None:
            output.prompt_logprobs = list(report.prompt_logprobs)
        times = output.times
        if times.admitted is None and report.counts.computed:
            times.admitted = now
        if any(delta.token_ids for delta in report.deltas):
            times.first_token, times.last_token = times.first_token or now, now

    # What goes wrong.

    def _failed(self, post: Post, why: str) -> list[Delta]:
        """A decode worker did not answer: all that it had runs elsewhere."""
        self._down(post, why)
        return [delta for name in sorted(post.runs) for delta in self._lost(self._by_run[name], f"{post.name} failed")]

    def _down(self, post: Post, why: str) -> None:
        if post.up:
            logger.warning("cluster: %s does not answer (%s)", post.name, why.strip().split("\n")[0])
        post.down()

    def _lost(self, run: Run, why: str) -> list[Delta]:
        """A run has lost its worker; it begins anew, or ends in an error where that happened too often in a row."""
        self._let_go(run)
        run.losses += 1
        if run.losses > self._deadlines.losses:
            return self._end(run, f"cluster: {run.losses} workers in a row were lost; the last: {why}")
        run.since = self._clock()
        self._ask(run)
        return []

    def _end(self, run: Run, why: str) -> list[Delta]:
        self._leave(run)
        self._finished += 1
        return run.told.end("error", why)

    def _let_go(self, run: Run) -> None:
        """Take a run from its workers, who may be there still."""
        for post in (run.post, run.prefill):
            if post is not None and run.name in post.runs:
                post.runs.discard(run.name)
                post.handle.call("abort", run.name)
        self._by_run.pop(run.name, None)
        run.post = run.prefill = run.parcel = run.sent = run.inquiry = None

    def _leave(self, run: Run) -> None:
        self._let_go(run)
        del self._runs[run.job.name]

    def _watch(self) -> list[Delta]:
        """Every deadline that nobody's answer brings up."""
        self._greet()
        now, deltas = self._clock(), list[Delta]()
        for post in self._placing.of("decode"):
            if post.polling is not None and now - post.polling > self._deadlines.silent:
                post.handle.kill()
                deltas += self._failed(post, f"silent for {self._deadlines.silent:g} s")
        silent = [run for run in self._runs.values() if run.post is not None and run.sent is None]
        for run in silent:
            if now - run.since > self._deadlines.silent:
                deltas += self._lost(run, "it was not taken")
        for run in [run for run in self._runs.values() if run.post is None]:
            if now - run.since > self._deadlines.restart:
                deltas += self._end(run, f"cluster: no decode worker for {self._deadlines.restart:g} s")
            elif run.inquiry is None:
                self._ask(run)
            elif not run.inquiry.missing or now > run.inquiry.until:
                self._place(run)
        return deltas

    def _greet(self) -> None:
        """Call whoever does not answer, now and then."""
        now = self._clock()
        for post in self._placing.posts.values():
            if not post.up and now >= post.due:
                post.due = now + self._deadlines.silent
                self._later(post.handle.call("hello"), partial(self._greeted, post))

    def _greeted(self, post: Post, done: Future[Any]) -> list[Delta]:
        if done.exception() is not None:
            post.due = self._clock() + HELLO_SECONDS
        else:
            post.facts, post.stats = done.result()
            post.up = True
        return []
