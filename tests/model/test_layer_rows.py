"""Layers of short rows in two kernels, against the same layers region by region: same bits, same bytes in the cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.checkpoint.random import write_random
from rorqual.cli.init import distinct_keys
from rorqual.config import presets
from rorqual.engine.sequence import Prompt, Sequence, new_cache, resume
from rorqual.errors import FormatError
from rorqual.model.forward import forward
from rorqual.model.layer import Layer
from rorqual.model.load import load
from rorqual.model.short import ShortLayers
from rorqual.model.transformer import Transformer
from rorqual.ops import cpu

pytestmark = pytest.mark.skipif(
    "avx512f" not in cpu.features(), reason="this CPU has no AVX512: there are no fused regions"
)
NUMERICS = pytest.mark.parametrize("numerics", ["fp32", "native"])
Found = tuple[list[Tensor], KVCache]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Transformer]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = presets.load("tiny")
    write_random(config, folder, 5, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    return {n: load(folder, page_tokens=16, kernels="fast", numerics=n) for n in ("fp32", "native")}


def ids_of(model: Transformer, count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size - 6, (count,), generator=generator)


def decode_far(model: Transformer) -> Found:
    """Token by token past the end of the rings, drafts rejected on the way."""
    rows = new_cache(model, 16).slots.rings.rows
    ids, cache = ids_of(model, 2 * rows + 30), new_cache(model, 2 * rows + 40)
    sequence = Sequence(model, cache)
    found = [sequence.prefill(Prompt(ids=ids[:20]))[-1].logits]
    for i in range(20, 2 * rows + 30):
        if i % 7 == 0:
            sequence.append(ids[i : i + 3])
            sequence.rewind(i)
        found.append(sequence.append(ids[i : i + 1]).logits)
    return [x for x in found if x is not None], cache


def after_hit(model: Transformer) -> Found:
    """A replay behind a prefix hit: rows that see no key below where it began, and rewrite no group."""
    ids, cache = ids_of(model, 160), new_cache(model, 176, slots=2)
    first = Sequence(model, cache)
    first.prefill(Prompt(ids=ids[:150]))
    table = torch.arange(cache.pages.pool.shape[0])
    second = Sequence(model, cache, slot=1, block_table=table)
    resume(second, Prompt(ids=ids[:150]), 144)
    found = [o.logits for o in second.prefill(Prompt(ids=ids[:150]), chunk=5, write_floor=144, logits_from=0)]
    found += [second.append(ids[i : i + 2]).logits for i in range(150, 160, 2)]
    return [x for x in found if x is not None], cache


def batch(model: Transformer) -> Found:
    """Ragged steps of three sequences on pages that lie anyhow, and one beside a prefill."""
    cache = new_cache(model, 96, slots=4)
    pages = torch.randperm(cache.pages.pool.shape[0], generator=torch.Generator().manual_seed(3)).view(4, -1)
    sequences = [Sequence(model, cache, slot=i, block_table=pages[i]) for i in range(4)]
    ids = [ids_of(model, 96, seed=i) for i in range(4)]
    for i, length in enumerate((30, 3, 61)):
        sequences[i].prefill(Prompt(ids=ids[i][:length]), mode="full")
    found: list[Tensor] = []
    for counts in ((1, 1, 1), (2, 6, 1), (17, 1, 1), (1, 1, 1, 70)):
        steps = [s.step(own[s.length : s.length + n]) for s, own, n in zip(sequences, ids, counts, strict=False)]
        for output, sequence, step in zip(forward(model, cache, steps), sequences, steps, strict=False):
            sequence.ran(step, output)
            assert output.logits is not None
            found.append(output.logits)
    return found, cache


@NUMERICS
@pytest.mark.parametrize("case", [decode_far, after_hit, batch])
def test_bits_and_bytes_are_those_of_the_regions(
    models: dict[str, Transformer],
    numerics: str,
    case: Callable[[Transformer], Found],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []
    whole = ShortLayers.forward

    def counted(self: ShortLayers, *args: object) -> object:
        taken.append(whole(self, *args))  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(ShortLayers, "forward", counted)
    ours, our_cache = case(models[numerics])
    assert sum(made is not None for made in taken) > len(models[numerics].config.roles)
    monkeypatch.setattr(ShortLayers, "forward", lambda *args: None)
    theirs, their_cache = case(models[numerics])
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(our_cache.slots.rings.data, their_cache.slots.rings.data)
    assert torch.equal(our_cache.pages.pool, their_cache.pages.pool)


@NUMERICS
def test_a_sequence_does_not_see_its_neighbours(models: dict[str, Transformer], numerics: str) -> None:
    """DESIGN 12: a token alone, beside others, and among the rows of a verification."""
    model = models[numerics]
    ids = ids_of(model, 60)

    def step_of(others: int) -> Tensor:
        cache = new_cache(model, 64, slots=4)
        sequences = [Sequence(model, cache, slot=i) for i in range(4)]
        for sequence in sequences:
            sequence.prefill(Prompt(ids=ids[: 20 + sequence.slot]))
        steps = [s.step(ids[s.length : s.length + 1 + s.slot]) for s in sequences[: others + 1]]
        (output, *_) = forward(model, cache, steps)
        assert output.logits is not None
        return output.logits

    alone = step_of(0)
    assert all(torch.equal(step_of(others), alone) for others in (1, 3))
    cache = new_cache(model, 64)
    sequence = Sequence(model, cache)
    sequence.prefill(Prompt(ids=ids[:20]))
    logits = sequence.append(ids[20:26], logits_from=0).logits
    assert logits is not None and torch.equal(logits[:1], alone)


@NUMERICS
def test_what_cannot_be_quantised_is_refused(models: dict[str, Transformer], numerics: str) -> None:
    model = models[numerics]
    sequence = Sequence(model, new_cache(model, 64))
    sequence.prefill(Prompt(ids=ids_of(model, 20)))
    layer = model.backbone.encoder[1]
    assert isinstance(layer, Layer)
    norm = layer.attn.kv_norm
    kept = norm.clone()
    try:
        norm[0] = torch.nan
        with pytest.raises(FormatError, match="every value must be finite"):
            sequence.append(torch.tensor([5]))
    finally:
        norm.copy_(kept)


@pytest.mark.parametrize(("group", "page"), [(10_000, None), (-2, None), (0, 99), (0, -1)])
def test_groups_and_pages_outside_are_refused(
    models: dict[str, Transformer], group: int, page: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever chose them: the kernel checks no bounds where it reads."""
    model = models["fp32"]
    sequence = Sequence(model, new_cache(model, 64))
    sequence.prefill(Prompt(ids=ids_of(model, 40)))
    for layer in (*model.backbone.encoder, *model.backbone.decoder):
        if layer.attn.indexer is not None:
            width = layer.attn.indexer.topk
            monkeypatch.setattr(layer.attn.indexer, "forward", lambda *args, k=width: torch.full((1, k), group))
        if layer.attn.compressor is not None:
            monkeypatch.setattr(layer.attn.compressor, "forward", lambda *args: None)
    step = sequence.step(torch.tensor([5]))
    assert step.block_table is not None
    if page is not None:
        step.block_table[0] = page
    with pytest.raises(IndexError):
        forward(model, sequence.cache, [step])
