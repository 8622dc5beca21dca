"""A trace replayed against a pool of given size and policy.

Prompts are looked up and stored, answers are not: a trace names their blocks only in the next turn's prompt, and there
they count as missed and written. What prompts share within a block a trace does not tell. Both make hit rates low.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from rorqual.errors import InputError
from rorqual.layout import KVLayout, bounded_replay
from rorqual.planner.traces.arrivals import Arrivals
from rorqual.planner.traces.pool import Pool, PoolCounts
from rorqual.planner.traces.prompts import Batch, Prompts
from rorqual.planner.traces.request import MICROSECONDS, Request
from rorqual.policies import make

MAX_SECONDS = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """pool_bytes: capacity for global KV. ttl_s: for policy ttl alone. residence_s: how long a session stays in use."""

    pool_bytes: int
    policy: str = "lru"
    ttl_s: float | None = None
    residence_s: float = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """What a trace did to a pool, exactly.

    arrivals, counts: the trace's and the pool's. hits: requests that adopted one. hit_tokens: their tokens, whole
    pages. reused_tokens: those less the W replayed of each hit. pages_read: those of the hits, all of them, since a
    replay rewrites no stored page. sessions_mean: None for a trace of one moment.
    """

    arrivals: Arrivals
    hits: int
    hit_tokens: int
    reused_tokens: int
    pages_read: int
    counts: PoolCounts
    pool_pages: int
    pool_used: int
    sessions_peak: int
    sessions_mean: Fraction | None
    sessions_started: int

    @property
    def hit_rate(self) -> Fraction:
        """Share [1] of prompt tokens found: hit tokens / input tokens."""
        return Fraction(self.hit_tokens, self.arrivals.input_tokens or 1)

    @property
    def reuse_rate(self) -> Fraction:
        """Share [1] of prompt tokens that need not be computed: reused tokens / input tokens."""
        return Fraction(self.reused_tokens, self.arrivals.input_tokens or 1)

    def per_second(self, amount: int) -> Fraction | None:
        """An amount over the span, in its unit a second; None for a trace of one moment."""
        span = self.arrivals.span_us
        return Fraction(amount * MICROSECONDS, span) if span else None


def replay(requests: Iterable[Request], block_tokens: int, layout: KVLayout, settings: ReplaySettings) -> ReplayResult:
    """Replay requests in their order; a hit is whole pages, and counts if it is above W tokens (SPEC 11).

    Args:
        block_tokens: of the trace's format, 0 without hashes.

    Raises:
        InputError: a model without global KV, settings out of range, or what a reader refuses.

    >>> from rorqual.config import presets
    >>> twice = [Request(0, 1300, 9, [1, 2, 3]), Request(1_000_000, 1100, 9, [1, 2, 4])]
    >>> result = replay(twice, 512, KVLayout(presets.load("v4.1-flash")), ReplaySettings(pool_bytes=10**9))
    >>> result.hit_tokens, result.reused_tokens, result.hit_rate, result.counts.written
    (1024, 896, Fraction(32, 75), 10)
    """
    prompts = prompts_of(block_tokens, layout, settings)
    return replay_batches(prompts.batches(requests), prompts, layout, settings)


def prompts_of(block_tokens: int, layout: KVLayout, settings: ReplaySettings) -> Prompts:
    """What takes a trace's requests for a replay under these settings. Units are `Prompts`'; source: the settings.

    Raises:
        InputError: a model without global KV, or a residence time out of range.

    >>> from rorqual.config import presets
    >>> prompts_of(512, KVLayout(presets.load("v4.1-flash")), ReplaySettings(pool_bytes=10**9)).key_pages
    4
    """
    if not layout.page_bytes:
        raise InputError("this model stores no global KV (it has no KV source): a pool would hold nothing")
    return Prompts(block_tokens, layout.page_tokens, _as_us("a residence time", settings.residence_s))


def replay_batches(
    batches: Iterable[Batch], prompts: Prompts, layout: KVLayout, settings: ReplaySettings
) -> ReplayResult:
    """As `replay`, from batches of the prompts that they complete. Units are `ReplayResult`'s; source: the trace.

    Raises:
        InputError: settings out of range, or what a reader refuses.

    >>> from rorqual.config import presets
    >>> layout, settings = KVLayout(presets.load("v4.1-flash")), ReplaySettings(pool_bytes=10**9)
    >>> prompts = prompts_of(512, layout, settings)
    >>> replay_batches(prompts.batches([Request(0, 1300, 9, [1, 2, 3])]), prompts, layout, settings).counts.written
    10
    """
    ttl_us = None if settings.ttl_s is None else _as_us("a time to live", settings.ttl_s)
    pool = Pool(settings.pool_bytes // layout.page_bytes, make(settings.policy, ttl_us), prompts.key_pages)
    window, page = layout.config.sliding_window, layout.page_tokens
    hits = hit_tokens = reused = 0
    for batch in batches:
        for now, keys, pages in batch.prompts():
            pool.at(now)
            found = pool.serve(keys, pages) * page
            if found > window:
                hits += 1
                hit_tokens += found
                reused += found - bounded_replay(found, window)
    arrivals, sessions = prompts.arrivals, prompts.sessions
    return ReplayResult(
        arrivals=arrivals,
        hits=hits,
        hit_tokens=hit_tokens,
        reused_tokens=reused,
        pages_read=hit_tokens // page,
        counts=pool.counts,
        pool_pages=pool.capacity,
        pool_used=pool.used,
        sessions_peak=sessions.peak,
        sessions_mean=sessions.mean(arrivals.first_us),
        sessions_started=sessions.started,
    )


def _as_us(name: str, seconds: float) -> int:
    """A time of settings in whole microseconds."""
    if not MICROSECONDS * seconds >= 1 or seconds > MAX_SECONDS:
        raise InputError(f"{name} must be in seconds, above 0 and up to {MAX_SECONDS:,}; got {seconds:g}")
    return round(MICROSECONDS * seconds)
