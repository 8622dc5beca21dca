"""What an engine shows of itself: totals, the state of its pools, and its last steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rorqual.cache.kv_cache import KVCache
from rorqual.engine.output import Counts
from rorqual.store.interface import StoreStat

RECENT_STEPS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step. rows: of each request, as (key, start, end, drafts). Seconds: of the model, the drafts, and the rest.

    tokens: given to completions. accepted: drafts that stood.
    """

    number: int
    at: float
    sequences: tuple[tuple[str, int, int, int], ...]
    preempted: tuple[str, ...]
    tokens: int
    accepted: int
    plan_seconds: float
    model_seconds: float
    draft_seconds: float
    other_seconds: float

    @property
    def rows(self) -> int:
        return sum(end - start for _, start, end, _ in self.sequences)

    @property
    def seconds(self) -> float:
        return self.plan_seconds + self.model_seconds + self.draft_seconds + self.other_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. bytes_by_group: allocated, of all pages and slots. store: None without one."""

    running: int
    waiting: int
    requests: int
    finished: int
    aborted: int
    steps: int
    preemptions: int
    evictions: int
    pages: int
    pages_free: int
    pages_used: int
    pages_cached: int
    page_bytes: int
    page_tokens: int
    slots: int
    slots_free: int
    bytes_by_group: dict[str, int]
    counts: Counts
    recent: tuple[StepRecord, ...]
    store: StoreStat | None = None


@dataclass(slots=True)
class Log:
    """Totals of what has ended, and the last steps."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    steps: int = 0
    counts: Counts = field(default_factory=Counts)
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))


def bytes_by_group(cache: KVCache) -> dict[str, int]:
    """Allocated bytes: global pages, window rings, draft windows, compressor tails, n-gram history."""
    slots = cache.slots
    return {
        "global": cache.pages.nbytes,
        "window": slots.rings.nbytes,
        "draft window": slots.draft_rings.nbytes,
        "tail": sum(tail.numel() * tail.element_size() for tail in slots.tails),
        "history": slots.history.numel() * slots.history.element_size(),
    }
