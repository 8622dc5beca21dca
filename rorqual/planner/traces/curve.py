"""Hit rate at every pool size, from one pass over a sample of the keys.

Under LRU a key is found if the pages used since its last use, its own included, fit the pool: its stack distance. Keys
are sampled by a hash of their name, all uses of one or none; among the sampled, a distance is the rate times the true
one on average, so distances divided by the rate stand for those of the whole trace. (Spatially hashed sampling with a
fixed rate, and the correction for a sample with too many or too few uses: Waldspurger et al., "Efficient MRC
Construction with SHARDS", FAST 2015.)

A prompt's keys are used deepest first, as `Pool` has it, so a key is never nearer than those before it: every key
found is one of the prompt's first, and hits add up key by key. That a hit of W tokens or fewer is not adopted is in the
weights: the key with which a prompt passes W carries the tokens of those before it, which carry none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from rorqual.errors import InputError
from rorqual.planner.traces.blocks import BlockMap, Keys
from rorqual.planner.traces.request import Request

GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1
SAMPLES = 1 << 19
"""Uses of keys to sample by default; below that the sample is the trace, and the curve exact."""
DIGITS = 10
"""Binary digits of a distance that are kept: bins are 0.1 % wide."""


def sampling_rate(uses: int) -> float:
    """The default rate [1]: the power of two that leaves about `SAMPLES` of `uses` uses of keys. Source: `SAMPLES`.

    >>> sampling_rate(100_000), sampling_rate(24_000_000)
    (1.0, 0.015625)
    """
    halvings = max(0, (uses // SAMPLES).bit_length() - 1)
    if uses > SAMPLES << halvings:
        halvings += 1
    return float(2.0**-halvings)


class Distances:
    """Stack distances of keys of different sizes: a Fenwick tree over the moments of last use.

    Args:
        slots: moments before the tree is packed anew; it grows with the keys that are alive.
    """

    __slots__ = ("_place", "_size", "_slots", "_total", "_tree", "_used")

    def __init__(self, slots: int = 1 << 16) -> None:
        self._slots = slots
        self._tree = [0] * (slots + 1)
        self._used = 0
        self._total = 0
        self._place: dict[int, int] = {}  # in the order of last use
        self._size: dict[int, int] = {}

    def above(self, key: int) -> int | None:
        """Size of all keys used later than this one; None if it was never used.

        >>> distances = Distances()
        >>> for key in (1, 2, 3, 1):
        ...     distances.use(key, 4)
        >>> distances.above(1), distances.above(2), distances.above(9)
        (0, 8, None)
        """
        at = self._place.get(key)
        if at is None:
            return None
        tree, sum_to = self._tree, 0
        while at:
            sum_to += tree[at]
            at &= at - 1
        return self._total - sum_to

    def use(self, key: int, size: int) -> None:
        """Make the key the latest."""
        at = self._place.pop(key, 0)
        if at:
            old = self._size[key]
            self._add(at, -old)
            self._total -= old
        if self._used == self._slots:
            self._pack()
        self._used += 1
        self._place[key] = self._used
        self._size[key] = size
        self._add(self._used, size)
        self._total += size

    def _add(self, at: int, amount: int) -> None:
        tree, slots = self._tree, self._slots
        while at <= slots:
            tree[at] += amount
            at += at & -at

    def _pack(self) -> None:
        """Close the gaps that reused keys left, with room for as many uses again."""
        alive = len(self._place)
        self._slots = max(self._slots, 2 * alive)
        self._used = alive
        tree = [0, *(self._size[key] for key in self._place), *[0] * (self._slots - alive)]
        for at, key in enumerate(self._place, 1):
            self._place[key] = at
        for at in range(1, self._slots + 1):
            up = at + (at & -at)
            if up <= self._slots:
                tree[up] += tree[at]
        self._tree = tree


class Curve:
    """Hit rate as a function of the pool's pages, and its inverse.

    rate: share of keys sampled. sampled: uses of keys in the sample.
    """

    __slots__ = ("_found", "_reach", "input_tokens", "rate", "requests", "sampled")

    def __init__(self, *, rate: float, sampled: int, requests: int, input_tokens: int, gains: dict[int, float]) -> None:
        self.rate = rate
        self.sampled = sampled
        self.requests = requests
        self.input_tokens = input_tokens
        self._reach = sorted(gains)  # pages from which on a gain is had
        self._found = list(accumulate(gains[reach] for reach in self._reach))

    def hit_rate(self, pages: int) -> float:
        """Hit rate [1] of a pool of `pages` pages under LRU; never falls with the size.

        >>> curve = Curve(rate=1.0, sampled=3, requests=2, input_tokens=1000, gains={4: 128, 16: 256})
        >>> curve.hit_rate(3), curve.hit_rate(4), curve.hit_rate(10**9)
        (0.0, 0.128, 0.384)
        """
        at = bisect_right(self._reach, pages)
        return min(1.0, max(0.0, self._found[at - 1] / self.input_tokens)) if at and self.input_tokens else 0.0

    @property
    def ceiling(self) -> float:
        """Hit rate [1] of a pool that never evicts."""
        return self.hit_rate(self.largest)

    @property
    def largest(self) -> int:
        """Pages from which on a larger pool finds no more."""
        return self._reach[-1] if self._reach else 0

    def pages_for(self, hit_rate: float) -> int | None:
        """Pages of the smallest pool with at least this hit rate; None if none has.

        >>> curve = Curve(rate=1.0, sampled=3, requests=2, input_tokens=1000, gains={4: 128, 16: 256})
        >>> curve.pages_for(0.128), curve.pages_for(0.2), curve.pages_for(0.5)
        (4, 16, None)
        """
        for reach in [0, *self._reach]:
            if self.hit_rate(reach) >= hit_rate:
                return reach
        return None


class CurveSample:
    """What one pass gathers for a curve: `add` every prompt in its order, then ask for the `curve`.

    Args:
        block_tokens: of the trace's format. page_tokens: of the model. window: W; hits of W tokens or fewer count 0.
        rate: share of the keys to sample, above 0 and up to 1.

    Raises:
        InputError: a trace without hashes, or a rate out of range.
    """

    __slots__ = (
        "_blocks",
        "_distances",
        "_expected",
        "_gains",
        "_limit",
        "_requests",
        "_sampled",
        "_seen",
        "_window",
        "rate",
    )

    def __init__(self, block_tokens: int, page_tokens: int, window: int, rate: float = 1.0) -> None:
        if not block_tokens:
            raise InputError("the trace has no block ids, so no pool of any size finds anything: there is no curve")
        if not 0 < rate <= 1:
            raise InputError(f"a sampling rate is above 0 and up to 1; got {rate}")
        self.rate = rate
        self._blocks = BlockMap(block_tokens, page_tokens)
        self._distances = Distances()
        self._window = window
        self._limit = int(rate * (1 << 64))
        self._gains: dict[int, float] = {}
        self._requests = self._sampled = self._seen = self._expected = 0

    def add(self, keys: Keys, pages: int) -> None:
        """Look up the sampled keys of a prompt of so many pages, then use them."""
        distances, gains = self._distances, self._gains
        self._requests += 1
        uses, whole = _sample(
            zip(keys, self._blocks.sizes(len(keys), pages), strict=True),
            self._blocks.page_tokens,
            self._window,
            self._limit,
        )
        self._expected += whole
        self._sampled += len(uses)
        for key, size, gain in uses:
            self._seen += gain
            above = distances.above(key)
            if above is not None and gain:
                reach = _rounded(above / self.rate + size)
                gains[reach] = gains.get(reach, 0) + gain / self.rate
        for key, size, _ in reversed(uses):
            distances.use(key, size)

    def curve(self, input_tokens: int) -> Curve:
        """The curve of the prompts so far, which are of so many tokens in all.

        Uses that the sample has too many or too few of are those of a few popular keys, which a small pool finds: they
        are made up for at the smallest distance.
        """
        gains = dict(self._gains)
        nearest = min(gains, default=1)
        gains[nearest] = gains.get(nearest, 0) + self._expected - self._seen / self.rate
        return Curve(
            rate=self.rate,
            sampled=self._sampled,
            requests=self._requests,
            input_tokens=input_tokens,
            gains=gains,
        )


def measure(requests: Iterable[Request], block_tokens: int, page_tokens: int, window: int, rate: float = 1.0) -> Curve:
    """The curve [hit rate at pages] of a whole trace under LRU; arguments and errors as `CurveSample`.

    Unit: 1, at pages. Source: SHARDS, as this module says.

    >>> twice = [Request(0, 1300, 9, [1, 2, 3]), Request(1, 1100, 9, [1, 2, 4])]
    >>> curve = measure(twice, 512, 128, 128)
    >>> curve.hit_rate(3), curve.hit_rate(4) == 512 / 2400, curve.hit_rate(8) == 1024 / 2400
    (0.0, True, True)
    """
    sample = CurveSample(block_tokens, page_tokens, window, rate)
    blocks, input_tokens = BlockMap(block_tokens, page_tokens), 0
    for request in requests:
        sample.add(blocks.keys(request), request.input_tokens // page_tokens)
        input_tokens += request.input_tokens
    return sample.curve(input_tokens)


def _sample(
    keys: Iterable[tuple[int, int]], page_tokens: int, window: int, limit: int
) -> tuple[list[tuple[int, int, int]], int]:
    """(key, pages, tokens that finding it adds to the hit) of the sampled ones of (key, pages); and the tokens of all.

    A multiplicative hash spreads consecutive ids evenly, so a run of them is sampled close to its share.
    """
    uses: list[tuple[int, int, int]] = []
    reached = adopted = 0
    for key, size in keys:
        reached += size * page_tokens
        if key * GOLDEN & WORD < limit:
            uses.append((key, size, reached - adopted if reached > window else 0))
        if reached > window:
            adopted = reached
    return uses, adopted


def _rounded(distance: float) -> int:
    """Up to the next number of `DIGITS` binary digits.

    >>> _rounded(5.0), _rounded(1000.5), _rounded(123_456.0)
    (5, 1001, 123520)
    """
    whole = -int(-distance // 1)
    shift = max(0, whole.bit_length() - DIGITS)
    return -(-whole >> shift) << shift
