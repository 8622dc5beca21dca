"""Engines for tests: freed pages and slots are poisoned, and what a request says is told with its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rorqual.engine.engine import Engine
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.engine.sampler import Sampler
from rorqual.model.transformer import Transformer

Said = tuple[list[int], list[float]]
"""Tokens and the log-probability of each: equal only where the logits are, to the bit."""


class Forced(Sampler):
    """Says given ids, whatever the logits."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(SamplingParams())
        self.ids = ids

    @property
    def plain(self) -> bool:
        return False

    def choose(self, weights_V: Tensor, purpose: int = 0, ahead: int = 0) -> int:
        return self.ids[self.count + ahead]


def engine_of(model: Transformer, *, pages: int = 64, slots: int = 4, **options: Any) -> Engine:
    """An engine over poisoned pages and slots."""
    made: list[Engine] = []
    engine = Engine(
        model,
        pages=pages,
        slots=slots,
        freed_page=lambda page: made[0].cache.pages.poison(torch.tensor([page])),
        freed_slot=lambda slot: made[0].cache.slots.poison(slot),
        **options,
    )
    made.append(engine)
    engine.cache.pages.poison(torch.arange(pages))
    for slot in range(slots):
        engine.cache.slots.poison(slot)
    return engine


def run(engine: Engine, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Step until all have ended; integrity after each step."""
    while not all(output.finished for output in outputs):
        engine.step()
        engine.check_integrity()
    return list(outputs)


def said(output: RequestOutput, completion: int = 0) -> Said:
    found = output.completions[completion]
    assert found.logprobs is not None
    return found.token_ids, [one.logprob for one in found.logprobs]


def all_said(
    engine: Engine, prompts: Sequence[Tensor], params: SamplingParams | Sequence[SamplingParams], **options: Any
) -> list[Said]:
    """What each of these prompts gets when they are submitted at once."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    names = [engine.submit(ids, own, **options) for ids, own in zip(prompts, each, strict=True)]
    return [said(output) for output in run(engine, [engine.output(name) for name in names])]


def asked(new: int = 8, **options: Any) -> SamplingParams:
    """Greedy, eos or not, with log-probabilities."""
    return SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0, **options)


def assert_clean(engine: Engine) -> None:
    """Nothing is held once the index is emptied."""
    engine.drop_cached()
    stats = engine.stats()
    assert (stats.pages_free, stats.slots_free, stats.running, stats.waiting) == (stats.pages, stats.slots, 0, 0)
    assert not engine.has_work
