"""What a scheduler hands to a runner: integers that say which rows of which request are computed in one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a request begins whose prompt was computed elsewhere; numbers as of `SequencePlan`.

    kind: `replay`: rows from `start` on are computed again. `streams`: the decoder runs on rows from `start` on, all at
    once. `rings`: nothing is left to run. See `rorqual.engine.handed`.
    """

    kind: str
    start: int
    write_floor: int
    window_floor: int
    decoder_floor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """Rows [start, end) of one request, as `model.step.SequenceStep` takes them.

    reset: the slot is somebody else's yet: it is to stand at `start`, with nothing below, before the step.
    handed: pages and slot are to be filled with what was handed over, of this kind of `Standing`; "" for none.
    shared: its leading pages that hold that already, and are somebody else's too.
    drafts: the last so many rows are proposals to verify.
    new_pages: what its block table grows by in this step; all of it with `reset`.
    restored: tokens below `write_floor` whose pages a store has given for this slot's sequence.
    logits_from: first row whose logits are wanted; `end` where none are.
    write_floor, window_floor, decoder_floor, run_decoder: see `SequenceStep`.
    """

    request: str
    start: int
    end: int
    slot: int
    new_pages: tuple[int, ...] = ()
    reset: bool = False
    handed: str = ""
    restored: int = 0
    shared: int = 0
    drafts: int = 0
    write_floor: int = 0
    window_floor: int = 0
    decoder_floor: int = 0
    run_decoder: bool = True
    logits_from: int

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def encoder_rows(self) -> int:
        """Of the rows, those that enter the model here."""
        return 0 if self.handed in ("streams", "rings") else self.rows

    @property
    def logits(self) -> int:
        """Rows whose logits are wanted, at the end."""
        return self.end - self.logits_from


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. number: counts from 0. preempted: requests that lost slot and pages before it."""

    number: int
    sequences: tuple[SequencePlan, ...]
    preempted: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return sum(plan.rows for plan in self.sequences)

    def __bool__(self) -> bool:
        return bool(self.sequences)
