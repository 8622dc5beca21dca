"""Ops that take the time of their calls: where a decode step's seconds go, by op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from time import perf_counter
from typing import Any

from rorqual.ops.dispatch import Backend, Ops

READERS = ("index_scores", "index_scores_at", "topk_lowest", "sparse_attention")
"""The ops whose cost may grow with the context."""


class Given(Backend):
    """A backend that serves the ops it is given."""

    def __init__(self, ops: Ops, mode: str = "fast") -> None:
        super().__init__(mode)
        self._given = ops

    def ops(self) -> Ops:
        return self._given


class Clock:
    """Seconds spent in each of some ops. `seconds` counts from the last `reset`."""

    def __init__(self, ops: Ops, names: tuple[str, ...] = READERS) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        timed: dict[str, Any] = {name: self._timed(name, getattr(ops, name)) for name in names}
        self.ops = replace(ops, **timed)

    def reset(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += perf_counter() - start

        return timed
