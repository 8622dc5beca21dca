"""Planner bytes are allocated bytes: a cache made from a memory plan, tensor by tensor."""

from __future__ import annotations

import pytest

from rorqual.cache.kv_cache import KVCache
from rorqual.config import presets
from rorqual.layout import KVLayout
from rorqual.planner.capacity import plan_memory
from rorqual.planner.mix import one_context


@pytest.mark.parametrize(("preset", "page", "draft_rows"), [("tiny", 16, 5), ("tiny", 128, 0), ("mid", 128, 5)])
def test_a_cache_takes_exactly_what_was_planned(preset: str, page: int, draft_rows: int) -> None:
    config = presets.load(preset) if draft_rows else presets.load(preset).without("drafts")
    layout = KVLayout(config, page_tokens=page, draft_rows=draft_rows)
    plan = plan_memory(layout, budget=4 * 10**6, weights=10**5, workspace=10**5, mix=one_context(300))
    assert plan.slots > 1
    assert plan.pages >= plan.slots * layout.pages(300)
    cache = KVCache(config, layout, pages=plan.pages, slots=plan.slots)
    slots = cache.slots
    tensors = [cache.pages.pool, slots.rings.data, slots.draft_rings.data, slots.history, *slots.tails]
    allocated = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert allocated == plan.slots_bytes + plan.pages_bytes == plan.total - plan.weights - plan.workspace
