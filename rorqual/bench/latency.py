"""What requests waited: the middle of many waits, and what all but one in twenty stayed within."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rorqual.engine.output import RequestOutput

P95 = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Seconds, over `count` requests; p95 is the smallest wait that at least 95 % of them stayed within.

    >>> Latency.of([4.0, 1.0, 2.0, 3.0])
    Latency(median=2.5, p95=4.0, max=4.0, count=4)
    """

    median: float
    p95: float
    max: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        ordered = sorted(seconds)
        rank = math.ceil(P95 * len(ordered))
        return cls(median=median(ordered), p95=ordered[rank - 1], max=ordered[-1], count=len(ordered))


def per_token(output: RequestOutput) -> float:
    """Seconds a token after the first, of a finished request of at least two."""
    found = output.times.per_token(len(output.token_ids))
    assert found is not None, f"{output.request} has {len(output.token_ids)} tokens"
    return found


def first_token(output: RequestOutput, due: float | None = None) -> float:
    """Seconds to the first token, from its arrival at the engine, or from `due` on the engine's clock."""
    assert output.times.first_token is not None, f"{output.request} has no token"
    return output.times.first_token - (output.times.arrived if due is None else due)
