"""Pages that leave an engine for a store and come back to another: the bits of a hit, whatever the store does."""

from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from engine_stores import DictStore, Gate, over
from engines import Forced, all_said, asked, assert_clean, engine_of, run, said
from models import PAGE, golden, random_ids, tiny
from PIL import Image
from torch import Tensor

from rorqual.checkpoint.random import write_random
from rorqual.config import presets
from rorqual.engine.engine import Engine
from rorqual.engine.images import read_images
from rorqual.engine.output import RequestOutput
from rorqual.engine.sampler import Sampler
from rorqual.engine.speculation import Ask, Drafts
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.model.vision.image import image_token_ids
from rorqual.pool.prefix import PrefixChain, root_key
from rorqual.store.interface import PageBytes
from rorqual.store.writer import WriteBehind


@cache
def released() -> Transformer:
    """Random, with the released window and page."""
    folder = Path(mkdtemp(prefix="rorqual-test-")) / "m"
    write_random(presets.load("tiny").without("vision").replace(sliding_window=128), folder, seed=5)
    return load(folder, kernels="fast")


def ask(engine: Engine, ids: Tensor | list[int], new: int = 2, **options: Any) -> RequestOutput:
    """A finished request."""
    return run(engine, [engine.output(engine.submit(ids, asked(new), **options))])[0]


def pages_of(engine: Engine) -> dict[bytes, bytes]:
    """What the index of an engine holds."""
    found = {}
    for page in range(engine.plan.pages):
        key = engine.kv.pages.key(page)
        if key is not None:
            found[key] = bytes(engine.cache.pages.page(page))
    return found


def keys_of(engine: Engine, output: RequestOutput, salt: str = "") -> list[bytes]:
    """Of the full pages of all that a request was fed: its last token was not."""
    page = engine.plan.page_tokens
    chain = PrefixChain(root_key(engine._intake.fingerprint, page, salt), page)
    chain.extend([*output.prompt_token_ids, *output.token_ids][:-1])
    return chain.keys


def told(engine: Engine, ids: Tensor) -> None:
    """A request that the device serves; then a step after the store was told of it."""
    assert engine.restorer is not None
    fetcher = engine.restorer.fetcher
    before = fetcher.turns
    assert ask(engine, ids).counts.restored == 0
    with fetcher._changed:
        assert fetcher._changed.wait_for(lambda: fetcher.turns > before, 60)
    ask(engine, random_ids(5))


@pytest.mark.parametrize(
    ("replay", "prefill", "speculative"),
    [("bounded", "ced", False), ("bounded", "full", True), ("exact", "ced", True), ("exact", "full", False)],
)
def test_restored_is_a_hit(replay: str, prefill: str, speculative: bool) -> None:
    """In another engine over the same store: the bits of a second request in the first one, and the same bytes."""
    model = golden("fp32-dspark", "fast")
    store, ids = DictStore(model), random_ids(90, seed=3)
    engines = [over(store, model, replay=replay, prefill=prefill, speculative=speculative) for _ in range(2)]
    first = ask(engines[0], ids, 9)
    assert pages_of(engines[0]) == store.pages and set(store.pages) == set(keys_of(engines[0], first))
    hit, restored = ask(engines[0], ids, 9), ask(engines[1], ids, 9)
    assert said(hit) == said(restored)
    assert (first.counts.hit, hit.counts.hit, hit.counts.restored) == (0, 80, 0)
    assert restored.counts.restored == restored.counts.hit == 80 and restored.counts.replayed == hit.counts.replayed
    if not speculative:  # how many drafts are verified depends on what a step costs
        assert replace(restored.counts, restored=0) == hit.counts
    # What a bounded replay is followed by has other bits than after a cold prefill, on a device as well.
    held = pages_of(engines[1])
    assert [held[key] == store.pages[key] for key in keys_of(engines[1], restored)[:5]] == [True] * 5
    assert engines[1].stats().counts.restored == 80 and engines[1].stats().store == store.stat()
    for engine in engines:
        assert_clean(engine)


