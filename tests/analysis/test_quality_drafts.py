"""`rorqual.analysis.drafts`: speculation changes how fast a text comes, never the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rorqual.analysis.drafts import Block, Tally, follow, plain_greedy, speculate
from rorqual.engine.draft import propose_after
from rorqual.errors import InputError
from rorqual.model.load import load
from rorqual.model.transformer import Transformer

GOLDENS = Path(__file__).parents[1] / "goldens"
PROMPT = 21


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load(GOLDENS / "fp32-dspark", page_tokens=16, kernels="fast")


def prompt_ids(count: int = PROMPT, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 500, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("prefill", "budget"), [("ced", 1), ("ced", 14), ("full", 8)])
def test_speculation_gives_the_text_of_plain_decoding(model: Transformer, prefill: str, budget: int) -> None:
    plain = plain_greedy(model, prompt_ids(), budget, prefill=prefill)
    found = speculate(model, prompt_ids(), budget, prefill=prefill, chunk=8)
    assert found.ids == plain and len(plain) == budget
    assert found.tally.verifications <= budget - 1 or budget == 1
    assert found.tally.emitted == budget - 1, "the prefill gives the first token, verifications the others"


def clairvoyant(monkeypatch: pytest.MonkeyPatch, coming: list[int], right: int) -> None:
    """A draft that knows the text, and is wrong from its draft `right` on."""

    def know(sequences, following, choose, tap=None):  # type: ignore[no-untyped-def]
        made = propose_after(sequences, following, choose, tap)
        at = sequences[0].length - PROMPT + 1
        block = made.ids_Bg.shape[1]
        told = (coming[at:] + [0] * block)[:block]
        ids = [token if i < right else (token + 1) % 500 for i, token in enumerate(told)]
        return replace(made, ids_Bg=torch.tensor([ids], dtype=torch.int64))

    monkeypatch.setattr("rorqual.analysis.drafts.propose_after", know)


@pytest.mark.parametrize("right", [0, 3, 5])
def test_acceptance_counts_what_was_kept(model: Transformer, monkeypatch: pytest.MonkeyPatch, right: int) -> None:
    plain = plain_greedy(model, prompt_ids(seed=1), 19)
    clairvoyant(monkeypatch, plain, right)
    found = speculate(model, prompt_ids(seed=1), 13)
    assert found.ids == plain[:13]
    tally = found.tally
    # The first token comes from the prompt; each verification yields its drafts and the bonus.
    assert tally.verifications == -(-12 // (right + 1)) and tally.tokens_a_verification == right + 1
    assert tally.by_position == tally.conditional[:right] + [0.0] * (5 - right)
    assert tally.by_position == [1.0] * right + [0.0] * (5 - right)


def test_nothing_is_said_after_the_end(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_greedy(model, prompt_ids(seed=2), 16)
    end = next(i for i in range(8, 16) if plain[i] not in plain[:i])
    monkeypatch.setattr("rorqual.analysis.drafts.propose_after", propose_after)
    object.__setattr__(model, "config", model.config.replace(eos_token_id=plain[end]))
    try:
        assert plain_greedy(model, prompt_ids(seed=2), 16) == plain[: end + 1]
        assert speculate(model, prompt_ids(seed=2), 16).ids == plain[: end + 1]
        clairvoyant(monkeypatch, plain, 5)
        found = speculate(model, prompt_ids(seed=2), 16)
    finally:
        object.__setattr__(model, "config", model.config.replace(eos_token_id=1))
    assert found.ids == plain[: end + 1]
    whole, rest = divmod(end, 6)
    assert found.tally.verifications == whole + (rest > 0)
    assert sum(found.tally.accepted) == 5 * whole + rest
    # Where the end is a draft no bonus follows it.
    assert found.tally.emitted == end == len(found.ids) - 1
    assert found.tally.tokens_a_verification == end / (whole + (rest > 0))


def test_an_end_among_the_drafts_gives_no_bonus() -> None:
    """Drafts 5 and 7 agree and 2 does not: the backbone chose 9."""
    drafts, choices = torch.tensor([5, 7, 2]), torch.tensor([5, 7, 9, 4])
    for eos, new, kept in ((1, [5, 7, 9], 2), (9, [5, 7, 9], 2), (7, [5, 7], 2), (5, [5], 1)):
        block = Block(drafts=drafts, choices=choices, output=None, eos=eos)  # type: ignore[arg-type]
        assert (block.new, block.kept) == (new, kept), eos


def test_following_its_own_text_accepts_what_speculation_would(model: Transformer) -> None:
    """On the model's own greedy text both ways ask the same question after the first token."""
    prompt = prompt_ids(seed=3)
    plain = plain_greedy(model, prompt, 8)
    tally = follow(model, prompt, torch.tensor(plain[:1]))
    found = speculate(model, prompt, 2)
    assert tally.verifications == found.tally.verifications == 1 and tally.accepted == found.tally.accepted
    given = follow(model, prompt, prompt_ids(10, seed=4), chunk=7)
    assert given.verifications == 10 and given.accepted == sorted(given.accepted, reverse=True)
    assert given.emitted == 10 + sum(given.accepted), "a bonus each: there is no end in it"


def test_following_leaves_no_trace_of_rejected_drafts(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, text = prompt_ids(seed=5), prompt_ids(6, seed=6)
    expected = follow(model, prompt, text)
    clairvoyant(monkeypatch, [], 0)
    assert follow(model, prompt, text).accepted == [0] * 5
    monkeypatch.undo()
    assert follow(model, prompt, text) == expected


def test_tallies_add_up() -> None:
    tally = Tally()
    assert tally.tokens_a_verification == 0 and tally.by_position == []
    tally.add(2, 3, 3)
    tally.add(0, 3, 1)
    tally.merge(2, [2, 2, 2], 7)
    assert tally.verifications == 4 and tally.accepted == [3, 3, 2]
    assert tally.emitted == 11 and tally.tokens_a_verification == 11 / 4
    assert tally.conditional == pytest.approx([3 / 4, 1.0, 2 / 3])


def test_what_cannot_be_drafted_is_refused(model: Transformer) -> None:
    with pytest.raises(InputError, match="it has no draft layers"):
        speculate(load(GOLDENS / "fp32-text", page_tokens=16, kernels="plain"), prompt_ids(), 4)
    limit = model.config.max_position_embeddings
    with pytest.raises(InputError, match=f"positions with the drafts do not fit the model's {limit}"):
        speculate(model, prompt_ids(limit - 8), 4)
