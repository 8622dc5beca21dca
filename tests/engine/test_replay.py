"""Prefix hits: bounded replay's documented approximation, exact replay's equality, and what they may not touch."""

import pytest
import torch
from models import golden, random_ids

from rorqual.engine.sequence import Prompt, Sequence, new_cache, replay_start, resume
from rorqual.errors import InputError
from rorqual.model.tap import Recorder
from rorqual.model.transformer import Transformer

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
TOKENS = 120
WINDOW = 16


def cold(model: Transformer, ids: torch.Tensor, mode: str) -> torch.Tensor:
    sequence = Sequence(model, new_cache(model, len(ids) + 16))
    return sequence.prefill(Prompt(ids=ids), mode=mode)[-1].logits[-1]


def after_hit(
    model: Transformer, ids: torch.Tensor, hit: int, replay: str, mode: str, sequence: Sequence | None = None
) -> tuple[torch.Tensor, Sequence]:
    """Logits of the last token after a hit of `hit` tokens left by an earlier prefill of just those."""
    if sequence is None:
        sequence = Sequence(model, new_cache(model, len(ids) + 16))
        sequence.prefill(Prompt(ids=ids[:hit]), mode=mode)
    sequence.cache.slots.poison(sequence.slot)
    resume(sequence, Prompt(ids=ids), hit, mode=replay, prefill=mode)
    outputs = sequence.prefill(Prompt(ids=ids), mode=mode, write_floor=hit)
    return outputs[-1].logits[-1], sequence


@pytest.mark.parametrize("mode", ["ced", "full"])
@pytest.mark.parametrize("hit", [32, 64, 110, 118, TOKENS])
def test_exact_replay_equals_a_cold_run(mode: str, hit: int) -> None:
    model, ids = golden(), random_ids(TOKENS, seed=1)
    logits, _ = after_hit(model, ids, hit, "exact", mode)
    torch.testing.assert_close(logits, cold(model, ids, mode), **TOLERANCE)


@pytest.mark.parametrize("hit", [32, 64, TOKENS])
def test_bounded_replay_recomputes_one_window_and_is_close(hit: int) -> None:
    model, ids = golden(), random_ids(TOKENS, seed=1)
    assert replay_start(model, hit, TOKENS) == hit - WINDOW
    logits, sequence = after_hit(model, ids, hit, "bounded", "ced")
    encoder, layers = model.config.decoder_start, model.config.num_hidden_layers
    earlier = model.layout.prefill_layer_tokens(hit, "ced")
    expected = (TOKENS - hit + WINDOW) * encoder + WINDOW * (layers - encoder)
    assert sequence.layer_tokens - earlier == expected
    assert (logits - cold(model, ids, "ced")).abs().max() < 3.0


def test_global_kv_below_the_write_floor_is_untouched() -> None:
    """Field case 12."""
    model, ids, hit = golden(), random_ids(TOKENS, seed=2), 64
    sequence = Sequence(model, new_cache(model, TOKENS + 16))
    sequence.prefill(Prompt(ids=ids[:hit]), mode="ced")
    pages = hit // model.layout.page_tokens
    before = sequence.cache.pages.pool[:pages].clone()
    after_hit(model, ids, hit, "bounded", "ced", sequence)
    assert torch.equal(sequence.cache.pages.pool[:pages], before)
    assert sequence.cache.pages.pool[pages:].any()


def test_the_same_prompt_twice_with_another_between() -> None:
    """Field case 9: same answer as the first time under the documented mode, whatever ran in between."""
    model, ids = golden(), random_ids(TOKENS, seed=3)
    first, sequence = after_hit(model, ids, 64, "bounded", "ced")
    other = Sequence(model, new_cache(model, 64))
    other.prefill(Prompt(ids=random_ids(50, seed=4)))
    sequence.reset()
    second, _ = after_hit(model, ids, 64, "bounded", "ced", sequence)
    assert torch.equal(first, second)


def test_a_hit_that_covers_the_whole_prompt_gives_logits() -> None:
    """Field case 11: at least one token is computed."""
    model, ids = golden(), random_ids(64, seed=5)
    logits, sequence = after_hit(model, ids, 64, "bounded", "ced")
    assert logits.isfinite().all() and sequence.length == 64


def test_rewind_of_a_live_sequence_in_exact_mode() -> None:
    """Field case 15: regenerate from an earlier token; tail, ring and n-gram history are rebuilt."""
    model, ids = golden(), random_ids(150, seed=6)
    sequence = Sequence(model, new_cache(model, 200))
    sequence.prefill(Prompt(ids=ids[:60]), mode="full")
    for t in range(60, 150):
        sequence.append(ids[t : t + 1])
    regenerated = torch.cat((ids[:101], random_ids(6, seed=7)))
    resume(sequence, Prompt(ids=regenerated), 100, mode="exact", prefill="full")
    logits = sequence.prefill(Prompt(ids=regenerated), mode="full", write_floor=100)[-1].logits[-1]
    torch.testing.assert_close(logits, cold(model, regenerated, "full"), **TOLERANCE)


def test_rewinding_rejected_rows_leaves_no_trace() -> None:
    """Verification rows that are rejected: ring, tail and history behave as if they had never run."""
    model = golden("fp32-dspark")
    for start in (33, 34):
        ids = random_ids(start + 8, seed=8)
        plain = Sequence(model, new_cache(model, 80))
        plain.prefill(Prompt(ids=ids[:start]), mode="full")
        expected = torch.cat([plain.append(ids[t : t + 1]).logits for t in range(start, start + 8)])
        for kept in (1, 2, 3, 5):
            sequence = Sequence(model, new_cache(model, 80))
            sequence.prefill(Prompt(ids=ids[:start]), mode="full")
            drafted = torch.cat((ids[start : start + kept], random_ids(6 - kept, seed=9)))
            first = sequence.append(drafted, logits_from=0).logits[:kept]
            sequence.rewind(start + kept)
            rest = [sequence.append(ids[t : t + 1]).logits for t in range(start + kept, start + 8)]
            assert torch.equal(torch.cat((first, *rest)), expected), (start, kept)


def test_illegal_hits_are_named() -> None:
    model, ids = golden(), random_ids(40)
    sequence = Sequence(model, new_cache(model, 64))
    for hit in (0, 33, 41, 42):
        with pytest.raises(InputError, match=rf"hit: {hit} is not legal; legal: 2\.\.40 in steps of 2"):
            resume(sequence, Prompt(ids=ids), hit)


@pytest.mark.parametrize(("hit", "chunk"), [(32, None), (64, 7), (96, 1)])
def test_ngram_history_is_rebuilt_after_a_hit(hit: int, chunk: int | None) -> None:
    """Field case 35: row ids after a hit and a replay, in chunks, are those of one shot."""
    model, ids = golden(), random_ids(110, seed=12)
    tap = Recorder("engram.hash_ids")
    sequence = Sequence(model, new_cache(model, 128))
    sequence.prefill(Prompt(ids=ids[:hit]), mode="ced")
    sequence.cache.slots.poison(0)
    resume(sequence, Prompt(ids=ids), hit)
    sequence.prefill(Prompt(ids=ids), mode="ced", chunk=chunk, write_floor=hit, tap=tap)
    one_shot = model.ngram.rows(model.token_map[ids])
    assert torch.equal(tap.tensors()["engram.hash_ids"], one_shot[hit - WINDOW :])
