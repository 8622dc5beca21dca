"""What the scheduler knows of a request, and in which order requests are served."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rorqual.engine.plan import Standing
from rorqual.pool.prefix import PrefixChain

Same = Callable[[Sequence[int]], int]
"""How many of these pages, from the first on, hold the very bytes that were handed over."""


@dataclass(slots=True, kw_only=True, eq=False)
class Track:
    """One request, in integers.

    id, priority, arrival: as submitted; a lower priority is served earlier, then a lower arrival.
    chain: keys of the tokens known: the prompt, and what was accepted since.
    limit: positions that it may ever have in the cache.
    prefill: "ced" or "full", or "encoder": the decoder never runs.
    logits_from: first prompt position whose logits are wanted (prompt log-probabilities), None for the last known
        token's alone.
    speculative: proposals may be verified.
    computed: positions that stand in the cache; those of a fresh or preempted request are 0.
    proposed: drafts that wait for their verification.
    slot: None while it waits. target: tokens that its prefill has to reach.
    since: the step in which it last began to wait.
    """

    id: str
    priority: int
    arrival: int
    chain: PrefixChain
    limit: int
    prefill: str = "ced"
    logits_from: int | None = None
    speculative: bool = False
    computed: int = 0
    proposed: int = 0
    slot: int | None = None
    target: int = 0
    write_floor: int = 0
    window_floor: int = 0
    decoder_floor: int = 0
    since: int = 0
    told: int = 0
    """Pages that the runner knows of: plans have named them since its slot was given, or a fork has."""
    begun: bool = False
    """A step has reset its slot."""
    copies: int = 0
    """Forks to come at the end of its prefill."""
    standing: Standing | None = None
    """Where it begins, with what was handed over; None once it has, or has lost that."""
    restored: int = 0
    """Tokens below `write_floor` whose pages came from a store."""
    same: Same | None = None
    shared: int = 0
    """Pages that it took over because they are the `same`."""

    @property
    def tokens(self) -> int:
        """Known tokens: prompt and accepted ones."""
        return len(self.chain)

    @property
    def place(self) -> tuple[int, int]:
        """Order among requests: smaller first."""
        return self.priority, self.arrival

    @property
    def decoding(self) -> bool:
        """Only the newest token, and what is proposed after it, is still to be computed."""
        return self.slot is not None and self.computed == self.tokens - 1 and self.tokens > self.target

    def fork(self, child: str, arrival: int, new_tokens: int) -> Track:
        """A request of its own with the same tokens, that holds nothing. Nobody asks for its prompt's logits."""
        return replace(
            self,
            id=child,
            arrival=arrival,
            chain=self.chain.fork(),
            limit=self.tokens + new_tokens - 1,
            logits_from=None,
            slot=None,
            computed=0,
            proposed=0,
            told=0,
            begun=False,
            copies=0,
            standing=None,
            restored=0,
            same=None,
        )


class WaitingQueue:
    """Waiting requests by priority, then arrival; who has waited for `patience` steps goes before everybody.

    >>> from rorqual.pool.prefix import PrefixChain
    >>> def track(name, priority, arrival):
    ...     return Track(id=name, priority=priority, arrival=arrival, chain=PrefixChain(b"", 4), limit=8)
    >>> queue = WaitingQueue(patience=10)
    >>> for at, (name, priority) in enumerate([("late", 5), ("a", 0), ("b", 0)]):
    ...     queue.add(track(name, priority, at), step=0)
    >>> [t.id for t in queue.ordered(step=9)], [t.id for t in queue.ordered(step=10)]
    (['a', 'b', 'late'], ['late', 'a', 'b'])
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._tracks: dict[str, Track] = {}

    def __len__(self) -> int:
        return len(self._tracks)

    def __iter__(self) -> Iterator[Track]:
        return iter(self._tracks.values())

    def __contains__(self, request: str) -> bool:
        return request in self._tracks

    def get(self, request: str) -> Track:
        """The waiting request of that id; KeyError where there is none."""
        return self._tracks[request]

    def add(self, track: Track, step: int) -> None:
        track.since = step
        self._tracks[track.id] = track

    def remove(self, track: Track) -> None:
        del self._tracks[track.id]

    def ordered(self, step: int) -> list[Track]:
        """First to be admitted first. All who are overdue by arrival: among them priorities count no more."""

        def key(track: Track) -> tuple[int, int, int]:
            overdue = step - track.since >= self.patience
            return (0, 0, track.arrival) if overdue else (1, *track.place)

        return sorted(self, key=key)
