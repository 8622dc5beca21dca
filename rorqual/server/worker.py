"""The engine in a thread of its own: commands go in, deltas come out, on whatever event loop asked.

    event loop                      worker thread
    submit, abort, stats  ------->  between two steps
                          <-------  deltas, as soon as a step ends

All that a step gives wakes an event loop once. Nothing but the thread touches the engine. A step that fails ends the
worker: every request is told, and `alive` is False from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from rorqual.engine.output import Delta, RequestOutput
from rorqual.engine.stats import EngineStats
from rorqual.engine.text_model import TextModel
from rorqual.errors import CapacityError, RorqualError
from rorqual.log import logger

Answer = TypeVar("Answer")
IDLE_SECONDS = 0.5
"""How long an idle worker waits before it looks whether it is to end."""


class Served(Protocol):
    """What a server asks of an engine: an `Engine` in this process, or the `Front` of a cluster."""

    @property
    def model(self) -> TextModel: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def drafts(self) -> bool: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    def __contains__(self, request: str) -> bool: ...

    def submit(self, *args: Any, **options: Any) -> str:
        """Arguments of `Engine.submit`."""

    def output(self, request: str) -> RequestOutput: ...

    def abort(self, request: str) -> RequestOutput: ...

    def step(self) -> list[Delta]: ...

    def stats(self) -> EngineStats: ...


class EngineStopped(RorqualError):
    """The engine is not running: it failed, or the server ends."""


class Ticket:
    """A submitted request: its deltas as they come. output: what it has come to so far; the worker fills it.

    interval: seconds after a delta in which the next one waits for more to join it. The first comes at once, and so
    does the last of each completion.
    """

    def __init__(self, worker: EngineWorker, loop: asyncio.AbstractEventLoop, interval: float = 0.0) -> None:
        self.name, self.loop = "", loop
        self.output: RequestOutput | None = None
        self._worker, self._interval = worker, interval
        self._next = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._come: list[Delta | EngineStopped] = []
        self._reader: asyncio.Future[None] | None = None
        self._ends = 0
        self._aborted = False

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas until every completion has ended; what came while nobody read is one delta a completion.

        Raises:
            EngineStopped: the engine ended before the request did.
        """
        assert self.output is not None
        left = len(self.output.completions)
        while left:
            if not self._come:
                self._reader = self.loop.create_future()
                await self._reader
            come, self._come = self._come, []
            if self._interval:
                self._next = self.loop.time() + self._interval
            for found in come if len(come) == 1 else joined(come):
                if isinstance(found, EngineStopped):
                    raise found
                left -= found.finish_reason is not None
                yield found

    async def abort(self, reason: str = "abort") -> None:
        """End it if it is live; its pages are free when this returns. reason: what it counts as."""
        if not self.ended:
            await self._worker.abort(self.name, reason)
            self._aborted = True

    @property
    def ended(self) -> bool:
        """Nothing of it is in the engine any more, as far as this side knows; what it said may be unread."""
        return self._aborted or (self.output is not None and self._ends == len(self.output.completions))

    def put(self, found: Delta | EngineStopped) -> None:
        """Called on the event loop."""
        self._come.append(found)
        last = isinstance(found, EngineStopped) or found.finish_reason is not None
        self._ends += last
        if last or not self._interval or self.loop.time() >= self._next:
            self._wake()
        elif self._timer is None:
            self._timer = self.loop.call_at(self._next, self._wake)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def joined(come: list[Delta | EngineStopped]) -> list[Delta | EngineStopped]:
    """Each completion's deltas as one, in the order in which the completions began."""
    found: dict[int, Delta | EngineStopped] = {}
    for one in come:
        at = one.index if isinstance(one, Delta) else -1
        before = found.get(at)
        found[at] = _together(before, one) if isinstance(before, Delta) and isinstance(one, Delta) else one
    return list(found.values())


def _together(first: Delta, second: Delta) -> Delta:
    told = None if first.logprobs is None and second.logprobs is None else second.logprobs or ()
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=None if told is None else (first.logprobs or ()) + told,
    )


class _Post:
    """What the thread has for event loops; each gets all of it in one wake-up."""

    def __init__(self) -> None:
        self._letters: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Any], None], Any]]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, receive: Callable[[Any], None], what: object) -> None:
        self._letters.setdefault(loop, []).append((receive, what))

    def send(self) -> None:
        letters, self._letters = self._letters, {}
        for loop, own in letters.items():
            try:
                loop.call_soon_threadsafe(_deliver, own)
            except RuntimeError:  # the loop is closed, nobody reads
                logger.debug("server: nobody reads %d answers any more", len(own))


def _deliver(letters: list[tuple[Callable[[Any], None], Any]]) -> None:
    for receive, what in letters:
        receive(what)


class Watcher(Protocol):
    """Looks on, from the worker's thread."""

    def delta(self, output: RequestOutput, delta: Delta) -> None:
        """A completion of a request has gone on, or ended."""

    def ended(self, output: RequestOutput, reason: str, completions: int) -> None:
        """A request was ended from outside, and so many of its completions with it."""


