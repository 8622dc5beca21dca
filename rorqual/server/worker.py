"""The engine in a thread of its own: commands go in, deltas come out, on whatever event loop asked.

    event loop                      worker thread
    submit, abort, stats  ------->  between two steps
                          <-------  deltas, as soon as a step ends

Nothing but the thread touches the engine. A step that fails ends the worker: every request is told, and `alive` is
False from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
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
    """A submitted request: its deltas as they come. output: what it has come to so far; the worker fills it."""

    def __init__(self, worker: EngineWorker, loop: asyncio.AbstractEventLoop) -> None:
        self.name = ""
        self.output: RequestOutput | None = None
        self._worker, self._loop = worker, loop
        self._queue: asyncio.Queue[Delta | EngineStopped] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas until every completion has ended.

        Raises:
            EngineStopped: the engine ended before the request did.
        """
        assert self.output is not None
        left = len(self.output.completions)
        while left:
            found = await self._queue.get()
            if isinstance(found, EngineStopped):
                raise found
            left -= found.finish_reason is not None
            yield found

    async def abort(self, reason: str = "abort") -> None:
        """End it if it is live; its pages are free when this returns. reason: what it counts as."""
        await self._worker.abort(self.name, reason)

    def put(self, found: Delta | EngineStopped) -> None:
        """Called by the worker's thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, found)
        except RuntimeError:  # the loop is closed, nobody reads
            logger.debug("server: nobody reads %s any more", self.name)


class Watcher(Protocol):
    """Looks on, from the worker's thread."""

    def delta(self, output: RequestOutput, delta: Delta) -> None:
        """A completion of a request has gone on, or ended."""

    def ended(self, output: RequestOutput, reason: str, completions: int) -> None:
        """A request was ended from outside, and so many of its completions with it."""


class EngineWorker:
    """Owns an engine.

    waiting: requests in its queue, whatever the engine's own limit; None leaves it at that. watcher: of what it does.
    """

    def __init__(self, engine: Served, waiting: int | None = None, watcher: Watcher | None = None) -> None:
        self._engine, self._waiting, self._watcher = engine, waiting, watcher
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
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
        self._commands.put(_Command(lambda: None, Future()))
        if self._thread.is_alive():
            self._thread.join(seconds)

    async def submit(self, prompt: Any, params: Any, **options: Any) -> Ticket:
        """A request of the engine's (`Engine.submit`). Raises what that raises, and EngineStopped."""
        ticket = Ticket(self, asyncio.get_running_loop())

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
            self._commands.put(_Command(lambda: self._end(ticket.name, "abort"), Future()))
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
        future: Future[Answer] = Future()

        self._commands.put(_Command(command, future))
        if not self.alive:  # it ended in between, and may have looked for the last time
            self._refuse()
        # Whoever asks may be cancelled meanwhile; what was to be done is done all the same.
        return await asyncio.shield(asyncio.wrap_future(future))

    def _refuse(self) -> None:
        """Tell everybody who still waits that nothing will be done."""
        while True:
            try:
                self._commands.get_nowait().refuse()
            except queue.Empty:
                return

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
                ticket.put(EngineStopped("engine: ended before the request did"))
            self._refuse()

    def _obey(self, wait: bool) -> None:
        try:
            first = self._commands.get(timeout=IDLE_SECONDS) if wait else self._commands.get_nowait()
            first.run()
            while True:
                self._commands.get_nowait().run()
        except queue.Empty:
            return

    def _step(self) -> None:
        for delta in self._engine.step():
            ticket = self._tickets.get(delta.request)
            if ticket is not None:
                if self._watcher is not None and ticket.output is not None:
                    self._watcher.delta(ticket.output, delta)
                ticket.put(delta)
        gone = [name for name in self._tickets if name not in self._engine]
        for name in gone:
            del self._tickets[name]


class _Command:
    """Something to do between two steps, and who waits for it."""

    def __init__(self, command: Callable[[], Any], future: Future[Any]) -> None:
        self._command, self._future = command, future

    def run(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._command())
        except BaseException as error:
            self._future.set_exception(error)

    def refuse(self) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(EngineStopped("engine: not running"))
