"""A cluster whose parcels and pages Mooncake carries: the actors in this process, the master and its pool real ones."""

from __future__ import annotations

import time

from clusters import SECONDS, assert_nothing_held, here, right, run, until
from mooncake_here import needs_mooncake

from rorqual.checkpoint.shipped import passage
from rorqual.engine.params import SamplingParams
from rorqual.store.local_pool import LocalPool

pytestmark = needs_mooncake

CONFIG = """
[model]
replay = "exact"
kernels = "fast"
[prefill]
slots = 4
[decode]
slots = 4
[handover]
transport = "mooncake"
[store]
kind = "mooncake"
"""


def test_parcels_and_pages_by_mooncake() -> None:
    """Two prompts with one beginning; then all workers die, and the second still finds it in the store."""
    params = SamplingParams(max_tokens=12)
    first, second = passage()[:1500], passage()[:1500] + " And then"
    with LocalPool(64 << 20) as pool, here(CONFIG, pool.master) as (front, handles):
        # While no prefill worker has answered, a decode worker computes the prompt.
        until(front, lambda: all(post.up for post in front.posts))
        (output,) = run(front, front.submit(first, params))
        assert output.text == right(first, params).text
        assert output.counts.handed == output.counts.prompt
        whole = output.counts.prompt // front.posts[0].facts.page_tokens
        stores = [handle.actor.store for handle in handles.values()]
        end = time.monotonic() + SECONDS
        while stores[0].stat().puts < whole:
            assert time.monotonic() < end, stores[0].stat()
            time.sleep(0.02)
        stores[0].flush()
        for handle in handles.values():
            handle.kill()
        (output,) = run(front, front.submit(second, params))
        assert output.text == right(second, params).text
        restored = sum(handle.actor.store.stat().hits for handle in handles.values())
        assert restored >= whole
        assert_nothing_held(front)
