"""A sequence that was filled to a position stands there as one that was prefilled does."""

from __future__ import annotations

import pytest
import torch

from rorqual.engine.sequence import Prompt, Sequence, fill, new_cache
from rorqual.errors import CapacityError, InputError
from tests.engine.models import random_ids, tiny

MODES = pytest.mark.parametrize("mode", ["ced", "full"])


@MODES
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
def test_the_intervals_are_those_of_a_prefill(mode: str, tokens: int) -> None:
    model = tiny()
    filled, prefilled = (Sequence(model, new_cache(model, 120)) for _ in range(2))
    filled.append(random_ids(3))
    fill(filled, tokens, prefill=mode)
    prefilled.prefill(Prompt(ids=random_ids(tokens)), mode=mode, chunk=30)
    assert filled.cache.slots.states == prefilled.cache.slots.states
    for name in ("length", "window_floor", "decoder_floor"):
        assert getattr(filled, name) == getattr(prefilled, name), name
    for sequence in (filled, prefilled):
        sequence.append(random_ids(1))
    assert filled.cache.slots.states == prefilled.cache.slots.states


@MODES
@pytest.mark.parametrize("tokens", [9, 500, 999])
def test_decode_reads_only_what_was_filled(mode: str, tokens: int) -> None:
    """Everything else is NaN; results are finite, those of the seed, and one token or several alike."""
    model = tiny()
    found = []
    for seed, parts in ((1, (6,)), (1, (1, 4, 1)), (2, (6,))):
        sequence = Sequence(model, new_cache(model, 1024))
        sequence.cache.pages.poison(torch.arange(sequence.cache.pages.pool.shape[0]))
        sequence.cache.slots.poison(0)
        fill(sequence, tokens, prefill=mode, seed=seed)
        logits = [sequence.append(part, logits_from=0).logits for part in random_ids(6, seed=8).split(parts)]
        found.append(torch.cat([part for part in logits if part is not None]))
        assert sequence.length == tokens + 6 and torch.isfinite(found[-1]).all()
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_what_does_not_fit_is_refused() -> None:
    model = tiny()
    sequence = Sequence(model, new_cache(model, 32))
    limit = model.config.max_position_embeddings
    with pytest.raises(InputError, match=f"{limit + 1} tokens do not fit the model's {limit} positions"):
        fill(sequence, limit + 1)
    with pytest.raises(CapacityError, match="33 tokens do not fit the 32 allocated"):
        fill(sequence, 33)
    with pytest.raises(InputError, match="tokens: 0 is not legal"):
        fill(sequence, 0)
    with pytest.raises(InputError, match="prefill: 'half' is not one of ced, full"):
        fill(sequence, 8, prefill="half")
