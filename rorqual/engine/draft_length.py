"""How many drafts are worth verifying: expected tokens over the measured cost of a step.

A draft's survival is the product of the confidences up to it: the chance that it is reached and accepted. A step over R
rows yields one token a request and the survivals of what is verified, and takes base + each x R. The drafts with the
largest survivals are taken while they raise the quotient.

Nothing is lost by it (SPEC 9): a draft's place in that order depends on confidences that were known before the draft
was drawn, its own request's up to it and other requests', so whether it is verified says nothing about which token it
is. Survivals of one request fall with the place, so what is taken of each is a prefix.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

FORGET = 0.98
"""Weight that a measurement keeps after the next one: the last fifty or so count."""
FEW = 4
"""Measurements before which nothing is concluded."""
UNKNOWN = 9.0, 1.0
"""A step's (base, each) before they are known: a row is a tenth of a step of one."""
PROBE = 32
"""Steps without drafts after which they are tried again."""
FAITH = 4.0
"""Drafts that count as having kept what was promised of them, before any was seen."""


class StepCost:
    """Seconds of a step as base + each x rows, fitted to the steps that ran: least squares, older ones counting less.

    >>> cost = StepCost()
    >>> for rows in (1, 6, 2, 12, 1): cost.add(rows, 10 + 2 * rows)
    >>> tuple(round(float(value), 6) for value in cost.line)
    (10.0, 2.0)
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, rows, seconds, rows^2, rows x seconds
        self._count = 0

    def add(self, rows: int, seconds: float) -> None:
        new = 1.0, rows, seconds, rows * rows, rows * seconds
        self._sums = [FORGET * total + value for total, value in zip(self._sums, new, strict=True)]
        self._count += 1

    @property
    def line(self) -> tuple[float, float]:
        """(base, each) in seconds; `UNKNOWN` before enough was seen, where only the quotient means anything."""
        n, rows, seconds, squares, products = self._sums
        spread = n * squares - rows * rows
        if self._count < FEW or spread <= 1e-6 * n * squares:
            return UNKNOWN
        each = (n * products - rows * seconds) / spread
        each = min(max(each, 1e-3 * seconds / rows), seconds / rows)
        return (seconds - each * rows) / n, each

    @property
    def settled(self) -> bool:
        """Enough was seen."""
        return self._count >= FEW

    def seconds(self, rows: int) -> float:
        """Of a step over so many; in proportion to their mean where only one number was seen."""
        _, total, seconds, _, _ = self._sums
        if self.line == UNKNOWN:
            return seconds * rows / total
        base, each = self.line
        return base + each * rows


@dataclass(slots=True)
class Costs:
    """steps: seconds by rows. drafting: seconds by requests that drafts are made for."""

    steps: StepCost = field(default_factory=StepCost)
    drafting: StepCost = field(default_factory=StepCost)


def survivals(confidence_logits: Sequence[float]) -> list[float]:
    """Of each draft, from the logits of the confidences.

    >>> survivals([0.0, 0.0])
    [0.5, 0.25]
    """
    found, product = [], 1.0
    for logit in confidence_logits:
        product *= 1 / (1 + math.exp(-max(logit, -700.0)))
        found.append(product)
    return found


class Calibration:
    """How far survivals come true: drafts accepted over drafts promised, place by place, older ones counting less.

    A drafter's confidences are learned on its texts; on others it may be sure of what is never accepted.

    >>> trust = Calibration()
    >>> for _ in range(200): trust.judge([0.8, 0.2], kept=0)
    >>> [round(value, 2) for value in trust.believed([0.8, 0.2])]
    [0.07, 0.06]
    """

    def __init__(self) -> None:
        self._promised: list[float] = []
        self._kept: list[float] = []

    def judge(self, survivals: Sequence[float], kept: int) -> None:
        """survivals: of the drafts that were verified. kept: how many of them were accepted."""
        for sums in (self._promised, self._kept):
            sums += [0.0] * (len(survivals) - len(sums))
        for at, survival in enumerate(survivals):
            self._promised[at] = FORGET * self._promised[at] + survival
            self._kept[at] = FORGET * self._kept[at] + (at < kept)

    def believed(self, survivals: Sequence[float]) -> list[float]:
        """What is to be expected of drafts of these survivals: in their order, and not rising, as they are."""
        found, bound = [], 1.0
        for at, survival in enumerate(survivals):
            if at < len(self._promised):
                survival *= (FAITH + self._kept[at]) / (FAITH + self._promised[at])
            bound = min(bound, survival)
            found.append(bound)
        return found


def draft_lengths(requests: Sequence[Sequence[float]], rows: int, line: tuple[float, float]) -> list[int]:
    """Drafts of each request to verify.

    Args:
        requests: survivals of each one's drafts.
        rows: of the step without any draft.
        line: of `StepCost`.

    >>> draft_lengths([[0.9, 0.8, 0.1], [0.3, 0.2]], rows=2, line=(9.0, 1.0))
    [2, 1]
    """
    base, each = line
    lengths = [0] * len(requests)
    tokens, seconds = float(rows), base + each * rows
    # Ties go to the earlier request: nothing of a draft may decide.
    queue = [(-own[0], at) for at, own in enumerate(requests) if own]
    heapq.heapify(queue)
    while queue:
        survival, at = -queue[0][0], queue[0][1]
        if survival * seconds <= each * tokens:
            break
        tokens, seconds = tokens + survival, seconds + each
        lengths[at] += 1
        if lengths[at] < len(requests[at]):
            heapq.heapreplace(queue, (-requests[at][lengths[at]], at))
        else:
            heapq.heappop(queue)
    return lengths


class Worth:
    """Whether drafting pays at all: tokens a second with drafts and without, by what was measured so far.

    Drafting costs time whether or not anything of it is verified; with many requests at once it may cost more than it
    gives. What is expected of drafts is the mean of survivals seen, as far as they came true; every `PROBE` steps
    without, they are tried again. Only the past decides, so nothing is lost by it.

    Costs are kept apart by how many requests run, in powers of two: a line through the steps of thirty-two requests
    says little about those of one, and after a busy spell it would be believed for a hundred steps.
    """

    def __init__(self) -> None:
        self._costs: dict[int, Costs] = {}
        self.trust = Calibration()
        self._seen: list[float] = []
        self._rest = 0

    def costs(self, rows: int) -> Costs:
        """Of steps of so many rows without any draft."""
        return self._costs.setdefault(rows.bit_length(), Costs())

    def lengths(self, requests: Sequence[Sequence[float]], rows: int) -> list[int]:
        """Drafts of each request to verify, of survivals that `pays` let be made. Arguments: as `draft_lengths`.

        When they are tried again they are taken at their word: else nothing could come of it.
        """
        self._saw(requests)
        believed = requests if self._rest else [self.trust.believed(own) for own in requests]
        return draft_lengths(believed, rows, self.costs(rows).steps.line)

    def _saw(self, requests: Sequence[Sequence[float]]) -> None:
        for own in requests:
            self._seen += [0.0] * (len(own) - len(self._seen)) if self._seen else list(own)
            for at, survival in enumerate(own):
                self._seen[at] += (1 - FORGET) * (survival - self._seen[at])

    def pays(self, requests: int, rows: int) -> bool:
        """requests: that would have drafts. rows: of the next step without any."""
        costs = self.costs(rows)
        if not self._seen or not (costs.steps.settled and costs.drafting.settled):
            return True
        base, each = costs.steps.line
        expected = self.trust.believed(self._seen)
        lengths = draft_lengths([expected] * requests, rows, (base, each))
        tokens = rows + sum(sum(expected[:length]) for length in lengths)
        drafted = base + each * (rows + sum(lengths)) + costs.drafting.seconds(requests)
        if tokens * (base + each * rows) > rows * drafted:
            self._rest = 0
            return True
        self._rest += 1
        return self._rest % PROBE == 0
