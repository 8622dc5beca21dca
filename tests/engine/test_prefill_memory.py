"""Nothing of a prefill grows with the prompt but the cache: the peak of torch's live bytes, counted, at two lengths."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model import indexer
from tests.engine.models import random_ids, tiny


class Counted(TorchDispatchMode):
    """Bytes of the storages that operations inside made and that are still alive; `peak` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self._made(tensor.untyped_storage())
        return out

    def _made(self, storage: torch.UntypedStorage) -> None:
        # A new storage may stand where a dead one stood.
        self.now += storage.nbytes() - self.live.get(storage._cdata, (None, 0))[1]
        self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.now > self.peak:
            self.live = {key: pair for key, pair in self.live.items() if not pair[0].expired()}
            self.now = sum(size for _, size in self.live.values())
            self.peak = max(self.peak, self.now)


def peak_of_prefill(mode: str, tokens: int, chunk: int, kernels: str) -> int:
    model = tiny(kernels)
    sequence = Sequence(model, new_cache(model, tokens))
    with Counted() as counted:
        outputs = sequence.prefill(Prompt(ids=random_ids(tokens, seed=1)), mode=mode, chunk=chunk)
    assert outputs[-1].logits is not None and len(outputs[-1].logits) == 1
    return counted.peak


def test_what_is_counted() -> None:
    with Counted() as counted:
        kept = torch.zeros(1000)
        for _ in range(5):
            kept = kept + torch.ones(1000)
        kept[:10].add_(1)
    assert counted.peak == 3 * 4000


@pytest.mark.parametrize("kernels", ["plain", "fast"])
@pytest.mark.parametrize("mode", ["ced", "full"])
def test_the_peak_is_that_of_a_chunk(mode: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 tokens more would be 294,912 B of hidden states for the draft, were they kept, and 98,304 B a stream.

    Score tiles (of `plain`; `fast` has a kernel for so few) small enough that the shorter prompt fills them, as long
    prompts fill the real ones.
    """
    monkeypatch.setattr(indexer, "GROUP_TILE", 32)
    monkeypatch.setattr(indexer, "ROW_TILE", 64)
    short, long = (peak_of_prefill(mode, tokens, 64, kernels) for tokens in (192, 448))
    assert short > 500_000, "the count misses the prefill"
    assert long <= short + 24_000
    assert peak_of_prefill(mode, 192, 96, kernels) > short + 100_000, "a larger chunk is to be seen"


@pytest.mark.parametrize("mode", ["ced", "full"])
def test_what_a_chunk_gave_is_not_kept(mode: str) -> None:
    """Not even a tensor without rows: a small block kept by every chunk is a hole in the heap of every chunk."""
    model = tiny("fast")
    outputs = Sequence(model, new_cache(model, 200)).prefill(Prompt(ids=random_ids(200, seed=1)), mode=mode, chunk=20)
    passed = [output for output in outputs if output.end <= 200 - model.config.sliding_window]
    assert len(passed) > 4
    assert all(output.logits is None and output.main_hidden is None for output in passed)


def test_one_tile_of_scores_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    scores = indexer.Query._scores

    def watched(query: indexer.Query, rows: slice, groups: tuple[int, int]) -> torch.Tensor:
        assert all(ref() is None for ref in made)
        found = scores(query, rows, groups)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(indexer.Query, "_scores", watched)
    monkeypatch.setattr(indexer, "GROUP_TILE", 32)
    monkeypatch.setattr(indexer, "ROW_TILE", 64)
    model = tiny()
    Sequence(model, new_cache(model, 200)).prefill(Prompt(ids=random_ids(200, seed=1)), mode="full", chunk=64)
    assert len(made) > 10


def test_the_draft_keeps_what_its_window_needs() -> None:
    model, ids = tiny(), random_ids(100, seed=2)
    window = model.config.sliding_window
    outputs = Sequence(model, new_cache(model, 100)).prefill(Prompt(ids=ids), mode="full", chunk=30)
    kept = [output for output in outputs if output.main_hidden is not None]
    assert [(o.first, o.end) for o in kept] == [(60, 90), (90, 100)] and kept[0].first <= 100 - window
    every = Sequence(model, new_cache(model, 100)).prefill(Prompt(ids=ids), mode="full", chunk=30, logits_from=0)
    assert all(output.main_hidden is not None for output in every)
    assert torch.equal(kept[-1].main_hidden, every[-1].main_hidden)
