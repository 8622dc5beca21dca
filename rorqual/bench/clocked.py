"""Ops that take the time of their calls: where a decode step's seconds go, by op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
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
    """Seconds and calls of some ops, counted from the last `reset`; `ops` are those that count.

    Args:
        ops: whose calls are timed.
        names: of its ops; None for all of them and for every fused region, named `region.NAME`.
    """

    def __init__(self, ops: Ops, names: tuple[str, ...] | None = READERS) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inside = False
        wanted = [f.name for f in fields(ops) if f.name not in ("name", "regions")] if names is None else names
        timed: dict[str, Any] = {name: self._timed(name, getattr(ops, name)) for name in wanted}
        if names is None and ops.regions is not None:
            parts = {field.name: getattr(ops.regions, field.name) for field in fields(ops.regions)}
            clocked: dict[str, Any] = {name: self._timed(f"region.{name}", part) for name, part in parts.items()}
            timed["regions"] = replace(ops.regions, **clocked)
        self.ops = replace(ops, **timed)

    def reset(self) -> None:
        self.seconds, self.calls = dict.fromkeys(self.seconds, 0.0), dict.fromkeys(self.calls, 0)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.seconds[name], self.calls[name] = 0.0, 0

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # part of a call that is counted already
                return function(*args, **kwargs)
            self._inside, start = True, perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += perf_counter() - start
                self.calls[name] += 1
                self._inside = False

        return timed
