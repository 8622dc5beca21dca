"""What an engine says that it allocates is what it allocates (DESIGN, idea 8)."""

from __future__ import annotations

import pytest
from engines import engine_of
from models import golden, tiny

from rorqual.engine import memory
from rorqual.engine.engine import Engine
from rorqual.engine.memory import asked_bytes, free_bytes
from rorqual.errors import CapacityError, InputError


@pytest.mark.parametrize("slots", [1, 7])
@pytest.mark.parametrize("options", [{}, {"pages": 11}, {"memory": 400 << 20}, {"memory": "1%"}])
def test_the_plan_is_what_the_tensors_take(slots: int, options: dict[str, int | str]) -> None:
    for model in (tiny(), golden()):
        engine = Engine(model, slots=slots, **options)  # type: ignore[arg-type]
        plan, cache = engine.plan, engine.cache
        assert cache.pages.nbytes == plan.pages_bytes and cache.slots.nbytes == plan.slots_bytes
        assert cache.nbytes + plan.weights + plan.workspace == plan.total <= plan.budget
        assert plan.spare < plan.page_bytes or "memory" not in options
        stats = engine.stats()
        assert sum(stats.bytes_by_group.values()) == cache.nbytes
        assert (stats.pages, stats.slots, stats.page_bytes) == (plan.pages, slots, plan.page_bytes)


def test_without_a_word_every_slot_has_the_models_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 8 << 30)
    assert Engine(tiny(), slots=3).plan.pool_tokens == 3 * 1024
    page = tiny().layout.page_bytes
    monkeypatch.setattr(memory, "free_bytes", lambda device: 400 * page)
    assert Engine(tiny(), slots=3).plan.pages == 100


def test_what_does_not_fit_is_refused_with_the_shortage() -> None:
    with pytest.raises(CapacityError, match=r"do not fit a budget of .* short by"):
        Engine(tiny(), memory=1000)
    with pytest.raises(InputError, match="pages: not together with memory"):
        Engine(tiny(), memory="1GiB", pages=3)


@pytest.mark.parametrize("text", ["0%", "101%", "x%", "many", "-5"])
def test_an_unreadable_amount_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="memory"):
        asked_bytes(text, 0, 1000)


def test_free_memory_is_known_here() -> None:
    assert free_bytes(tiny().device) > 1 << 20


def test_an_engine_of_pages_has_those_pages() -> None:
    assert engine_of(tiny(), pages=9).plan.pages == 9