@pytest.mark.parametrize(
    ("first", "shared", "hit"),
    [*((300, n, 0) for n in (0, 127, 128, 129, 255)), (300, 256, 256), (320, 320, 256), (384, 384, 384)],
)
def test_restored_at_the_released_window_and_page(first: int, shared: int, hit: int) -> None:
    """Field cases 8, 11 and 13: whole pages, more than a window of them; what is of no use is not even read."""
    store = DictStore(released())
    one, two = (over(store, released(), pages=8, slots=2, speculative=False) for _ in range(2))
    base = random_ids(first, seed=1)
    ask(one, base)
    own = base if shared == first else torch.cat((base[:shared], random_ids(400 - shared, seed=2)))
    output = ask(two, own)
    assert (output.counts.hit, output.counts.restored, output.counts.replayed) == (hit, hit, 128 if hit else 0)
    assert len(store.asked) == hit // 128
    alone = over(DictStore(released()), released(), pages=8, slots=2, speculative=False)
    ask(alone, base)
    assert said(ask(alone, own)) == said(output)
    assert_clean(two)


def test_a_hit_spans_device_and_store() -> None:
    """What the device has is not read."""
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(120, seed=4)
    one, two = (over(store, model, speculative=False) for _ in range(2))
    for engine, length in ((two, 55), (one, 120)):
        ask(engine, ids[:length])
    store.asked.clear()
    spanning = ask(two, ids)
    assert store.asked == keys_of(two, spanning)[3:7]
    assert (spanning.counts.hit, spanning.counts.restored) == (112, 112 - 48)
    assert said(spanning) == said(ask(one, ids))
    assert_clean(two)


@pytest.mark.parametrize("lost", [0, 1, 2, 4])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_page_that_is_lost_after_its_look_up(lost: int, how: str) -> None:
    """Field cases 55 and 56: the hit is shorter, the rest is computed, and stored again."""
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(90, seed=5)
    one, two = (over(store, model, speculative=False) for _ in range(2))
    chain = keys_of(one, ask(one, ids))[:5]
    wanted = pages_of(one)
    inner = store.get
    store.get = lambda key: (None if how == "gone" else wanted[key][:-1]) if key == chain[lost] else inner(key)  # type: ignore[method-assign]
    output = ask(two, ids, 9)
    hit = 0 if lost < 2 else lost * PAGE  # 16 tokens are one window, and of no use
    assert (output.counts.hit, output.counts.restored) == (hit, hit)
    alone = over(DictStore(model), model, speculative=False)
    if hit:
        ask(alone, ids[: hit + 1])
    assert said(ask(alone, ids, 9)) == said(output)
    assert_clean(two)


def test_nobody_waits_for_the_pages_of_another() -> None:
    """Who comes behind one whose pages are on their way is served, and the first one as soon as they are there."""
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(90, seed=6)
    wanted = said(ask(over(store, model, speculative=False), ids, 9))
    gate, engine = Gate(store), over(store, model, speculative=False, slots=2)
    first = engine.output(engine.submit(ids, asked(9)))
    second = engine.output(engine.submit(random_ids(20, seed=7), asked(9)))
    run(engine, [second])
    assert gate.entered.is_set() and not first.token_ids and engine.state(first.request) == "waiting"
    gate.open()
    run(engine, [first])
    assert first.counts.restored == 80 and first.token_ids[:2] == wanted[0][:2]
    assert_clean(engine)


def test_a_store_that_does_not_answer_is_waited_for_once() -> None:
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(90, seed=6)
    ask(over(store, model, speculative=False), ids)
    gate, engine = Gate(store), over(store, model, speculative=False, clock=itertools.count().__next__)
    assert engine.restorer is not None
    engine.restorer.patience = 20
    first = ask(engine, ids, 9)
    assert first.counts.restored == first.counts.hit == 0 and len(first.token_ids) == 9
    waited = engine.stats().steps
    engine.drop_cached()
    second = ask(engine, ids, 9)
    assert second.counts.restored == 0 and engine.stats().steps - waited == 9, "a step a token, none spent waiting"
    gate.open()
    while not engine.restorer.fetcher.turns:
        pass
    engine.drop_cached()
    engine.restorer.patience = 10**9
    assert ask(engine, ids, 9).counts.restored == 80
    assert said(first) == said(second)
    assert_clean(engine)


def test_a_medium_that_stands_still_delays_nobody() -> None:
    """Pages wait for it in a queue; what the queue has no room for is dropped, and every token comes."""
    model = tiny("fast")
    behind, opened = DictStore(model), threading.Event()
    inner, kept = behind.put, []

    def put(key: bytes, page: PageBytes) -> bool:
        assert opened.wait(60)
        kept.append(key)
        return inner(key, page)

    behind.put = put  # type: ignore[method-assign]
    store = WriteBehind(behind, queue_bytes=3 * behind.identity.page_bytes)
    engine, ids = engine_of(model, store=store, speculative=False), random_ids(90, seed=6)
    output = ask(engine, ids, 30)
    assert len(output.token_ids) == 30 and not behind.pages
    assert (store.stat().pages, store.stat().dropped) == (3, 4)
    opened.set()
    store.flush()
    assert kept == keys_of(engine, output)[:3] == list(behind.pages)
    # The next request with this prefix is told to the store, which is offered then what it lacks.
    told(engine, ids)
    store.flush()
    assert set(behind.pages) == set(keys_of(engine, output)[:5])
    store.close()


