"""What a quality study compares: every way to run the same weights, and which of two ways a difference is between.

baseline          bf16 caches, every layer on every token
released way      FP4 and FP8 caches, `ced`: what hits, pool and weights are measured against
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rorqual.config import ModelConfig
from rorqual.config.cache_formats import CacheFormats

BASELINE = "bf16 caches, full"
RELEASED = "packed caches, ced"
NEAR_NATS = 0.01
"""How far packed caches and `ced` may be from the baseline, beside two standard errors."""
EXACT_NATS = 1e-3
"""How far the exact replay's mean may be from the cold run's: other chunks round differently, and a rounding may flip a
cache code."""

BF16 = CacheFormats(main="bf16", index_key="bf16", window="bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """How the weights are loaded: cache formats, candidate pool, and the quantised or the plain export."""

    bf16: bool = False
    pool: bool = True
    plain: bool = False

    def config(self, own: ModelConfig) -> ModelConfig:
        """The folder's own config, changed."""
        changed = own.replace(cache=BF16) if self.bf16 else own
        return changed if self.pool else changed.without("candidates")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row. hit: which prefix hit precedes the prefill (a name of HITS)."""

    name: str
    loading: Loading = Loading()
    prefill: str = "ced"
    hit: str | None = None
    replay: str = "bounded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The difference `variant` - `against`, prompt by prompt.

    at_most: the mean may be this much above 0 and two standard errors more, at every length. both: or below it.
    """

    variant: str
    against: str
    at_most: float | None = None
    both: bool = False


Hit = Callable[[int, int, int], int]
"""(prompt tokens, window, page tokens) -> tokens of the hit before it is checked."""

HITS: Mapping[str, Hit] = MappingProxyType(
    {
        "least": lambda _tokens, window, page: (window // page + 1) * page,
        "half": lambda tokens, _window, _page: tokens // 2,
        "all but a window": lambda tokens, window, _page: tokens - window,
        "whole prompt": lambda tokens, _window, _page: tokens,
    }
)
"""Where a hit ends; `hit_tokens` aligns it. "least" is the first page end that is adopted at all."""


def hit_tokens(name: str, tokens: int, window: int, page: int) -> int | None:
    """Tokens of a named hit before a prompt of `tokens`, whole pages; None where none would be adopted.

    >>> [hit_tokens(name, 512, 128, 128) for name in HITS], hit_tokens("half", 200, 128, 128)
    ([256, 256, 384, 512], None)
    """
    hit = HITS[name](tokens, window, page) // page * page
    return hit if window < hit <= tokens else None


def variants(config: ModelConfig, *, plain: bool) -> list[Variant]:
    """Every row that the model can have, the baseline first; rows of one loading stand together.

    plain: there is a plain export beside.
    """
    bf16 = Loading(bf16=True)
    found = [
        Variant(name=BASELINE, loading=bf16, prefill="full"),
        Variant(name="bf16 caches, ced", loading=bf16),
        Variant(name="packed caches, full", prefill="full"),
        Variant(name=RELEASED),
    ]
    if config.kv_source_layer_ids:
        found += [Variant(name=f"hit: {hit}", hit=hit) for hit in HITS]
        found.append(Variant(name="exact replay", hit="all but a window", replay="exact"))
    if config.candidate_source_layer_id >= 0:
        found.append(Variant(name="no candidate pool", loading=Loading(pool=False)))
    if plain:
        found.append(Variant(name="plain weights", loading=Loading(plain=True)))
    return found


def comparisons(measured: Sequence[Variant]) -> list[Comparison]:
    """Every row against the baseline, and where that says more, against the released way."""
    names = [v.name for v in measured]
    found = [
        Comparison(variant="packed caches, full", against=BASELINE, at_most=NEAR_NATS),
        Comparison(variant="bf16 caches, ced", against=BASELINE, at_most=NEAR_NATS),
        Comparison(variant=RELEASED, against=BASELINE),
    ]
    found += [Comparison(variant=v.name, against=RELEASED) for v in measured if v.hit and v.replay == "bounded"]
    if "exact replay" in names:
        found.append(Comparison(variant="exact replay", against=RELEASED, at_most=EXACT_NATS, both=True))
    # Both ask what the released way costs, so it is the one that is subtracted from.
    found += [Comparison(variant=RELEASED, against=n) for n in ("no candidate pool", "plain weights") if n in names]
    told = {BASELINE} | {c.variant for c in found if c.against == BASELINE}
    return found + [Comparison(variant=n, against=BASELINE) for n in names if n not in told]
