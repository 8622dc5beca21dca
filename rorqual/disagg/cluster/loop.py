"""What a worker steps, in a thread of its own: commands are obeyed between two steps, whoever gives them.

Nothing but the thread touches what is stepped. A step that fails ends the thread, and `failed` is told: a worker then
ends its process, because nobody knows what its cache holds, and Ray starts a fresh one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from rorqual.errors import RorqualError
from rorqual.log import logger

Answer = TypeVar("Answer")
IDLE_SECONDS = 0.5
"""How long an idle thread waits before it looks whether it is to end."""
PAUSE_SECONDS = 0.02
"""Before a step that computes nothing."""


class Stepped(Protocol):
    """An engine, or a prefill worker."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> Any: ...


class Loop:
    """Owns something that is stepped.

    Args:
        stepped: it.
        told: called in the thread with what a step gave.
        failed: called in the thread with what a step raised.
        urgent: a step would compute something; where it would only look whether something is over, there is a pause
            before it. None: every step would.
    """

    def __init__(
        self,
        stepped: Stepped,
        told: Callable[[Any], None],
        failed: Callable[[BaseException], None],
        urgent: Callable[[], bool] | None = None,
    ) -> None:
        self._stepped, self._told, self._failed = stepped, told, failed
        self._urgent = urgent or (lambda: True)
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rorqual-worker", daemon=True)
        self._thread.start()

    def call(self, command: Callable[[], Answer]) -> Future[Answer]:
        """Have the thread do something between two steps."""
        future: Future[Answer] = Future()
        self._commands.put((command, future))
        if not self._thread.is_alive():
            self._refuse()
        return future

    def close(self, seconds: float = 10.0) -> None:
        """End after the step that runs."""
        self._stopping = True
        self._commands.put((lambda: None, Future()))
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._stopping:
                work = self._stepped.has_work
                self._obey(0.0 if work and self._urgent() else PAUSE_SECONDS if work else IDLE_SECONDS)
                if self._stepped.has_work:
                    self._told(self._stepped.step())
        except BaseException as error:
            logger.exception("worker: a step failed")
            self._failed(error)
        finally:
            self._stopping = True
            self._refuse()

    def _obey(self, seconds: float) -> None:
        """Do what was asked for; wait so long for the first of it."""
        try:
            _do(*(self._commands.get(timeout=seconds) if seconds else self._commands.get_nowait()))
            while True:
                _do(*self._commands.get_nowait())
        except queue.Empty:
            return

    def _refuse(self) -> None:
        while True:
            try:
                _, future = self._commands.get_nowait()
            except queue.Empty:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(RorqualError("worker: not running"))


def _do(command: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(command())
    except BaseException as error:
        future.set_exception(error)
