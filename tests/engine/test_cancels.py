"""A thousand requests cancelled before, in and after their prefill: nothing is left, and nothing is late."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from engines import assert_clean, engine_of, run
from models import golden, random_ids

from rorqual.engine.engine import Engine
from rorqual.engine.params import SamplingParams

REQUESTS = 1000
LENGTHS = 1, 3, 9, 20, 50


def submit(engine: Engine, draw: Random) -> str:
    params = SamplingParams(
        max_tokens=draw.randrange(1, 6), n=draw.choice((1, 1, 1, 2)), temperature=0.9 * draw.randrange(2), seed=3
    )
    ids = random_ids(draw.choice(LENGTHS), seed=draw.randrange(3))
    return engine.submit(ids, params, priority=draw.randrange(2), salt=str(draw.randrange(3)))


def cancel(engine: Engine, name: str) -> str:
    """Abort a request; what it was doing. Pages that were its own alone are there again when that returns."""
    keys = [f"{name}/{at}" for at in range(len(engine.output(name).completions))]
    held = [key for key in keys if key in engine.kv]
    pages = Counter(page for key in held for page in engine.kv.block_table(key))
    alone = sum(engine.kv.pages.references(page) == count for page, count in pages.items())
    doing = "waiting" if not held else "decoding" if engine.scheduler.track(held[0]).decoding else "prefill"
    before = engine.stats()
    output = engine.abort(name)
    after = engine.stats()
    assert after.slots_free - before.slots_free == len(held)
    assert after.pages_free + after.pages_cached - before.pages_free - before.pages_cached == alone
    assert not any(key in engine.kv or key in engine.scheduler for key in keys) and name not in engine
    assert output.finished and "abort" in {done.finish_reason for done in output.completions}
    engine.check_integrity()
    return f"{doing}, {len(held)} held"


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "drafts"])
def test_a_thousand_cancelled_requests_leave_nothing(speculative: bool) -> None:
    draw = Random(8)
    engine = engine_of(
        golden("fp32-dspark", "fast"), pages=24, slots=5, chunk_tokens=33, max_waiting=12, speculative=speculative
    )
    seen: Counter[str] = Counter()
    for number in range(REQUESTS):
        submit(engine, draw)
        if number % 7 == 0:
            engine.step()
            engine.check_integrity()
        while len(engine.live) > 10 or (engine.live and draw.random() < 0.5):
            seen[cancel(engine, draw.choice(engine.live))] += 1
    run(engine, [engine.output(name) for name in engine.live])
    assert engine.stats().aborted == sum(seen.values()) > REQUESTS // 2
    assert min(seen[f"{doing}, 1 held"] for doing in ("prefill", "decoding")) >= 5, seen
    assert seen["waiting, 0 held"] and seen["decoding, 2 held"], seen
    assert_clean(engine)