class EngineWorker:
    """Owns an engine.

    waiting: requests in its queue, whatever the engine's own limit; None leaves it at that. watcher: of what it does.
    interval: of its tickets.
    """

    def __init__(
        self, engine: Served, waiting: int | None = None, watcher: Watcher | None = None, interval: float = 0.0
    ) -> None:
        self._engine, self._waiting, self._watcher, self._interval = engine, waiting, watcher, interval
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._post = _Post()
        self._stopping = self._failed = False
        self._thread = threading.Thread(target=self._run, name="rorqual-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """It takes requests and answers them."""
        return self._thread.is_alive() and not self._failed

    @property
    def engine(self) -> Served:
        """To read what never changes: its model, plan and limits."""
        return self._engine

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """End after the step that runs; requests that are live are told."""
        self._stopping = True
        self._commands.put(_Command(lambda: None))
        if self._thread.is_alive():
            self._thread.join(seconds)

    async def submit(self, prompt: Any, params: Any, **options: Any) -> Ticket:
        """A request of the engine's (`Engine.submit`). Raises what that raises, and EngineStopped."""
        ticket = Ticket(self, asyncio.get_running_loop(), self._interval)

        def enter() -> None:
            waiting = self._engine.waiting
            if self._waiting is not None and waiting >= self._waiting:
                raise CapacityError(f"queue: {waiting} requests wait already, which is the limit")
            ticket.name = self._engine.submit(prompt, params, **options)
            ticket.output = self._engine.output(ticket.name)
            self._tickets[ticket.name] = ticket

        try:
            await self.call(enter)
        except asyncio.CancelledError:
            # It is done all the same, and nobody would end it.
            self._commands.put(_Command(lambda: self._end(ticket.name, "abort")))
            raise
        return ticket

    async def abort(self, name: str, reason: str = "abort") -> None:
        """End a request if it is live. reason: what its watcher is told."""
        with contextlib.suppress(EngineStopped):  # then nothing is live any more
            await self.call(lambda: self._end(name, reason))

    def _end(self, name: str, reason: str) -> None:
        self._tickets.pop(name, None)
        if name in self._engine:
            output = self._engine.output(name)
            ends = sum(own.finish_reason is None for own in output.completions)
            self._engine.abort(name)
            if self._watcher is not None and ends:
                self._watcher.ended(output, reason, ends)

    async def call(self, command: Callable[[], Answer]) -> Answer:
        """Have the thread do something between two steps; what it gives."""
        if not self.alive:
            raise EngineStopped("engine: not running")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._commands.put(_Command(command, loop, answer))
        if not self.alive:  # it ended in between, and may have looked for the last time
            self._refuse(_Post())
        # Whoever asks may be cancelled meanwhile; what was to be done is done all the same.
        return await answer

    def _refuse(self, post: _Post) -> None:
        """Tell everybody who still waits that nothing will be done."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait().refuse(post)
        post.send()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey(wait=not self._engine.has_work)
                if self._engine.has_work:
                    self._step()
        except BaseException:
            self._failed = True
            logger.exception("engine: a step failed; the server takes no more requests")
        finally:
            self._failed = self._failed or self._stopping
            for ticket in self._tickets.values():
                self._post.add(ticket.loop, ticket.put, EngineStopped("engine: ended before the request did"))
            self._refuse(self._post)

    def _obey(self, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            command = self._commands.get(timeout=IDLE_SECONDS) if wait else self._commands.get_nowait()
            while True:
                command.run(self._post)
                command = self._commands.get_nowait()
        self._post.send()

    def _step(self) -> None:
        gone = set[str]()
        for delta in self._engine.step():
            ticket = self._tickets.get(delta.request)
            if ticket is None:
                continue
            if self._watcher is not None and ticket.output is not None:
                self._watcher.delta(ticket.output, delta)
            self._post.add(ticket.loop, ticket.put, delta)
            if delta.finish_reason is not None and delta.request not in self._engine:
                gone.add(delta.request)
        for name in gone:  # not before all of its completions' deltas are posted
            del self._tickets[name]
        self._post.send()


class _Command:
    """Something to do between two steps, and who waits for it on which loop."""

    def __init__(
        self,
        command: Callable[[], Any],
        loop: asyncio.AbstractEventLoop | None = None,
        answer: asyncio.Future[Any] | None = None,
    ) -> None:
        self._command, self._loop, self._answer = command, loop, answer

    def run(self, post: _Post) -> None:
        try:
            found, error = self._command(), None
        except BaseException as caught:
            found, error = None, caught
        self._tell(post, found, error)

    def refuse(self, post: _Post) -> None:
        self._tell(post, None, EngineStopped("engine: not running"))

    def _tell(self, post: _Post, found: Any, error: BaseException | None) -> None:
        if self._loop is not None:
            post.add(self._loop, self._take, (found, error))

    def _take(self, came: tuple[Any, BaseException | None]) -> None:
        """Called on the event loop."""
        answer, (found, error) = self._answer, came
        if answer is None or answer.done():  # whoever asked was cancelled
            return
        if error is None:
            answer.set_result(found)
        else:
            answer.set_exception(error)