@pytest.mark.parametrize("again", [False, True])
def test_an_abort_while_pages_are_on_their_way(again: bool) -> None:
    """Nothing is held for it, and the next request of its name has fetches of its own."""
    model = tiny("fast")
    store, ids, others = DictStore(model), random_ids(90, seed=6), random_ids(70, seed=8)
    one = over(store, model, speculative=False)
    wanted = [said(ask(one, own)) for own in (ids, others)]
    gate, engine = Gate(store), over(store, model, speculative=False)
    assert engine.restorer is not None
    engine.submit(ids, asked(2), request="mine")
    engine.step()
    assert gate.entered.wait(60)
    engine.abort("mine")
    assert not engine.has_work and not engine.restorer.fetcher.held
    if again:
        output = engine.output(engine.submit(others, asked(2), request="mine"))
    gate.open()
    if again:
        run(engine, [output])
        assert output.counts.restored == 64 and output.token_ids[:1] == wanted[1][0][:1]
    assert_clean(engine)
    assert not engine.restorer.fetcher.held


def test_tenants_share_nothing_in_a_store() -> None:
    """Field case 52: A and B never share a page, A and A do."""
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(70, seed=4)
    found = []
    for salt in ("A", "B", "A", "B", ""):
        output = ask(over(store, model, speculative=False), ids, salt=salt)
        found.append((output.counts.hit, output.counts.restored))
    assert found == [(0, 0), (0, 0), (64, 64), (64, 64), (0, 0)]
    assert len(store.pages) == 3 * 4


def test_images_in_a_store() -> None:
    """Field case 16: two of one size do not share, the same one does."""
    model = tiny("fast")
    store, tail = DictStore(model), random_ids(30, seed=3)
    pictures = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    spans = [image_token_ids(image.grid, model.config.image_token_id) for image in read_images(model, pictures)]
    outputs = []
    for at in (0, 1, 0):
        engine = over(store, model, speculative=False)
        outputs.append(ask(engine, torch.cat((spans[at], tail)), 4, images=[pictures[at]]))
    assert [output.counts.restored for output in outputs[:2]] == [0, 0]
    assert outputs[2].counts.restored == outputs[2].counts.hit > 0
    (hit,) = [ask(engine, torch.cat((spans[0], tail)), 4, images=[pictures[0]])]
    assert hit.counts.restored == 0 and said(hit) == said(outputs[2])


def test_only_what_was_accepted_gets_out() -> None:
    """Field case 33a: drafts that fill a page and are rejected, and twins of a page, never reach the store."""
    model = golden("fp32-dspark", "fast")
    store = DictStore(model)
    engine = over(store, model, slots=4)
    assert engine.speculator is not None
    width = engine.speculator.width

    def wrong(asks: list[Ask], rows: int) -> list[Drafts]:
        return [Drafts(ids=[5] * min(width, ask.room)) for ask in asks]

    engine.speculator.propose = wrong  # type: ignore[method-assign, assignment]
    prompts = [random_ids(length, seed=1) for length in (40, 40, 45)]
    names = [engine.submit(ids, asked(24)) for ids in prompts]
    outputs = run(engine, [engine.output(name) for name in names])
    assert engine.stats().counts.proposed > 50
    allowed = {key for output in outputs for key in keys_of(engine, output)}
    assert store.pages.keys() == allowed and store.pages == pages_of(engine)


def test_logits_of_a_prompt_are_computed() -> None:
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(90, seed=6)
    ask(over(store, model, speculative=False), ids)
    engine = over(store, model, speculative=False)
    (output,) = run(engine, [engine.output(engine.submit(ids, asked(2, prompt_logprobs=0)))])
    assert output.counts.hit == 0 and not store.asked and output.prompt_logprobs is not None


