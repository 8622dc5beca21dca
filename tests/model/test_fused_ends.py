"""What stands before and after the layers in one kernel each, against the ops it stands for; and whose memory it is."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model.backbone import copy_mean
from rorqual.model.forward import forward, ngram_rows
from rorqual.model.kv import PagedKV
from rorqual.model.load import load
from rorqual.model.run import Run
from rorqual.model.step import SequenceStep
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.ops import cpu

pytestmark = pytest.mark.skipif(
    "avx512f" not in cpu.features(), reason="this CPU has no AVX512: there are no fused regions"
)
NUMERICS = pytest.mark.parametrize("numerics", ["fp32", "native"])


@pytest.fixture(scope="module")
def models(tiny_folder: Path) -> dict[str, Transformer]:
    return {n: load(tiny_folder, page_tokens=16, kernels="fast", numerics=n) for n in ("fp32", "native")}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def runs_of(model: Transformer) -> tuple[Run, Run]:
    """With the regions, and with the same kernels op by op."""
    ops = model.backend.ops()
    assert ops.regions is not None
    kv = PagedKV(model.config, new_cache(model, 16), ops, model.numerics.native)
    fused = Run(ops=ops, numerics=model.numerics, kv=kv, tap=Tap())
    return fused, Run(ops=replace(ops, regions=None), numerics=model.numerics, kv=kv, tap=Tap())


def ids_of(model: Transformer, count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size - 6, (count,), generator=generator)


@NUMERICS
@pytest.mark.parametrize("count", [1, 3, 32])
def test_logits_have_the_bits_of_hidden_and_logits(models: dict[str, Transformer], numerics: str, count: int) -> None:
    model = models[numerics]
    fused, by_op = runs_of(model)
    body, generator = model.backbone, torch.Generator().manual_seed(count)
    shape = count, model.config.hc_mult, model.config.hidden_size
    x = torch.randn(shape, generator=generator).to(model.numerics.act_dtype)
    pre = torch.rand(shape[:2], generator=generator)
    found = body.few_logits(x, pre, fused)
    assert found is not None
    hidden = by_op.numerics.round(by_op.ops.hyper_collapse(x, pre))
    assert torch.equal(found, body.logits(hidden, count, by_op)[1])
    assert body.few_logits(x, pre, by_op) is None


@NUMERICS
def test_the_mean_of_copies_has_the_plain_bits(models: dict[str, Transformer], numerics: str) -> None:
    model = models[numerics]
    fused, _ = runs_of(model)
    shape = 5, model.config.hc_mult, model.config.hidden_size
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(model.numerics.act_dtype)
    assert fused.regions is not None
    assert torch.equal(fused.regions.mean(x), copy_mean(x))
    assert torch.equal(fused.regions.mean(x[:1].expand(3, -1, -1)), copy_mean(x[:1]).expand(3, -1))


@pytest.mark.parametrize("chunks", [[1] * 24, [2, 1, 5, 1, 1, 14], [24], [3, 21]])
@pytest.mark.parametrize("start", [0, 5])
def test_ngram_rows_and_their_history(models: dict[str, Transformer], chunks: list[int], start: int) -> None:
    """Image positions among them, from the first position on and behind a history that begins later."""
    model, caches = models["fp32"], [new_cache(models["fp32"], 32) for _ in range(2)]
    ids, image = ids_of(model, 24), torch.rand(24, generator=torch.Generator().manual_seed(4)) < 0.2
    for cache in caches:
        cache.slots.history[:] = 7
        cache.slots.states[0].reset(start, 0)
    at = 0
    for count in chunks:
        cut = slice(at, at + count)
        step = SequenceStep(
            tokens_n=ids[cut], start=start + at, slot=0, image_n=image[cut] if image[cut].any() else None
        )
        ours, theirs = (ngram_rows(model, cache, step, run) for cache, run in zip(caches, runs_of(model), strict=True))
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)
        assert torch.equal(caches[0].slots.history, caches[1].slots.history)
        for cache in caches:
            cache.slots.states[0].history.advance(step.start, step.end)
        at += count


def test_an_image_ends_the_ngram(models: dict[str, Transformer]) -> None:
    """What the kernel would miss if it did not look at the mask."""
    model, cache = models["fp32"], new_cache(models["fp32"], 16)
    fused, _ = runs_of(model)
    found = [
        ngram_rows(model, cache, SequenceStep(tokens_n=ids_of(model, 6), start=0, slot=0, image_n=mask), fused)
        for mask in (None, torch.tensor([False, True, False, False, False, False]))
    ]
    assert found[0] is not None and found[1] is not None
    differs = (found[0] != found[1]).flatten(1).any(1)
    assert differs[1] and not differs[0]


@NUMERICS
def test_a_step_leaves_what_earlier_ones_gave(models: dict[str, Transformer], numerics: str) -> None:
    """Memory that steps work in is kept; nothing of it may be in what they return."""
    model = models[numerics]
    ids, cache = ids_of(model, 40), new_cache(model, 48, slots=2)
    sequences = [Sequence(model, cache, slot=i) for i in range(2)]
    for sequence in sequences:
        sequence.prefill(Prompt(ids=ids[:12]))
    kept: list[tuple[Tensor, Tensor]] = []
    for i in range(12, 24, 2):
        for sequence, count in zip(sequences, (1, 2), strict=True):
            output = sequence.append(ids[i : i + count], logits_from=0)
            for value in (output.logits, output.main_hidden):
                assert value is not None
                kept.append((value, value.clone()))
    steps = [s.step(ids[30 : 31 + s.slot]) for s in sequences]
    forward(model, cache, steps)
    assert all(torch.equal(value, copy) for value, copy in kept)
    places = [value.data_ptr() for value, _ in kept]
    assert len(set(places)) == len(places)


def test_threads_have_their_own_memory(models: dict[str, Transformer]) -> None:
    """Models that decode at once give what each gives alone."""

    def decoded(numerics: str) -> Tensor:
        model = models[numerics]
        ids = ids_of(model, 60)
        sequence = Sequence(model, new_cache(model, 64))
        sequence.prefill(Prompt(ids=ids[:10]))
        found = [sequence.append(ids[i : i + 1]).logits for i in range(10, 60)]
        return torch.cat([x for x in found if x is not None])

    names = ["fp32", "native", "fp32", "native"]
    alone = {name: decoded(name) for name in models}
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(x, alone[name]) for name, x in zip(names, pool.map(decoded, names), strict=True))
