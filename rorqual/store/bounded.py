"""Calls into a library that waits as long as it likes: whoever asks is let go at a deadline of its own.

A call cannot be stopped from outside. One that is late keeps its thread until the library returns, and keeps alive
what it works on; its result is thrown away. Only when every thread is held by a late call are new ones refused at once,
so a peer that hangs costs each thread one deadline, and after that nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class OverdueError(Exception):
    """No answer by the deadline. Whoever bounds a call says what that means; no user meets this one."""


class _Call:
    __slots__ = ("ended", "error", "result", "state", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] | None = work
        self.ended = threading.Event()
        self.state = "waiting"
        self.result: Any = None
        self.error: BaseException | None = None


class BoundedCalls:
    """`threads` calls at a time, in threads that never keep the process from ending.

    >>> calls = BoundedCalls(2, "example")
    >>> calls.run(lambda: 6 * 7, timeout_s=10)
    42
    >>> calls.close(timeout_s=10)
    True
    """

    def __init__(self, threads: int, name: str) -> None:
        assert threads > 0
        self.threads = threads
        self._changed = threading.Condition()
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._open = self._late = 0
        self._closed = False
        for number in range(threads):
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True).start()

    @property
    def late(self) -> int:
        """Calls past their deadline that have not returned."""
        with self._changed:
            return self._late

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """What `work` returns, or raises.

        Raises:
            OverdueError: it has not ended by then, every thread is held by a late call, or this is closed.
        """
        call = _Call(work)
        with self._changed:
            if self._closed or self._late == self.threads:
                raise OverdueError
            self._open += 1
        self._queue.put(call)
        if not call.ended.wait(timeout_s):
            self._give_up(call)
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def close(self, timeout_s: float) -> bool:
        """Take no more; True where none runs any more after at most `timeout_s`."""
        with self._changed:
            first, self._closed = not self._closed, True
        if first:
            for _ in range(self.threads):
                self._queue.put(None)
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    def _give_up(self, call: _Call) -> None:
        with self._changed:
            if call.ended.is_set():
                return
            if call.state == "running":
                self._late += 1
            call.state = "late"
        raise OverdueError

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            with self._changed:
                wanted = call.state == "waiting"
                if wanted:
                    call.state = "running"
            if wanted:
                self._work(call)
            with self._changed:
                self._open -= 1
                self._late -= wanted and call.state == "late"
                # Under the lock: a caller that gives up sees either the end or a state that counts.
                call.ended.set()
                self._changed.notify_all()
            del call

    @staticmethod
    def _work(call: _Call) -> None:
        try:
            assert call.work is not None
            call.result = call.work()
        except BaseException as error:  # it is the caller's: whatever it is, this thread goes on
            call.error = error
        call.work = None
