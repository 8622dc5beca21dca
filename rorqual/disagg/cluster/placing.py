"""Who answers, what they hold and how much they do, and which of them a job goes to.

A post is a worker as one front sees it. Nothing here decides who is a member: Ray restarts what dies, and a post that
failed once is asked again and again until it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rorqual.disagg.cluster.job import Facts, Holding
from rorqual.disagg.cluster.routing import Candidate, route
from rorqual.engine.stats import EngineStats

HELLO_SECONDS = 0.5
"""Between two calls to a worker that does not answer."""


class Handle(Protocol):
    """How a worker is called."""

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Its answer, or what it raised; an error too where the worker is dead."""

    def begin(self, method: str, *args: Any) -> object:
        """The same, its answer left where it is: something to hand to another worker, which awaits it."""

    def kill(self) -> None:
        """End its process; whoever supervises it starts another."""


@dataclass(slots=True)
class Post:
    """facts: None until it has answered once. up: it answered last time. stats: the last that it told.

    runs: of this front's, placed there and not ended. polling: since when a poll is out. polls: how many were sent.
    due: when it is called next while it is down.
    """

    name: str
    role: str
    handle: Handle
    facts: Facts | None = None
    up: bool = False
    stats: EngineStats | None = None
    runs: set[str] = field(default_factory=set)
    polling: float | None = None
    polls: int = 0
    due: float = 0.0

    def candidate(self, answer: Holding | None) -> Candidate:
        """As `route` sees it. What this front has placed there since the answer is load too."""
        assert self.facts is not None
        held, load = (answer.held, answer.load) if answer else (0, 0)
        return Candidate(name=self.name, held=held, load=max(load, len(self.runs)), slots=self.facts.slots)

    def down(self) -> None:
        """It failed to answer."""
        self.up, self.polling, self.due = False, None, 0.0


@dataclass(slots=True)
class Inquiry:
    """What holds a prefix, asked of everybody at once. missing: who has not answered yet. until: when nobody waits on.

    keys: of the prompt's full pages.
    """

    keys: tuple[bytes, ...]
    until: float
    missing: set[str] = field(default_factory=set)
    answers: dict[str, Holding] = field(default_factory=dict)


class Placing:
    """The posts of one front."""

    def __init__(self, posts: Iterable[Post]) -> None:
        self.posts = {post.name: post for post in posts}

    def of(self, role: str) -> list[Post]:
        """Those of a role that are up."""
        return [post for post in self.posts.values() if post.role == role and post.up]

    def ask(self, keys: Sequence[bytes], until: float, answered: Callable[[str, Future[Any]], None]) -> Inquiry:
        """Ask every post of a role that has more than one. A choice of one needs no asking.

        until: when nobody waits on. answered: called with a post's name and its answer, in whatever thread that comes.
        """
        inquiry = Inquiry(tuple(keys), until)
        asked = [post for role in ("prefill", "decode") if len(own := self.of(role)) > 1 for post in own]
        inquiry.missing = {post.name for post in asked}
        for post in asked:
            future = post.handle.call("holding", inquiry.keys)
            future.add_done_callback(partial(answered, post.name))
        return inquiry

    def choose(self, role: str, inquiry: Inquiry, page_tokens: int, window: int) -> Post | None:
        """The post for a job; None where none of the role is up.

        One that was asked and has not answered is only taken where no other is.
        """
        up = self.of(role)
        willing = [post for post in up if post.name not in inquiry.missing] or up
        if not willing:
            return None
        candidates = [post.candidate(inquiry.answers.get(post.name)) for post in willing]
        return self.posts[route(inquiry.keys, candidates, page_tokens=page_tokens, window=window)]
