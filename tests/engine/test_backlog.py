"""Rows that wait for their draft windows: drafts are those of windows that were fed a row a step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from engines import asked, engine_of, run
from models import random_ids, tiny

from rorqual.engine import backlog
from rorqual.engine.backlog import ROWS, Backlog
from rorqual.engine.draft import Fed
from rorqual.engine.engine import Engine
from rorqual.engine.memory import backlog_bytes
from rorqual.engine.speculation import Ask, Drafts

Proposed = list[tuple[int, list[int], list[float]]]


def rows(slot: int, first: int, count: int) -> Fed:
    return Fed(slot=slot, first=first, hidden=torch.arange(first, first + count)[:, None].float())


def told(batch: Sequence[Fed]) -> list[tuple[int, list[float]]]:
    assert all(own.hidden[0, 0] == own.first for own in batch)
    return [(own.slot, own.hidden[:, 0].tolist()) for own in batch]


def test_rows_wait_and_come_back_in_order() -> None:
    waiting = Backlog()
    for first in range(3):
        assert waiting.add([rows(0, first, 1), rows(1, 10 + 2 * first, 2)]) == ([], [])
    assert told(waiting.take([1, 0, 2])) == [(1, [10, 11, 12, 13, 14, 15]), (0, [0, 1, 2])]
    assert waiting.take([0, 1]) == []


def test_what_is_too_much_is_fed_in_two_batches_the_older_first() -> None:
    waiting = Backlog()
    waiting.add([rows(0, 0, ROWS), rows(1, 0, 3)])
    older, newer = waiting.add([rows(0, ROWS, 1), rows(1, 3, ROWS + 1)])
    assert told(older) == [(0, list(range(ROWS))), (1, [0, 1, 2])]
    assert told(newer) == [(1, list(range(3, 4 + ROWS)))]
    assert told(waiting.take([0, 1])) == [(0, [ROWS])]


def test_a_copy_goes_its_own_way_and_a_new_owner_inherits_nothing() -> None:
    waiting = Backlog()
    waiting.add([rows(0, 0, 2), rows(1, 5, 1)])
    waiting.copy(0, 1)
    waiting.add([rows(1, 2, 1)])
    waiting.drop(0)
    waiting.copy(0, 2)
    assert told(waiting.take([0, 1, 2])) == [(1, [0, 1, 2])]
    waiting.add([rows(3, 7, 1)])
    waiting.copy(0, 3)
    assert waiting.take([3]) == []


def test_rows_that_wait_keep_no_step() -> None:
    waiting, step = Backlog(), torch.zeros(100, 4)
    waiting.add([Fed(slot=0, first=0, hidden=step[5:6])])
    (own,) = waiting.take([0])
    assert own.hidden.untyped_storage().nbytes() == 16


def test_skipped_rows_are_a_fault() -> None:
    waiting = Backlog()
    waiting.add([rows(0, 0, 1)])
    with pytest.raises(AssertionError, match="slot 0 skips rows before 2"):
        waiting.add([rows(0, 2, 1)])


@pytest.mark.parametrize("seed", range(4))
def test_drafts_do_not_depend_on_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks, rewinds, preemption, several completions and slots that change hands, drafts wanted now and then."""
    rested = proposals(seed)
    monkeypatch.setattr(backlog, "ROWS", 0)
    assert rested == proposals(seed)
    assert len(rested) > 20 and any(ids for _, ids, _ in rested)


def proposals(seed: int) -> Proposed:
    """What an engine proposes while requests come, go and are moved about, at moments that `seed` decides."""
    draw, found = random.Random(seed), Proposed()
    engine = engine_of(tiny("fast"), slots=3, clock=itertools.count().__next__)
    assert engine.speculator is not None
    inner = engine.speculator.propose

    def propose(asks: Sequence[Ask], rows: int) -> list[Drafts]:
        drafts = inner(asks, rows)
        found.extend((ask.slot, own.ids, list(own.survivals)) for ask, own in zip(asks, drafts, strict=True))
        return drafts

    engine.speculator.propose = propose  # type: ignore[method-assign]
    engine.speculator.worth.pays = lambda requests, rows: draw.random() < 0.15  # type: ignore[method-assign]
    first = engine.submit(random_ids(9, seed), asked(200))
    both = engine.submit(random_ids(20, seed + 1), asked(200, n=2, seed=3, temperature=1.0))
    steps(engine, draw.randrange(5, 15))
    engine.rewind(first, 2)
    steps(engine, draw.randrange(5, 15))
    engine.preempt(first)
    steps(engine, draw.randrange(8, 20))
    engine.abort(both)
    child = engine.fork(first, None, asked(30))
    late = engine.submit(random_ids(70, seed + 2), asked(30))
    run(engine, [engine.output(name) for name in (first, child, late)])
    return found


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def test_a_plan_counts_what_may_wait() -> None:
    model = tiny()
    with_drafts = [Engine(model, slots=slots, pages=9).plan.workspace for slots in (1, 4)]
    assert with_drafts[1] - with_drafts[0] == 3 * backlog_bytes(model)
    config = model.config
    assert backlog_bytes(model) == 4 * ROWS * len(config.dspark_target_layer_ids) * config.hidden_size > 0
