"""Many requests through scheduler and runner: what each gets is what it gets alone, over poisoned pages and slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import PAGE, golden, random_ids, tiny
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.engine.runner import Runner
from rorqual.engine.scheduler import Scheduler, SchedulerLimits
from rorqual.engine.sequence import Prompt, new_cache
from rorqual.engine.sequence import Sequence as Single
from rorqual.engine.tokens import Tokens
from rorqual.model.transformer import Transformer
from rorqual.pool.manager import KVManager
from rorqual.pool.prefix import PrefixChain, root_key


class Greedy:
    """The least loop around the two: greedy tokens, and the logits they came of."""

    def __init__(self, model: Transformer, pages: int, slots: int, replay: str = "bounded", **limits: int) -> None:
        layout = model.layout
        cache = KVCache(model.config, layout, pages=pages, slots=slots)
        kv = KVManager(
            pages=pages,
            slots=slots,
            page_tokens=layout.page_tokens,
            window=model.config.sliding_window,
            freed_page=lambda page: cache.pages.poison(torch.tensor([page])),
            freed_slot=cache.slots.poison,
        )
        cache.pages.poison(torch.arange(pages))
        for slot in range(slots):
            cache.slots.poison(slot)

        def replayed(hit: int, length: int, prefill: str) -> int:
            return layout.replay_tokens(hit, replay, prefill, length)

        self.scheduler = Scheduler(kv, replayed, SchedulerLimits(**limits))
        self.runner = Runner(model, cache)
        self.root = root_key("model", layout.page_tokens)
        self.tokens: dict[str, Tokens] = {}
        self.left: dict[str, int] = {}
        self.logits: dict[str, list[Tensor]] = {}
        self.preempted: list[str] = []

    def submit(self, name: str, prompt: Prompt, new: int, **options: Any) -> None:
        chain = PrefixChain(self.root, PAGE)
        chain.extend(prompt.ids.tolist())
        self.scheduler.submit(name, chain, new, **options)
        self.tokens[name], self.left[name], self.logits[name] = Tokens(prompt), new, []

    def step(self) -> bool:
        plan = self.scheduler.step()
        self.preempted += plan.preempted
        outputs = self.runner.run(plan, self.tokens) if plan else []
        for own, output in zip(plan.sequences, outputs, strict=True):
            if own.end < len(self.tokens[own.request]):
                self.scheduler.computed(own)
                continue
            assert output.logits is not None and len(output.logits) == own.logits == 1
            self.logits[own.request].append(output.logits[-1])
            token = int(output.logits[-1].argmax())
            self.tokens[own.request].extend([token])
            self.scheduler.accepted(own, [token])
            self.left[own.request] -= 1
            if not self.left[own.request]:
                self.scheduler.finish(own.request)
        self.scheduler.check_integrity()
        return bool(plan)

    def run(self) -> dict[str, list[int]]:
        while self.step():
            pass
        assert not self.scheduler.running and not self.scheduler.waiting
        return {name: tokens.generated for name, tokens in self.tokens.items()}


def alone(model: Transformer, ids: Tensor, new: int, prefill: str = "ced", chunk: int | None = None) -> list[int]:
    single = Single(model, new_cache(model, len(ids) + new))
    logits = single.prefill(Prompt(ids=ids), mode=prefill, chunk=chunk)[-1].logits
    found: list[int] = []
    for _ in range(new):
        assert logits is not None
        found.append(int(logits[-1].argmax()))
        logits = single.append(torch.tensor(found[-1:])).logits
    return found


def prompts(count: int, lengths: Sequence[int] = (1, 2, 17, 31, 32, 9)) -> dict[str, Tensor]:
    return {str(i): random_ids(lengths[i % len(lengths)], seed=70 + i) for i in range(count)}


@pytest.mark.parametrize("prefill", ["ced", "full"])
@pytest.mark.parametrize("make", [lambda: golden("fp32-text"), lambda: tiny("fast")], ids=["golden", "tiny-fast"])
def test_each_gets_what_it_gets_alone(make: Any, prefill: str) -> None:
    """Prompts of at most 32 tokens: the last bits of longer ones depend on the shapes of their products."""
    model, asked = make(), prompts(8)
    greedy = Greedy(model, pages=40, slots=5, step_tokens=200)
    for name, ids in asked.items():
        greedy.submit(name, Prompt(ids=ids), 9, prefill=prefill)
    found = greedy.run()
    assert found == {name: alone(model, ids, 9, prefill) for name, ids in asked.items()}


def test_chunks_beside_decode_rows_are_chunks_alone() -> None:
    model, asked = golden("fp32-text", "fast"), prompts(4, (60, 3, 47, 90))
    greedy = Greedy(model, pages=32, slots=4, step_tokens=23)
    for name, ids in asked.items():
        greedy.submit(name, Prompt(ids=ids), 6)
    found = greedy.run()
    for name, ids in asked.items():
        assert found[name] == alone(model, ids, 6, chunk=23) or close(greedy, model, name, ids)


def close(greedy: Greedy, model: Transformer, name: str, ids: Tensor) -> bool:
    """Chunks of other sizes have other last bits; where a token differs, the two must have been that near."""
    found, wanted = greedy.tokens[name].generated, alone(model, ids, 6, chunk=23)
    at = next(i for i in range(6) if found[i] != wanted[i])
    row = greedy.logits[name][at]
    return bool((row[found[at]] - row[wanted[at]]).abs() < 1e-3)


@pytest.mark.parametrize("replay", ["bounded", "exact"])
def test_a_hit_takes_over_pages_and_replays(replay: str) -> None:
    model, ids = golden(), random_ids(90, seed=3)
    greedy = Greedy(model, pages=24, slots=2, replay=replay, step_tokens=128)
    greedy.submit("cold", Prompt(ids=ids[:70]), 3)
    greedy.run()
    pool, kv = greedy.runner.cache.pages.pool, greedy.scheduler.kv
    chain = PrefixChain(greedy.root, PAGE)
    chain.extend(ids.tolist())
    adopted = kv.pages.match(chain.keys)
    assert len(adopted) == 4
    before = pool[adopted].clone()
    greedy.submit("hit", Prompt(ids=ids), 3)
    greedy.step()
    track = greedy.scheduler.track("hit")
    assert track.write_floor == 64 and track.window_floor == 64 - model.layout.replay_tokens(64, replay, "ced", 90)
    greedy.run()
    assert torch.equal(pool[adopted], before), "what was stored was written again"
    cold = Single(model, new_cache(model, 96)).prefill(Prompt(ids=ids))[-1].logits
    assert cold is not None
    error = float((greedy.logits["hit"][0] - cold[-1]).abs().max())
    assert error < 1e-3 if replay == "exact" else error < 1.0


def test_the_preempted_go_on_where_they_were() -> None:
    model, asked = golden("fp32-text", "fast"), prompts(3, (20, 21, 22))
    greedy = Greedy(model, pages=8, slots=3, replay="exact", step_tokens=128)
    for name, ids in asked.items():
        greedy.submit(name, Prompt(ids=ids), 40, prefill="full")
    found = greedy.run()
    assert greedy.preempted and "0" not in greedy.preempted
    for name, ids in asked.items():
        if name not in greedy.preempted:
            assert found[name] == alone(model, ids, 40, "full")
        check = Single(model, new_cache(model, 64))
        logits = check.prefill(Prompt(ids=torch.cat((ids, torch.tensor(found[name])))), mode="full", logits_from=0)
        whole = torch.cat([part.logits for part in logits if part.logits is not None])
        got = torch.stack(greedy.logits[name])
        assert float((whole[len(ids) - 1 : -1] - got).abs().max()) < 2e-2


def test_pages_and_slots_all_come_back() -> None:
    model = golden()
    greedy = Greedy(model, pages=16, slots=3, step_tokens=40)
    for name, ids in prompts(12).items():
        greedy.submit(name, Prompt(ids=ids), 3)
    for name in ("0", "4", "7"):
        greedy.step()
        if name in greedy.scheduler:
            greedy.scheduler.finish(name)
    greedy.run()
    greedy.scheduler.kv.pages.drop_cached()
    assert greedy.scheduler.kv.pages.free == 16 and greedy.scheduler.kv.slots.free == 3
