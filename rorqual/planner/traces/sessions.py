"""How many sessions are alive at once: those with a request within the residence time."""

from __future__ import annotations

from collections import deque
from fractions import Fraction

from rorqual.planner.traces.request import Request
from rorqual.policies import TTL


class Sessions:
    """Sessions alive when each stays for `residence_us` after its last request.

    A request whose parent is alive continues that session and takes its place: a second child of one parent is a
    branch and a session of its own, as is a turn whose parent has gone. Where a trace names no chats, every request is
    a session.
    """

    __slots__ = ("_chats", "_lived_us", "_single", "last_us", "peak", "residence_us", "started")

    def __init__(self, residence_us: int) -> None:
        self._chats: TTL[object] = TTL(residence_us)
        self._single: deque[int] = deque()  # arrivals of requests without a chat
        self._lived_us = 0
        self.residence_us = residence_us
        self.last_us = 0
        self.peak = 0
        self.started = 0

    def arrive(self, now_us: int, request: Request) -> None:
        """Count a request that arrives now; times never run backwards."""
        single, chats = self._single, self._chats
        self.last_us = now_us
        gone = now_us - self.residence_us
        while single and single[0] <= gone:
            single.popleft()
        self._lived_us += self.residence_us
        if request.chat is None:
            self.started += 1
            single.append(now_us)
        else:
            self._take_turn(now_us, request)
        alive = len(single) + len(chats)
        if alive > self.peak:
            self.peak = alive

    def _take_turn(self, now_us: int, request: Request) -> None:
        chats = self._chats
        chats.expire(now_us)
        # A chat that is told twice under one id goes on as well.
        before = request.parent if request.parent in chats else request.chat
        if before in chats:
            # What its last request was promised beyond this moment is promised anew.
            self._lived_us -= self._left(before)
            chats.remove(before)
        else:
            self.started += 1
        if request.chat in chats:
            self._lived_us -= self._left(request.chat)
            chats.remove(request.chat)
        chats.insert(request.chat)

    def _left(self, chat: object) -> int:
        return self.residence_us - (self.last_us - int(self._chats.last_use(chat)))

    def mean(self, first_us: int) -> Fraction | None:
        """Sessions [1] alive on average from the first arrival to the last; None if they are one moment.

        >>> sessions = Sessions(10)
        >>> for now in (0, 5, 20):
        ...     sessions.arrive(now, Request(now, 1, 1))
        >>> sessions.peak, sessions.mean(0)
        (2, Fraction(1, 1))
        """
        span = self.last_us - first_us
        if not span:
            return None
        beyond = sum(self._left(chat) for chat in self._chats)
        beyond += sum(self.residence_us - (self.last_us - arrival) for arrival in self._single)
        return Fraction(self._lived_us - beyond, span)
