"""Splits for tests: freed pages and slots of both sides are poisoned, and clocks are the test's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from engines import Said, asked, assert_clean, engine_of, said
from models import GOLDENS, PAGE, tiny_folder
from torch import Tensor

from rorqual.disagg.pair import Split
from rorqual.disagg.prefill import PrefillWorker
from rorqual.disagg.transport import InProcess
from rorqual.engine.engine import Engine
from rorqual.engine.output import RequestOutput
from rorqual.model.load import load
from rorqual.model.transformer import Transformer

CHUNK = 48


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@cache
def encoder_of(name: str) -> Transformer:
    """The encoder of a model that tests decode with."""
    if name == "demo":
        return load(None, kernels="fast", part="encoder")
    if name == "tiny-native":
        return load(tiny_folder(), numerics="native", page_tokens=PAGE, kernels="fast", part="encoder")
    return load(GOLDENS / name, page_tokens=PAGE, kernels="fast", part="encoder")


def poisoned(model: Transformer, transport: InProcess, **options: Any) -> PrefillWorker:
    """A prefill worker over poisoned pages and slots."""
    made: list[PrefillWorker] = []
    worker = PrefillWorker(
        model,
        transport,
        freed_page=lambda page: made[0].cache.pages.poison(torch.tensor([page])),
        freed_slot=lambda slot: made[0].cache.slots.poison(slot),
        **{"pages": 64, "slots": 4, "chunk_tokens": CHUNK, **options},
    )
    made.append(worker)
    worker.cache.pages.poison(torch.arange(worker.plan.pages))
    for slot in range(worker.kv.slots.slots):
        worker.cache.slots.poison(slot)
    return worker


def split_of(model: Transformer, **options: Any) -> Split:
    """A split whose two sides are poisoned."""
    made: list[Split] = []

    def page(at: int) -> None:
        made[0].prefill.cache.pages.poison(torch.tensor([at]))

    def slot(at: int) -> None:
        made[0].prefill.cache.slots.poison(at)

    def own_page(at: int) -> None:
        made[0].engine.cache.pages.poison(torch.tensor([at]))

    def own_slot(at: int) -> None:
        made[0].engine.cache.slots.poison(at)

    defaults = {"pages": 64, "slots": 4, "chunk_tokens": CHUNK, "freed_page": own_page, "freed_slot": own_slot}
    split = Split(model, freed=(page, slot), **{**defaults, **options})
    made.append(split)
    for side in (split.engine, split.prefill):
        side.cache.pages.poison(torch.arange(side.plan.pages))
        for at in range(side.kv.slots.slots):
            side.cache.slots.poison(at)
    return split


def finish(split: Split, names: Sequence[str]) -> list[RequestOutput]:
    """Step until these have ended; integrity after each step."""
    while any(name in split for name in names):
        split.step()
        split.check_integrity()
    return [split.output(name) for name in names]


def split_said(split: Split, prompts: Sequence[Tensor], new: int = 8, **options: Any) -> list[Said]:
    """What each of these prompts gets when they are submitted at once."""
    names = [split.submit(ids, asked(new), **options) for ids in prompts]
    outputs = finish(split, names)
    assert all(output.counts.handed == len(ids) for output, ids in zip(outputs, prompts, strict=True))
    return [said(output) for output in outputs]


def joint(model: Transformer, ids: Tensor, new: int = 8, **options: Any) -> Said:
    """What an engine alone says."""
    engine = engine_of(model, slots=1, chunk_tokens=CHUNK, **options)
    name = engine.submit(ids, asked(new))
    output = engine.output(name)
    while not output.finished:
        engine.step()
    return said(output)


def assert_both_clean(split: Split) -> None:
    """Nothing is held on either side once the indices are emptied."""
    split.step()
    assert not split.has_work, (split.prefill.live, split.engine.live)
    assert_clean(split.engine)
    assert_worker_clean(split.prefill)


def assert_worker_clean(worker: PrefillWorker) -> None:
    worker.step()
    worker.check_integrity()
    worker.drop_cached()
    assert not worker.has_work
    assert (worker.kv.pages.free, worker.kv.slots.free) == (worker.kv.pages.pages, worker.kv.slots.slots)


def unhanded(engine: Engine, ids: Tensor, new: int = 8) -> Said:
    """What the same engine says to a prompt that it computes itself."""
    output = engine.output(engine.submit(ids, asked(new)))
    while not output.finished:
        engine.step()
    return said(output)