@pytest.mark.parametrize("how", ["preempt", "rewind"])
def test_who_lost_its_pages_gets_them_from_the_store(how: str) -> None:
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(90, seed=6)
    engine = over(store, model, speculative=False, replay="exact", prefill="full")
    output = engine.output(engine.submit(ids, asked(40)))
    while len(output.token_ids) < 30:
        engine.step()
    before = list(output.token_ids)
    if how == "preempt":
        engine.preempt(output.request)
    else:
        engine.rewind(output.request, 10)
    engine.drop_cached()
    run(engine, [output])
    kept = (90 + (30 if how == "preempt" else 10)) // PAGE
    assert len(store.asked) == kept and output.counts.restored == 0
    assert output.token_ids[: 30 if how == "preempt" else 10] == before[: 30 if how == "preempt" else 10]
    assert_clean(engine)


def test_completions_and_forks_over_a_store() -> None:
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(90, seed=6)
    params = asked(6, n=3, temperature=0.8, seed=4)
    found = []
    for _ in range(2):
        engine = over(store, model, speculative=False)
        ask(engine, ids)
        (output,) = run(engine, [engine.output(engine.submit(ids, params))])
        found.append([said(output, at) for at in range(3)])
        engine.drop_cached()
    assert found[0] == found[1]
    engine = over(store, model, speculative=False)
    parent = engine.submit(ids, asked(9))
    child = engine.fork(parent)  # of one that waits: it waits too
    outputs = run(engine, [engine.output(name) for name in (parent, child)])
    assert [output.counts.restored for output in outputs] == [80, 0]
    assert said(outputs[0]) == said(outputs[1]) and outputs[1].counts.hit == 80
    assert_clean(engine)


def test_what_the_store_lost_is_offered_again_when_it_is_hit() -> None:
    """A prefix that the device always has is never asked for, and must not be missing after a restart."""
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(90, seed=6)
    engine = over(store, model, speculative=False)
    assert engine.restorer is not None
    ask(engine, ids)
    kept = dict(store.pages)
    assert len(kept) == 5 and store.delete(next(iter(kept)))
    told(engine, ids)
    assert store.pages == kept


def test_a_cache_without_a_page_to_spare() -> None:
    """As many pages as the request needs, all of them cached with something else: no more is evicted than it takes."""
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(95, seed=6)
    wanted = all_said(over(store, model, pages=6, slots=1, speculative=False), [ids, ids], asked(1))
    engine = over(store, model, pages=6, slots=1, speculative=False)
    ask(engine, random_ids(90, seed=9), 6)
    assert engine.stats().pages_free == 1
    output = ask(engine, ids, 1)
    assert output.counts.restored == 80 and said(output) == wanted[1]
    assert engine.stats().evictions == 5
    assert_clean(engine)


def test_one_after_the_other_where_host_memory_is_short() -> None:
    """Each prefix is more than may be held at once; each is restored, whole."""
    model = tiny("fast")
    store, prompts = DictStore(model), [random_ids(90, seed=seed) for seed in (6, 7, 8)]
    one = over(store, model, speculative=False)
    for ids in prompts:
        ask(one, ids)
    engine = over(store, model, speculative=False)
    assert engine.restorer is not None
    engine.restorer.fetcher.most = 3
    outputs = run(engine, [engine.output(engine.submit(ids, asked(2))) for ids in prompts])
    assert [output.counts.restored for output in outputs] == [80] * 3
    assert [said(output) for output in outputs] == [said(ask(one, ids)) for ids in prompts]
    assert not engine.restorer.fetcher.held


def test_a_store_of_another_model_is_told_of_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    ids, store = random_ids(70, seed=4), DictStore(tiny("fast"))
    model = golden("fp32-dspark", "fast")
    with caplog.at_level(logging.WARNING, logger="rorqual"):
        engine = Engine(model, pages=8, slots=1, store=store)
    assert "store: it is of another model or page size" in caplog.text
    ask(engine, ids)
    assert engine.restorer is None and not store.pages and engine.stats().store is None


def test_what_a_sampler_is_forced_to_say_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply's pages are restored as a prompt's are: the second turn of a conversation after a restart."""
    model = tiny("fast")
    store, ids = DictStore(model), random_ids(40, seed=6)
    one = over(store, model, speculative=False)
    name = one.submit(ids, asked(30))
    sampler: Sampler = Forced(random_ids(30, seed=2).tolist())
    one._requests[name].lives[0].sampler = sampler
    (first,) = run(one, [one.output(name)])
    turn = [*ids.tolist(), *first.token_ids, *random_ids(9, seed=8).tolist()]
    output = ask(over(store, model, speculative=False), turn, 9)
    assert output.counts.restored == 69 // PAGE * PAGE and said(output) == said(ask(one, turn, 9))
