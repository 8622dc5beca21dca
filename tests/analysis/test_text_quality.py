"""Prompts and words of samples, and the report over a random model."""

from __future__ import annotations

import json

import pytest
import torch

from rorqual.analysis.text_quality import (
    Sample,
    SamplingPlan,
    conversations,
    passages,
    plain_text,
    sample,
    sample_words,
    text_quality,
)
from rorqual.errors import InputError
from tests.analysis.language_models import corpus, model

PLAN = SamplingPlan(samples=2, prompt_tokens=8, tokens=6, replies=2, reply_tokens=4, conversation_tokens=60)


def encoded(text: str) -> torch.Tensor:
    return torch.tensor(corpus().tokenizer.encode(text, add_special_tokens=False).ids)


def test_passages_lie_evenly_over_all_tokens() -> None:
    documents = [torch.arange(10), torch.arange(100, 103), torch.tensor([99, *range(200, 230)])]
    found = passages(documents, 5, 5, 99)
    assert all(len(ids) == 6 and ids[0] == 99 for ids in found)
    assert [int(ids[1]) for ids in found] == [0, 201, 207, 213, 219]
    with pytest.raises(InputError, match="longer than 50"):
        passages(documents, 1, 50, 99)


def test_conversations_stop_where_an_answer_begins() -> None:
    tokenizer = corpus().tokenizer
    (held,) = (ids for _, kind, ids in corpus().documents("heldout") if kind == "chat")
    found = conversations([held, held], tokenizer, 5, 1000)
    assert len(found) == 5
    for ids in found:
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        assert text.endswith("<｜Assistant｜></think>")
        assert held[: len(ids)].equal(ids)
    assert len({len(ids) for ids in found}) == 2, "both answers are asked for"
    first = min(len(ids) for ids in found)
    assert {len(ids) for ids in conversations([held], tokenizer, 4, first)} == {first}
    with pytest.raises(InputError, match=f"within {first - 1} tokens"):
        conversations([held], tokenizer, 4, first - 1)


def test_words_of_a_sample_begin_after_the_prompt() -> None:
    """A prompt that ends inside "whale", and a cut inside "breathed"."""
    tokenizer = corpus().tokenizer
    ids = encoded("the sea and the whxale surfaced and brxeathed")
    pieces = [tokenizer.decode([token]) for token in ids.tolist()]
    given = next(i for i, piece in enumerate(pieces) if "x" in piece)
    cut = Sample(prompt=ids[:given], ids=ids[given:-1], ended=False)
    found = sample_words(tokenizer, cut)
    assert found == ["surfaced", "and"]
    ended = Sample(prompt=ids[:given], ids=torch.cat((ids[given:-1], torch.tensor([corpus().eos]))), ended=True)
    assert sample_words(tokenizer, ended)[:2] == found
    assert len(sample_words(tokenizer, ended)) == 3


def test_no_word_forms_across_a_special_token() -> None:
    tokenizer = corpus().tokenizer
    ids = [corpus().bos, *encoded("the whale").tolist(), corpus().eos, *encoded("sea").tolist()]
    assert plain_text(tokenizer, ids).split() == ["the", "whale", "sea"]


def test_samples_repeat_and_differ_by_seed() -> None:
    prompts = [encoded("the whale and")] * 2
    first = sample(model(), prompts, 8, PLAN, lambda _: None)
    again = sample(model(), prompts, 8, PLAN, lambda _: None)
    assert all(a.ids.equal(b.ids) for a, b in zip(first, again, strict=True))
    assert not first[0].ids.equal(first[1].ids)
    for one in first:
        assert one.ended == (int(one.ids[-1]) == corpus().eos)
        assert one.ended or len(one.ids) == 8


def test_report_over_a_corpus() -> None:
    everything = [(s, *document) for s in ("train", "heldout") for document in corpus().documents(s)]
    notes: list[str] = []
    report = text_quality(model(), everything, PLAN, notes.append)
    assert json.loads(json.dumps(report)) == report
    assert report["samples"]["count"] == report["replies"]["count"] == 2
    assert 0 <= report["samples"]["known_share"] <= 1
    assert report["samples"]["known_reached"] == (report["samples"]["known_share"] >= 0.98)
    assert report["replies"]["mean_tokens"] <= 4
    assert "sample 2 of 2" in notes
    without = text_quality(model(), [row for row in everything if row[2] == "text"], PLAN)
    assert "replies" not in without
    assert without["samples"] == report["samples"]
