"""Field case 60 and its kind: a pool against a model block by block, hand-made traces."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import presets
from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.traces.blocks import BlockMap
from rorqual.planner.traces.pool import Pool, Segment
from rorqual.planner.traces.replay import ReplayResult, ReplaySettings, replay
from rorqual.planner.traces.request import Request
from rorqual.planner.traces.sessions import Sessions
from rorqual.policies import make

RELEASE = KVLayout(presets.load("v4.1-flash"))
PAGE = 113_920
BOUNDED = settings(max_examples=50, deadline=None, derandomize=True)


def prompt(tokens: int, *ids: int, at: int = 0) -> Request:
    return Request(at, tokens, 1, list(ids))


def run(
    trace: Sequence[Request],
    block: int,
    pages: int,
    layout: KVLayout = RELEASE,
    policy: str = "lru",
    ttl: float | None = None,
) -> ReplayResult:
    options = ReplaySettings(pool_bytes=pages * layout.page_bytes, policy=policy, ttl_s=ttl)
    return replay(trace, block, layout, options)


# The pool against a model block by block


class NaivePool:
    """Every block with its uses and the moment of its last; the victim is found by looking at all of them."""

    def __init__(self, capacity: int, name: str, ttl: int) -> None:
        self.capacity, self.name, self.ttl = capacity, name, ttl
        self.held: dict[int, tuple[int, int, int, int]] = {}  # uses, serial, depth, time
        self.pages: dict[int, int] = {}
        self.serial = self.written = self.evicted = self.expired = 0

    @property
    def used(self) -> int:
        return sum(self.pages[key] for key in self.held)

    def serve(self, keys: list[int], sizes: list[int], now: int) -> int:
        self.pages.update(zip(keys, sizes, strict=True))
        if self.name == "ttl":
            for key in [key for key, (*_, used) in self.held.items() if now - used >= self.ttl]:
                self.expired += self.pages[key]
                del self.held[key]
        while sum(self.pages[key] for key in keys) > self.capacity:
            keys = keys[:-1]
        found = 0
        while found < len(keys) and keys[found] in self.held:
            found += 1
        need = sum(self.pages[key] for key in keys[found:])
        self.written += need
        while self.used + need > self.capacity:
            victim = min(self.held.keys() - set(keys[:found]), key=self.rank)
            self.evicted += self.pages[victim]
            del self.held[victim]
        self.serial += 1
        for depth, key in enumerate(keys):
            self.held[key] = (self.held.get(key, (0,))[0] + 1, self.serial, depth, now)
        return sum(self.pages[key] for key in keys[:found])

    def rank(self, key: int) -> tuple[int, int, int]:
        uses, serial, depth, _ = self.held[key]
        return (uses if self.name == "lfu" else 0, serial, -depth)


def chain(branches: Sequence[int], names: dict[tuple[int, ...], int]) -> list[int]:
    """Ids that name their block and all before it."""
    return [names.setdefault(tuple(branches[: n + 1]), len(names)) for n in range(len(branches))]


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=7), st.integers(0, 511), st.integers(0, 3)), min_size=1, max_size=40
)


@BOUNDED
@given(trace=PROMPTS, capacity=st.integers(0, 60), name=st.sampled_from(["lru", "lfu", "ttl"]))
def test_the_pool_equals_the_naive_one(trace: list[tuple[list[int], int, int]], capacity: int, name: str) -> None:
    blocks = BlockMap(512, 128)
    pool = Pool(capacity, make(name, 4 if name == "ttl" else None), blocks.full)
    naive = NaivePool(capacity, name, 4)
    names: dict[tuple[int, ...], int] = {}
    now = 0
    for branches, rest, wait in trace:
        now += wait
        ids = chain([*branches, 2] if rest else branches, names)
        tokens = 512 * len(branches) + rest
        keys = blocks.keys(prompt(tokens, *ids))
        pool.at(now)
        found = naive.serve(keys.tolist(), blocks.sizes(len(keys), tokens // 128), now)
        assert pool.serve(keys, tokens // 128) == found
        pool.check_integrity()
        assert pool.used == naive.used
        assert (pool.counts.written, pool.counts.evicted, pool.counts.expired) == (
            naive.written,
            naive.evicted,
            naive.expired,
        )


def test_a_prompt_larger_than_the_pool_keeps_its_start() -> None:
    pool = Pool(9, make("lru"), 4)
    assert pool.serve(array("q", [1, 2, 3, 4]), 14) == 0
    assert (pool.used, pool.counts.written, pool.counts.evicted) == (8, 8, 0)
    assert pool.serve(array("q", [1, 2, 3]), 12) == 8
    empty = Pool(0, make("lru"), 4)
    assert [empty.serve(array("q", [1, 2]), 8), empty.serve(array("q", [1, 2]), 8), empty.used] == [0, 0, 0]
    # The pages of a prompt without ids are one key, which fits or does not.
    private = Pool(9, make("lru"), 1)
    assert (private.serve(array("q", [1]), 10), private.used) == (0, 0)
    assert (private.serve(array("q", [2]), 9), private.used) == (0, 9)
    with pytest.raises(InputError, match="a pool has 0 pages or more; got -1"):
        Pool(-1, make("lru"), 4)


@BOUNDED
@given(
    trace=st.lists(st.lists(st.integers(0, 5), unique=True, max_size=5), max_size=40),
    name=st.sampled_from(["lru", "lfu", "ttl"]),
)
def test_ids_that_do_not_name_what_precedes_them(trace: list[list[int]], name: str) -> None:
    """No such trace is right, and none may break the pool: what it holds is what was written and is not gone."""
    policy = make(name, 4 if name == "ttl" else None)
    pool = Pool(24, policy, 4)
    for now, ids in enumerate(trace):
        pool.at(now)
        assert 0 <= pool.serve(array("q", ids), 4 * len(ids)) <= 4 * len(ids)
        held: list[Segment] = list(policy)  # type: ignore[arg-type]
        assert pool.used == sum(segment.pages for segment in held) == 4 * sum(len(segment.keys) for segment in held)
        assert pool.used == pool.counts.written - pool.counts.evicted - pool.counts.expired <= 24


# Hand-made traces


def test_a_hit_is_whole_pages_less_the_replay() -> None:
    """Two prompts share blocks 1 and 2: 1,024 tokens are 8 pages, of which the last 128 tokens are computed again."""
    result = run([prompt(1500, 1, 2, 3), prompt(1100, 1, 2, 4)], 512, 100)
    assert (result.hits, result.hit_tokens, result.reused_tokens) == (1, 1024, 1024 - 128)
    assert result.hit_rate == Fraction(1024, 2600)
    assert result.reuse_rate == Fraction(896, 2600)
    assert result.pages_read == 8
    # 4 + 4 + 3 pages at first; 76 tokens beyond the shared blocks are no page.
    assert (result.counts.written, result.pool_used, result.counts.evicted) == (11, 11, 0)


def test_the_same_prompt_again_hits_its_partial_block_too() -> None:
    result = run([prompt(1500, 1, 2, 3)] * 2, 512, 100)
    assert result.hit_tokens == 11 * 128 == 1408


def test_hits_of_the_window_or_less_are_ignored() -> None:
    """Bailian's small blocks: 1 page of 128 found is no hit, 2 pages are."""
    one = run([prompt(128, *range(8)), prompt(400, *range(8), *range(50, 67))], 16, 100)
    assert (one.hits, one.hit_tokens, one.reused_tokens, one.pages_read) == (0, 0, 0, 0)
    # What was found is not written again.
    assert one.counts.written == 1 + 2
    two = run([prompt(256, *range(16)), prompt(400, *range(16), *range(50, 59))], 16, 100)
    assert (two.hits, two.hit_tokens, two.reused_tokens) == (1, 256, 128)
    # 17 shared blocks of 16 are 272 tokens: still 2 pages.
    odd = run([prompt(400, *range(25)), prompt(400, *range(17), *range(50, 58))], 16, 100)
    assert odd.hit_tokens == 256
    # Mooncake: a partial block of 200 tokens found alone is 1 page, not above W.
    assert run([prompt(200, 1), prompt(200, 1)], 512, 100).hits == 0


def test_pages_larger_than_a_block() -> None:
    layout = KVLayout(presets.load("v4.1-flash"), page_tokens=1024)
    result = run([prompt(2000, 1, 2, 3, 4), prompt(2000, 1, 2, 3, 5)], 512, 10, layout)
    # 3 shared blocks are 1,536 tokens: 1 page of 1,024. Each prompt has 1 whole page.
    assert (result.hit_tokens, result.reused_tokens, result.counts.written) == (1024, 896, 1)


def test_least_recently_used_goes_first_and_the_deepest_of_it() -> None:
    """A pool of 4 blocks; a, b and c are prompts of 2 blocks, a new one evicts 2 of the oldest prompt."""
    a, b, c = prompt(1024, 1, 2), prompt(1024, 3, 4), prompt(1024, 5, 6)
    assert run([a, b, a, c, a], 512, 16).hit_tokens == 2 * 1024
    # b was the oldest when c came: gone whole.
    assert run([a, b, a, c, b], 512, 16).hit_tokens == 1024
    # One block is needed: b loses its second, and its first is still of use.
    result = run([a, b, a, prompt(512, 9), b], 512, 16)
    assert result.hit_tokens == 1024 + 512
    assert result.counts.evicted == 4 + 4


def test_lfu_keeps_what_is_used_often() -> None:
    often, once = prompt(1024, 1, 2), [prompt(1024, 2 * n, 2 * n + 1) for n in range(5, 9)]
    trace = [often, often, *once, often]
    assert run(trace, 512, 16, policy="lru").hit_tokens == 1024
    assert run(trace, 512, 16, policy="lfu").hit_tokens == 2 * 1024


def test_lfu_never_drops_what_the_prompt_itself_has_found() -> None:
    """A pool of 3 blocks holds 1, and 8 and 9 used more often; 1 comes back with two more and stays."""
    trace = [prompt(512, 1), *[prompt(1024, 8, 9)] * 5, prompt(1536, 1, 2, 3), prompt(1536, 1, 2, 3)]
    assert run(trace, 512, 12, policy="lfu").hit_tokens == 4 * 1024 + 512 + 1536


def test_lfu_counts_on_where_a_run_of_blocks_splits() -> None:
    """1 and 2 are used four times; 1 is split off with a fifth use. 4, of three, must go before either."""
    trace = [*[prompt(1024, 1, 2)] * 4, *[prompt(512, 4)] * 3, prompt(512, 1), prompt(512, 5), prompt(1024, 1, 2)]
    assert run(trace, 512, 12, policy="lfu").hit_tokens == 3 * 1024 + 2 * 512 + 512 + 1024


def test_ttl_forgets_by_the_trace_clock() -> None:
    times = (0, 9_000_000, 18_999_999, 29_000_000)
    trace = [prompt(1024, 1, 2, at=time) for time in times]
    result = run(trace, 512, 100, policy="ttl", ttl=10)
    # 9 s and 9.999999 s after the last use it is there, 10.000001 s after it is not.
    assert (result.hits, result.counts.expired, result.counts.written) == (2, 8, 16)
    exactly = [prompt(1024, 1, 2, at=time) for time in (0, 10_000_000)]
    assert run(exactly, 512, 100, policy="ttl", ttl=10).hits == 0


def test_without_hashes_nothing_is_shared() -> None:
    result = run([prompt(1000)] * 3, 0, 10)
    assert result.hit_tokens == result.hits == 0
    # 7 whole pages each; a pool of 10 holds one prompt at a time.
    assert (result.counts.written, result.counts.evicted, result.pool_used) == (21, 14, 7)


def test_arrivals_and_late_ones() -> None:
    times = (10_000_000, 20_000_000, 15_000_000, 130_000_000)
    result = run([prompt(100, 1, at=time) for time in times], 512, 1)
    arrivals = result.arrivals
    assert (arrivals.requests, arrivals.input_tokens, arrivals.output_tokens) == (4, 400, 4)
    assert (arrivals.span_us, arrivals.late, arrivals.peak_minute) == (120_000_000, 1, 3)
    assert result.per_second(4) == Fraction(4, 120)
    moment = run([prompt(100, 1)] * 2, 512, 1)
    assert moment.per_second(2) is None
    assert moment.sessions_mean is None


def turn(at: int, chat: object = None, parent: object = None) -> Request:
    return Request(at, 1, 1, [], chat, parent)


def test_sessions_of_chats() -> None:
    """Each stays 10 after its last turn. 1 -> 2 is one session over [0, 18); 3 has a parent that has gone."""
    sessions = Sessions(10)
    for request in (turn(0, 1), turn(5, 7), turn(8, 2, 1), turn(30, 3, 2), turn(40, 9)):
        sessions.arrive(request.time_us, request)
    assert (sessions.started, sessions.peak) == (4, 2)
    # [0, 18), [5, 15), [30, 40) lie in [0, 40].
    assert sessions.mean(0) == Fraction(18 + 10 + 10, 40)


def test_a_branch_is_a_session_of_its_own() -> None:
    sessions = Sessions(100)
    for request in (turn(0, 1), turn(1, 2, 1), turn(2, 3, 1)):
        sessions.arrive(request.time_us, request)
    assert (sessions.started, sessions.peak) == (2, 2)


def test_named_sessions_and_requests_without_a_chat() -> None:
    sessions = Sessions(10)
    for request in (turn(0, "a", "a"), turn(2, "b", "b"), turn(4, "a", "a"), turn(20, "a", "a")):
        sessions.arrive(request.time_us, request)
    # a over [0, 14) and again from 20; b over [2, 12).
    assert (sessions.started, sessions.peak) == (3, 2)
    assert sessions.mean(0) == Fraction(14 + 10, 20)
    single = Sessions(10)
    for time in (0, 0, 5, 10):
        single.arrive(time, turn(time))
    # Those of time 0 leave as the last one comes.
    assert (single.started, single.peak) == (4, 3)
    assert single.mean(0) == Fraction(10 + 10 + 5, 10)


@BOUNDED
@given(steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=2, max_size=30))
def test_sessions_equal_the_union_of_their_stays(steps: list[tuple[int, int]]) -> None:
    sessions, stays, now = Sessions(10), dict[int, list[list[int]]](), 0
    for wait, name in steps:
        now += wait
        sessions.arrive(now, turn(now, name, name))
        mine = stays.setdefault(name, [])
        if mine and now < mine[-1][1]:
            mine[-1][1] = now + 10
        else:
            mine.append([now, now + 10])
    first = steps[0][0]
    spans = [span for mine in stays.values() for span in mine]
    assert sessions.started == len(spans)
    assert sessions.peak == max(sum(a <= t < b for a, b in spans) for t in range(first, now + 1))
    if now > first:
        assert sessions.mean(first) == Fraction(sum(min(b, now) - a for a, b in spans), now - first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fifo"}, "policy must be one of lru, lfu, ttl; got 'fifo'"),
        ({"policy": "ttl"}, "policy ttl needs a time to live"),
        ({"ttl_s": 5.0}, "a time to live is for policy ttl; policy lru has none"),
        ({"policy": "ttl", "ttl_s": 0.0}, "a time to live must be in seconds, above 0 and up to 1,000,000,000; got 0"),
        (
            {"residence_s": float("nan")},
            "a residence time must be in seconds, above 0 and up to 1,000,000,000; got nan",
        ),
        ({"pool_bytes": -1}, "a pool has 0 pages or more; got -1"),
    ],
)
def test_illegal_settings(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"pool_bytes": 0, **options}
    with pytest.raises(InputError) as caught:
        replay([], 512, RELEASE, ReplaySettings(**arguments))  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_model_without_global_kv_has_nothing_to_pool() -> None:
    with pytest.raises(InputError, match="this model stores no global KV"):
        run([], 512, 1, KVLayout(presets.load("v4.1-flash").without("compression")))
