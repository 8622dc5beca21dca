"""When requests arrive and what they ask for, summed up."""

from __future__ import annotations

from rorqual.planner.traces.request import MICROSECONDS, Request

MINUTE_US = 60 * MICROSECONDS


class Arrivals:
    """Counts and the clock of a trace.

    The clock never runs backwards: a request stamped earlier than one before it arrives with that one, in the order of
    the file, and is counted in `late`. peak_minute: requests of the busiest minute of the trace's clock.
    """

    __slots__ = (
        "_in_minute",
        "_minute",
        "first_us",
        "input_tokens",
        "late",
        "now_us",
        "output_tokens",
        "peak_minute",
        "requests",
    )

    def __init__(self) -> None:
        self.requests = self.input_tokens = self.output_tokens = self.late = 0
        self.first_us = self.now_us = self.peak_minute = 0
        self._minute = self._in_minute = 0

    def add(self, request: Request) -> int:
        """Count a request; the time [us] at which it arrives.

        >>> arrivals = Arrivals()
        >>> [arrivals.add(Request(time, 100, 1)) for time in (5, 9, 7)], arrivals.late, arrivals.peak_minute
        ([5, 9, 9], 1, 3)
        """
        time = request.time_us
        if not self.requests:
            self.first_us = self.now_us = time
        self.requests += 1
        self.input_tokens += request.input_tokens
        self.output_tokens += request.output_tokens
        if time < self.now_us:
            self.late += 1
            time = self.now_us
        self.now_us = time
        minute = time // MINUTE_US
        if minute != self._minute:
            self._minute, self._in_minute = minute, 0
        self._in_minute += 1
        if self._in_minute > self.peak_minute:
            self.peak_minute = self._in_minute
        return time

    @property
    def span_us(self) -> int:
        """From the first arrival to the last [us]."""
        return self.now_us - self.first_us
