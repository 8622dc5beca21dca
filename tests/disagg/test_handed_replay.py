"""`replay`: the decode side is a bounded hit on the whole prompt (SPEC 11)."""

from __future__ import annotations

import pytest
import torch
from engines import Said, asked, said
from models import golden, random_ids, tiny
from splits import CHUNK, assert_both_clean, encoder_of, finish, joint, split_of, split_said
from torch import Tensor

from rorqual.analysis.trace import trace
from rorqual.engine.request import token_logprobs
from rorqual.engine.sequence import Prompt, Sequence, compressed_before, new_cache
from rorqual.model.transformer import Transformer

LENGTHS = 17, 31, 64, 97, 140


def bounded(model: Transformer, ids: Tensor, new: int = 8) -> Said:
    """A cold prefill, windows dropped, the last W tokens again with floor N - W; then greedy."""
    prompt, start = Prompt(ids=ids), len(ids) - model.config.sliding_window
    sequence = Sequence(model, new_cache(model, len(ids) + new))
    sequence.prefill(prompt, chunk=CHUNK)
    sequence.reset(start, compressed_before(model, prompt, start))
    logits = sequence.prefill(prompt, write_floor=len(ids))[-1].logits
    tokens: list[int] = []
    sure: list[float] = []
    while True:
        assert logits is not None
        tokens.append(int(logits[-1].argmax()))
        sure += [one.logprob for one in token_logprobs(logits[-1:], tokens[-1:], 0)]
        if len(tokens) == new:
            return tokens, sure
        logits = sequence.append(torch.tensor(tokens[-1:])).logits


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", ["fp32-dspark", "tiny-native"])
def test_it_is_a_bounded_hit_of_the_whole_prompt(name: str, speculative: bool) -> None:
    """Odd lengths, whose last group is still filling, come with their tail."""
    model = golden(name, "fast") if name != "tiny-native" else tiny("fast", "native")
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    wanted = [bounded(model, ids) for ids in prompts]
    split = split_of(model, encoder=encoder_of(name), handover="replay", speculative=speculative)
    assert split_said(split, prompts) == wanted
    assert_both_clean(split)


def test_a_prompt_of_a_window_or_less_is_computed_whole() -> None:
    """As a hit of W tokens or fewer is not adopted: nothing is approximated."""
    model = golden("fp32-dspark", "fast")
    prompts = [random_ids(n, seed=n) for n in (1, 2, 15, 16)]
    split = split_of(model, encoder=encoder_of("fp32-dspark"), handover="replay")
    assert split_said(split, prompts) == [joint(model, ids) for ids in prompts]
    assert_both_clean(split)


@pytest.mark.parametrize("tokens", [32, 96])
def test_it_is_the_trace_of_a_hit(tokens: int) -> None:
    model, ids = golden("fp32-dspark", "fast"), random_ids(tokens, seed=tokens)
    split = split_of(model, encoder=encoder_of("fp32-dspark"), handover="replay", speculative=False)
    (output,) = finish(split, [split.submit(ids, asked(8))])
    found, sure = said(output)
    traced = trace(
        model, ids, found[:-1], prefill="ced", hit=tokens, select=f"hit{tokens}.logits,hit{tokens}.decode.logits"
    )
    logits = torch.cat((traced[f"hit{tokens}.logits"][-1:], traced[f"hit{tokens}.decode.logits"]))
    expected = [one.logprob for one in token_logprobs(logits, found, 0)]
    assert sure == pytest.approx(expected, abs=1e-3)
    assert logits.argmax(-1).tolist() == found


def test_layers_are_counted_as_the_planner_has_them() -> None:
    """What the receiver computes before its first token: W rows through all layers, through the decoder, none."""
    from rorqual.planner.traffic import HANDOVERS, handover_layer_tokens

    model, ids = golden("fp32-dspark", "fast"), random_ids(97, seed=1)
    for mode in HANDOVERS:
        encoder = None if mode == "rings" else encoder_of("fp32-dspark")
        split = split_of(model, encoder=encoder, handover=mode, speculative=False)
        (output,) = finish(split, [split.submit(ids, asked(1))])
        assert output.counts.layer_tokens == handover_layer_tokens(model.layout, 97, mode)
        assert output.counts.computed == (16 if mode == "replay" else 0)
