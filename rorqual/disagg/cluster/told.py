"""What a client was told of one request, whatever runs it took.

A worker may die in the middle of a text. The request then runs anew somewhere else, from its prompt, with the same
seed, and says the same again: what was told already is left out, the rest goes on. Where a run says something else
(`bounded` replay after another hit; SPEC 11) the request ends in an error rather than in a text of two halves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rorqual.engine.output import Completion, Delta, RequestOutput


class Diverged(Exception):
    """A second run says something else than what the client has already."""


@dataclass(slots=True)
class _Again:
    """How far a further run of a completion has come, while it is behind what was told."""

    tokens: int = 0
    text: str = ""


class Told:
    """Of one request. output: filled as a client is told; all of its completions are there from the beginning."""

    def __init__(self, output: RequestOutput) -> None:
        self.output = output
        self._behind: dict[int, _Again] = {}

    def again(self) -> None:
        """What comes from now on is of a new run."""
        self._behind = {
            own.index: _Again() for own in self.output.completions if own.finish_reason is None and own.token_ids
        }

    def take(self, delta: Delta) -> Delta | None:
        """A run's delta as the client's: without what it has, None where that is all of it.

        Raises:
            Diverged: the run does not begin with what the client has.
        """
        own, again = self.output.completions[delta.index], self._behind.get(delta.index)
        if own.finish_reason is not None:
            return None
        fresh = replace(delta, request=self.output.request)
        if again is not None:
            fresh = self._level(fresh, own, again)
        _fill(own, fresh)
        return fresh if fresh.token_ids or fresh.text or fresh.finish_reason is not None else None

    def end(self, reason: str, stopped_by: str | int | None = None) -> list[Delta]:
        """End whatever goes on; the deltas that say so."""
        left = [own for own in self.output.completions if own.finish_reason is None]
        for own in left:
            own.finish_reason, own.stopped_by = reason, stopped_by
        return [
            Delta(
                request=self.output.request,
                index=own.index,
                text="",
                token_ids=(),
                finish_reason=reason,
                stopped_by=stopped_by,
            )
            for own in left
        ]

    def _level(self, delta: Delta, own: Completion, again: _Again) -> Delta:
        """What is new in a delta of a run that is behind."""
        start, had = again.tokens, len(own.token_ids)
        known = max(0, min(had - start, len(delta.token_ids)))
        again.tokens, again.text = start + len(delta.token_ids), again.text + delta.text
        level = again.tokens >= had and again.text.startswith(own.text)
        same_ids = list(delta.token_ids[:known]) == own.token_ids[start : start + known]
        same_text = again.text.startswith(own.text) or own.text.startswith(again.text)
        if not (same_ids and same_text and (level or delta.finish_reason is None)):
            raise Diverged
        if level:
            del self._behind[delta.index]
        return replace(
            delta,
            text=again.text[len(own.text) :],
            token_ids=delta.token_ids[known:],
            logprobs=None if delta.logprobs is None else delta.logprobs[known:],
        )


def _fill(own: Completion, fresh: Delta) -> None:
    own.token_ids += fresh.token_ids
    own.text += fresh.text
    if fresh.logprobs is not None:
        own.logprobs = [*(own.logprobs or ()), *fresh.logprobs]
    own.finish_reason, own.stopped_by = fresh.finish_reason, fresh.stopped_by
