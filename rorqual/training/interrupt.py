"""Stopping a run: the first Ctrl-C (SIGTERM, a closed terminal) lets it finish its step and save, a second ends it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def stopping_signals() -> list[signal.Signals]:
    """SIGINT, SIGTERM, and SIGHUP unless it is ignored, as `nohup` has it."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


class Interrupt:
    """While entered, `signal` is the number of the signal that asked to stop, 0 before.

    Only the main thread can take signals; entered in another one, it never asks to stop.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.signal = 0
        self._note = note
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in stopping_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        self._note("finishing the step, then saving; once more stops at once")
