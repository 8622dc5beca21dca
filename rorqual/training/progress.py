"""What a person sees of a running training: a live line on a terminal, plain lines elsewhere, both on stderr."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from rorqual.training.metrics import Record

_MEMORY = 50
"""Steps over which the rate that gives the time left is taken."""


class _Console(Console):
    """Where nobody listens any more (a closed pipe) it falls silent; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Reporter:
    """Speaks for one process. A silent one says nothing (ranks above 0). No failure to speak ends a run: a Ctrl-C
    reaches `tee` too, and the run has yet to save."""

    def __init__(self, *, silent: bool = False, interval_s: float = 30.0, console: Console | None = None) -> None:
        """interval_s: between plain lines, where there is no terminal."""
        self._console = console or _Console(stderr=True, quiet=silent, highlight=False, soft_wrap=True)
        self._interval_s = interval_s
        self._shown_s = -float("inf")
        self._times: deque[tuple[int, float]] = deque(maxlen=_MEMORY)
        self._total = 0
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def begin(self, step: int, total: int) -> None:
        """The run stands after `step` of `total` steps."""
        self._total = total
        self._times.append((step, time.monotonic()))
        if self._console.is_terminal and not self._console.quiet:
            columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task(f"step {step} of {total}", total=total, completed=step)
            self._bar.start()

    def step(self, record: Record) -> None:
        """One step is done."""
        now = time.monotonic()
        self._times.append((record["step"], now))
        last = record["step"] == self._total
        if self._bar is None and not last and now - self._shown_s < self._interval_s:
            return
        self._shown_s = now
        line = self._line(record)
        if self._bar is None:
            self.note(line)
        else:
            self._bar.update(self._task, completed=record["step"], description=line)

    def evaluation(self, record: Record) -> None:
        """One evaluation is done."""
        self.note(
            f"step {record['step']}: held out: loss {record['loss']:.4f}, "
            f"{record['bits_per_character']:.4f} bits a character"
        )

    def note(self, text: str) -> None:
        """One line that stays."""
        try:
            self._console.print(text, markup=False)
        except OSError:
            self._console.quiet = True

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, record: Record) -> str:
        return (
            f"step {record['step']} of {self._total}  loss {record['loss']:.4f}  lr {record['lr']:.3g}  "
            f"{record['tokens_per_s']:,.0f} tokens/s  {self._left()} left"
        )

    def _left(self) -> str:
        (first, start), (last, now) = self._times[0], self._times[-1]
        if last == first:
            return "?"
        return duration_text((now - start) / (last - first) * (self._total - last))


def duration_text(seconds: float) -> str:
    """Seconds as `42 s`, `12:05` or `3:12:05`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
