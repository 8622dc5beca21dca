"""What a caller gets: deltas while a request runs, and its whole output."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from rorqual.pool.prefix import ID_TYPE

FINISHED = ("stop", "length", "abort", "error")
"""Why a completion ended: eos, a stop token or a stop text; its budget; the caller; a fault, told in `stopped_by`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithms of the model's own probabilities, before temperature, penalties and constraint.

    top: the likeliest tokens and theirs, as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one completion. text: whole characters, none that a stop text may take back.

    finish_reason: one of `FINISHED` with the last delta. stopped_by: the stop text or token, or the fault.
    """

    request: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stopped_by: str | int | None = None


@dataclass(slots=True, kw_only=True)
class Completion:
    """One text. token_ids: with the token that ended it, if one did."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stopped_by: str | int | None = None


@dataclass(slots=True, kw_only=True)
class Counts:
    """What a request cost, all of its completions together.

    prompt, new: tokens. hit: prompt tokens found in the prefix index or in a store. restored: of these, those of pages
    that came from the store. handed: prompt tokens that were computed elsewhere. replayed: of hit or handed, computed
    again for their windows. computed: rows run, replayed and rejected ones included. layer_tokens: rows x layers.
    engram_rows: read of Engram's tables. proposed: drafts verified. accepted: by position, how often draft i stood.
    verifications: steps with drafts. preempted: times that it lost its pages.
    """

    prompt: int = 0
    new: int = 0
    hit: int = 0
    restored: int = 0
    handed: int = 0
    replayed: int = 0
    computed: int = 0
    layer_tokens: int = 0
    engram_rows: int = 0
    proposed: int = 0
    verifications: int = 0
    accepted: list[int] = field(default_factory=list)
    preempted: int = 0

    def verified(self, proposed: int, kept: int) -> None:
        """One verification."""
        self.accepted += [0] * (proposed - len(self.accepted))
        self.verifications, self.proposed = self.verifications + 1, self.proposed + proposed
        for at in range(kept):
            self.accepted[at] += 1

    def add(self, other: Counts) -> None:
        for own in fields(self):
            if own.name != "accepted":
                setattr(self, own.name, getattr(self, own.name) + getattr(other, own.name))
        self.accepted += [0] * (len(other.accepted) - len(self.accepted))
        for at, count in enumerate(other.accepted):
            self.accepted[at] += count


@dataclass(slots=True, kw_only=True)
class Times:
    """Instants of one request in seconds of one clock; None for what has not happened."""

    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def queue(self) -> float | None:
        """Seconds before its first step."""
        return None if self.admitted is None else self.admitted - self.arrived

    @property
    def prefill(self) -> float | None:
        """Seconds from its first step to its first token."""
        return None if self.first_token is None or self.admitted is None else self.first_token - self.admitted

    @property
    def to_first_token(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    def per_token(self, new: int) -> float | None:
        """Seconds a token after the first, of a completion of so many."""
        if self.first_token is None or self.last_token is None or new < 2:
            return None
        return (self.last_token - self.first_token) / (new - 1)


def compact(ids: Iterable[int]) -> array[int]:
    """A prompt's ids in 8 bytes each; a list of Python's integers takes 40, which a long prompt would feel.

    >>> compact([3, 4]).tolist()
    [3, 4]
    """
    return array(ID_TYPE, ids)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request, finished or as far as it is. `text`, `token_ids` and the like are its first completion's.

    prompt_ids: of `compact`, or a view of the tensor that runs; `prompt_token_ids` is the list of them, made anew each
    time.
    """

    request: str
    prompt_ids: array[int] | memoryview
    completions: list[Completion]
    counts: Counts
    times: Times
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.prompt_ids.tolist()

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason
