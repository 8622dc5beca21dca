"""The memory plan: an exact inverse of bytes, refusals with shortages, nothing that depends on a length planned for."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import presets
from rorqual.errors import CapacityError, InputError
from rorqual.layout import KVLayout
from rorqual.planner.capacity import (
    MemoryPlan,
    check_prompt,
    longest_prompt,
    plan_memory,
    session_bytes,
    sessions_that_fit,
)
from rorqual.planner.mix import Mix, mean_pages, one_context, parse_mix
from rorqual.planner.padding import PAGES, padding, paddings
from rorqual.planner.storage import row_format, row_formats
from rorqual.planner.workspace import workspace_bytes, workspace_parts

CONFIG = presets.load("v4.1-flash")
RELEASE = KVLayout(CONFIG)
SLOT = 40 * 133 * 528 + 3 * 128 * 528 + 3 * 6 * 2 * 512 * 4 + 8 * 8
PAGE = 128 * 890
NO_KV = KVLayout(CONFIG.without("compression"))

bounded = settings(max_examples=50, deadline=None, derandomize=True)
contexts = st.integers(1, 1_048_576)
mixes = st.lists(st.tuples(contexts, st.integers(1, 100)), min_size=1, max_size=4).map(
    lambda pairs: Mix(parts=tuple((tokens, Fraction(part, sum(p for _, p in pairs))) for tokens, part in pairs))
)
layouts = st.sampled_from([RELEASE, KVLayout(CONFIG, page_tokens=1024, draft_rows=0), NO_KV])


@bounded
@given(layout=layouts, mix=mixes, sessions=st.integers(1, 10_000), kind=st.integers(0, 5))
def test_capacity_is_the_inverse_of_bytes(layout: KVLayout, mix: Mix, sessions: int, kind: int) -> None:
    rows = row_formats(layout)[kind]
    need = session_bytes(layout, mix, sessions, rows)
    assert sessions_that_fit(layout, mix, need, rows) == sessions
    assert sessions_that_fit(layout, mix, need - 1, rows) == sessions - 1


@bounded
@given(layout=layouts, mix=mixes, budget=st.integers(0, 10**11))
def test_a_plan_with_n_sessions_fits_and_n_plus_one_does_not(layout: KVLayout, mix: Mix, budget: int) -> None:
    fixed = {"budget": budget + 1500, "weights": 1000, "workspace": 500}
    fit = sessions_that_fit(layout, mix, budget)
    assert session_bytes(layout, mix, fit) <= budget < session_bytes(layout, mix, fit + 1)
    if fit:
        plan = plan_memory(layout, **fixed, mix=mix)
        assert plan.slots == fit
        assert plan_memory(layout, **fixed, mix=mix, sessions=fit) == plan
        assert plan.total <= plan.budget
        assert plan.spare < (plan.page_bytes or layout.sequence_bytes_allocated)
        assert plan.pages >= layout.pages(mix.longest) if plan.page_bytes else plan.pages == 0
    short = session_bytes(layout, mix, fit + 1) - budget
    with pytest.raises(CapacityError, match=rf"short by .*\({short:,} B\) a rank$"):
        plan_memory(layout, **fixed, mix=mix, sessions=fit + 1)


@bounded
@given(tokens=contexts, more=st.integers(0, 10_000), sessions=st.integers(1, 1000))
def test_bytes_grow_with_context_and_with_sessions(tokens: int, more: int, sessions: int) -> None:
    one, longer = one_context(tokens), one_context(min(tokens + more, 1_048_576))
    assert session_bytes(RELEASE, one, sessions) <= session_bytes(RELEASE, longer, sessions)
    assert session_bytes(RELEASE, one, sessions) < session_bytes(RELEASE, one, sessions + 1)


def test_bytes_of_sessions_by_hand() -> None:
    """Field case 2: a step function of whole pages."""
    assert RELEASE.sequence_bytes_allocated == SLOT == 3_085_504
    wanted = {1: 1, 128: 1, 129: 2, 10**6: 7813}
    for tokens, pages in wanted.items():
        assert session_bytes(RELEASE, one_context(tokens), 1) == SLOT + pages * PAGE
        assert session_bytes(RELEASE, one_context(tokens), 7) == 7 * (SLOT + pages * PAGE)
    assert session_bytes(RELEASE, one_context(1), 0) == 0
    # No global KV: slots alone.
    assert session_bytes(NO_KV, one_context(10**6), 3) == 3 * NO_KV.sequence_bytes_allocated


def test_a_mix_counts_its_mean_and_holds_its_longest() -> None:
    mix = parse_mix("4Ki:70,128Ki:25,1Mi:5")
    # 0.7 x 32 + 0.25 x 1,024 + 0.05 x 8,192 = 22.4 + 256 + 409.6 pages.
    assert mean_pages(RELEASE, mix) == 688
    assert session_bytes(RELEASE, mix, 100) == 100 * SLOT + 68_800 * PAGE
    # One session may be the longest, so the pool is never smaller than that.
    assert session_bytes(RELEASE, mix, 1) == SLOT + 8192 * PAGE
    assert session_bytes(RELEASE, mix, 12) == 12 * SLOT + 12 * 688 * PAGE  # 8,256 pages
    assert parse_mix("100:1") == one_context(100)
    assert parse_mix(" 4Ki : 0.5 , 1M:0.5").parts == ((4096, Fraction(1, 2)), (10**6, Fraction(1, 2)))


@pytest.mark.parametrize(
    "text", ["", "4Ki", "4Ki:", "4Ki:0", "4Ki:-1", "4Ki:70,", "x:1", "0:1", "4Ki:1/0", "4Ki:nan", "4Ki:1e999"]
)
def test_illegal_mixes(text: str) -> None:
    with pytest.raises(InputError, match=r"^--mix must (be|have)"):
        parse_mix(text)


@pytest.mark.parametrize("length", [4096, 131_072, 1_000_000])
def test_bytes_a_token_do_not_depend_on_the_length_planned_for(length: int) -> None:
    """Field case 1: 100 sessions of 4,096 tokens cost the same whatever the model could hold."""
    layout = KVLayout(CONFIG.replace(max_position_embeddings=length))
    plan = plan_memory(layout, budget=10**10, weights=0, workspace=0, mix=one_context(4096), sessions=100)
    assert (plan.slot_bytes, plan.page_bytes, plan.page_bytes // plan.page_tokens) == (SLOT, PAGE, 890)
    assert plan.pages == (10**10 - 100 * SLOT) // PAGE
    # Planned for sessions of that very length: fewer slots, and each token costs what it did.
    at_length = plan_memory(layout, budget=10**10, weights=0, workspace=0, mix=one_context(length))
    assert Fraction(at_length.pages_bytes, at_length.pool_tokens) == 890
    assert at_length.slot_bytes == SLOT


def test_host_and_disk_are_beside_and_never_inside() -> None:
    """Field case 3, on the plan itself."""
    fixed = {"budget": 10**10, "weights": 10**9, "workspace": 10**8}
    plain = plan_memory(RELEASE, **fixed, mix=one_context(131_072))
    pooled = plan_memory(RELEASE, **fixed, mix=one_context(131_072), host_bytes=10**12, disk_bytes=10**13)
    assert (pooled.total, pooled.slots, pooled.pages) == (plain.total, plain.slots, plain.pages)
    assert (pooled.host_bytes, pooled.disk_bytes) == (10**12, 10**13)


def test_a_plan_without_contexts_gives_all_but_the_slots_to_pages() -> None:
    plan = plan_memory(RELEASE, budget=10**9, weights=5, workspace=6, sessions=100)
    assert plan.slots == 100
    assert plan.pages == (10**9 - 11 - 100 * SLOT) // PAGE
    assert plan.total == 11 + 100 * SLOT + plan.pages * PAGE
    assert plan_memory(RELEASE, budget=3 * SLOT + PAGE, weights=0, workspace=0, sessions=3).pages == 1
    with pytest.raises(CapacityError, match=r"3 sessions \(.*: short by 1 B \(1 B\) a rank"):
        plan_memory(RELEASE, budget=3 * SLOT + PAGE - 1, weights=0, workspace=0, sessions=3)
    bf16 = plan_memory(RELEASE, budget=10**9, weights=0, workspace=0, sessions=1, rows=row_format(RELEASE, "bf16"))
    assert (bf16.page_bytes, bf16.slot_bytes) == (128 * 3200, SLOT + 5704 * (1024 - 528))


def test_what_cannot_fit_is_refused_with_the_shortage() -> None:
    with pytest.raises(
        CapacityError, match=r"^weights of 2 kB .* a workspace of 500 B .*: short by 1.5 kB \(1,500 B\)"
    ):
        plan_memory(RELEASE, budget=1000, weights=2000, workspace=500, sessions=1)
    with pytest.raises(
        CapacityError, match=rf"1 session of 4,096 tokens .*short by .*\({SLOT + 32 * PAGE - 1000:,} B\)"
    ):
        plan_memory(RELEASE, budget=1000, weights=0, workspace=0, mix=one_context(4096))
    with pytest.raises(InputError, match=r"^plan_memory needs contexts"):
        plan_memory(RELEASE, budget=1, weights=0, workspace=0)
    with pytest.raises(InputError, match=r"^--sessions must be 1 or more; got 0"):
        plan_memory(RELEASE, budget=1, weights=0, workspace=0, sessions=0)


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    """Field case 7."""
    plan = plan_memory(RELEASE, budget=SLOT + 10 * PAGE, weights=0, workspace=0, sessions=1)
    assert longest_prompt(RELEASE, plan) == 1280
    check_prompt(RELEASE, plan, 1279)
    check_prompt(RELEASE, plan, 1280, new_tokens=0)
    with pytest.raises(InputError, match=r"1,280 tokens and 1 new one can never fit: the limit is 1,280 .* 10 pages"):
        check_prompt(RELEASE, plan, 1280)
    with pytest.raises(InputError, match=r"1 tokens and 1,280 new ones can never fit"):
        check_prompt(RELEASE, plan, 1, 1280)
    large = plan_memory(RELEASE, budget=10**10, weights=0, workspace=0, sessions=1)
    assert longest_prompt(RELEASE, large) == 1_048_576
    with pytest.raises(InputError, match=r"limit is 1,048,576 tokens, the model's max_position_embeddings"):
        check_prompt(RELEASE, large, 1_048_576)
    endless = plan_memory(NO_KV, budget=10**10, weights=0, workspace=0, sessions=1)
    assert longest_prompt(NO_KV, endless) == 1_048_576
    for tokens, new in ((0, 1), (1, -1)):
        with pytest.raises(InputError, match=r"^a request has 1 prompt token or more"):
            check_prompt(RELEASE, plan, tokens, new)


def test_a_plan_adds_up() -> None:
    plan = MemoryPlan(
        budget=100, weights=40, workspace=10, slots=2, slot_bytes=5, pages=3, page_bytes=8, page_tokens=16
    )
    assert (plan.slots_bytes, plan.pages_bytes, plan.pool_tokens) == (10, 24, 48)
    assert (plan.total, plan.spare) == (84, 16)


def test_padding_by_page_size() -> None:
    mix = parse_mix("100:1,1000:1")
    packed = row_format(RELEASE, "packed")
    by_page = {one.page_tokens: one for one in paddings(RELEASE, mix, packed)}
    assert tuple(by_page) == PAGES
    # Pages of 64: 100 takes 128, 1,000 takes 1,024, so (28 + 24) / 2 tokens are empty of (128 + 1,024) / 2.
    one = by_page[64]
    assert (one.page_bytes, one.worst, one.expected) == (64 * 890, 63 * 890, Fraction(63, 2) * 890)
    assert (one.mix, one.share) == (26 * 890, Fraction(26, 576))
    assert all(one.illegal == "" for one in by_page.values())
    assert all(
        small.worst < large.worst for small, large in zip(by_page.values(), list(by_page.values())[1:], strict=False)
    )
    assert padding(RELEASE, mix, packed, 12).illegal.startswith("page_tokens must be a multiple of 8")
    assert [one.page_tokens for one in paddings(KVLayout(CONFIG, page_tokens=24), mix, packed)][:3] == [16, 24, 32]


def test_workspace_grows_with_the_chunk_and_not_with_the_prompt() -> None:
    small, large = workspace_bytes(CONFIG, 1024), workspace_bytes(CONFIG, 8192)
    fixed = 256 * 129_280 * 4 + 128 * 4 * 5120 * 2
    tile = 256 * 4096 * 4
    # Attention leads: 2 d + q_lora + 2 x heads x c + 2 c + o_groups x o_lora + index queries in bf16, Top-K and blocks.
    attention = 2 * (10_240 + 1280 + 65_536 + 1024 + 8192 + 4096) + 4 * (512 + 2048)
    streams = 2 * 4 * 5120 * 2 + 24 * 4
    assert large == 8192 * (streams + attention) + tile + fixed
    assert large - small == 7168 * (streams + attention)
    assert workspace_bytes(CONFIG, 8192, tp=8) < large
    assert workspace_parts(CONFIG.without("engram", "vision"), 1)["engram"] == 0
    illegal: list[dict[str, Any]] = [{"chunk_tokens": 0}, {"sampled_rows": 0}, {"prefills": 0}, {"tp": 0}]
    for options in illegal:
        with pytest.raises(InputError, match=r"must be 1 or more; got 0$"):
            workspace_bytes(CONFIG, **options)
