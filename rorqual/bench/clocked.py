"""Ops that take the time of their calls: where a decode step's seconds go, by op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from time import perf_counter
from typing import Any

from rorqual.ops.dispatch import Backend, Ops, Regions

READERS = (
    "index_scores",
    "index_scores_at",
    "topk_lowest",
    "sparse_attention",
    "region.index_choose",
    "region.finish",
)
"""What may cost more with more context; of the regions, `finish` holds attention and all that comes after it."""


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
        names: of its ops, and of its fused regions as `region.NAME`; None for all. Without regions none is counted.
    """

    def __init__(self, ops: Ops, names: tuple[str, ...] | None = READERS) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inside = False
        self.ops = replace(ops, **self._all_timed(ops, "", names))
        if ops.regions is not None:
            self.ops = replace(self.ops, regions=replace(ops.regions, **self._all_timed(ops.regions, "region.", names)))

    def reset(self) -> None:
        self.seconds, self.calls = dict.fromkeys(self.seconds, 0.0), dict.fromkeys(self.calls, 0)

    def _all_timed(self, of: Ops | Regions, prefix: str, names: tuple[str, ...] | None) -> dict[str, Any]:
        functions = {f.name: getattr(of, f.name) for f in fields(of) if f.name not in ("name", "regions")}
        wanted = {name: f for name, f in functions.items() if names is None or f"{prefix}{name}" in names}
        return {name: self._timed(f"{prefix}{name}", function) for name, function in wanted.items()}

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
