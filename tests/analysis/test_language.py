"""The language report over a toy corpus: its parts agree with what they are made of."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rorqual.analysis.dense_twin import DenseTwin
from rorqual.analysis.kneser_ney import KneserNey
from rorqual.analysis.language import (
    Held,
    LanguagePlan,
    against_counts,
    against_twin,
    document_losses,
    held_documents,
    judged,
    language_report,
    totals,
)
from rorqual.analysis.positions import by_engine, by_learner, position_losses
from rorqual.analysis.text_quality import SamplingPlan
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.errors import InputError
from rorqual.training.learner import Phase
from tests.analysis.language_models import ToyCorpus, corpus, model

PLAN = LanguagePlan(
    length=128,
    windows=4,
    chunk=64,
    sampling=SamplingPlan(samples=1, prompt_tokens=8, tokens=4, replies=1, reply_tokens=4, conversation_tokens=60),
)


def test_report(tmp_path: Path) -> None:
    twin = DenseTwin.fresh(model().config, 0)
    plot = tmp_path / "positions.png"
    score = by_learner(twin, Phase())
    report = language_report(model(), corpus(), PLAN, twin=score, trained={"step": 3, "lr": 0.1}, plot=plot)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert plot.read_bytes().startswith(b"\x89PNG")

    held = {name: (kind, ids) for name, kind, ids in corpus().documents("heldout")}
    assert {row["name"]: row["kind"] for row in report["documents"]} == {name: kind for name, (kind, _) in held.items()}
    assert [row["name"] for row in report["documents"] if row["judged"]] == ["bbe/held", "web/held"]
    assert report["heldout"]["books"] == report["heldout"]["text"]
    text = report["heldout"]["text"]
    ids = [ids for kind, ids in held.values() if kind == "text"]
    assert text["tokens"] == sum(len(one) - 1 for one in ids)
    assert text["characters"] == sum(len(d.text) for d in corpus().all["heldout"] if d.text)

    counts = KneserNey.train([one for _, _, one in corpus().documents("train")], model().config.vocab_size)
    nats = sum(counts.losses(one)[1:].sum() for one in ids)
    assert text["nats_a_token"]["kneser_ney"] == pytest.approx(nats / text["tokens"])
    assert text["bits_a_character"]["kneser_ney"] == pytest.approx(nats / math.log(2) / text["characters"])
    for reader in ("model", "twin"):
        # Both are untrained; the model's random logits are not flat.
        assert text["nats_a_token"][reader] > math.log(model().config.vocab_size) - 0.2
    assert not report["against_kneser_ney"]["reached"]
    gap = text["nats_a_token"]["model"] - text["nats_a_token"]["twin"]
    assert report["against_twin"]["nats_a_token"] == pytest.approx(gap)
    assert (report["against_twin"]["step"], report["against_twin"]["lr"]) == (3, 0.1)
    assert report["positions"]["windows"] == 4 and "positions_all_texts" not in report, "every text is judged"
    assert report["positions"]["late_against_early"]["paired"]
    assert report["replies"]["count"] == 1


def test_loss_by_position_is_over_the_judged_books(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []

    def noted(score, documents, bos, **options):  # type: ignore[no-untyped-def]
        read.append([len(ids) for ids in documents])
        return position_losses(score, documents, bos, **options)

    monkeypatch.setattr("rorqual.analysis.language.position_losses", noted)
    lengths = {name: len(ids) for name, kind, ids in corpus().documents("heldout") if kind == "text"}
    both = dataclasses.replace(PLAN, books=("bbe/*",), windows=2)
    report = language_report(model(), corpus(), both)
    assert read == [[lengths["bbe/held"]], [lengths["bbe/held"], lengths["web/held"]]]
    assert report["positions"]["windows"] == report["positions_all_texts"]["windows"] == 2
    # Where no judged book is long enough there are only the texts.
    report = language_report(model(), corpus(), dataclasses.replace(both, books=("web/*",)))
    assert "positions" not in report and report["positions_all_texts"]["windows"] == 2


def test_a_report_says_nothing_of_what_is_not_there() -> None:
    """No twin, no conversations, no document as long as a window."""
    small = ToyCorpus()
    small.all["heldout"] = [d for d in small.all["heldout"] if d.name == "web/held"]
    report = language_report(model(), small, dataclasses.replace(PLAN, length=512))
    assert not {"against_twin", "positions", "replies"} & set(report)
    assert set(report["heldout"]) == {"text", "books"}
    assert set(report["heldout"]["text"]["nats_a_token"]) == {"model", "kneser_ney", "kneser_ney_text"}


def test_the_engine_in_chunks_reads_as_in_one_piece() -> None:
    """Every token is scored, at its place: a chunk's first loss comes after the last chunk's last."""
    ids = next(ids for _, _, ids in corpus().documents("heldout"))[:90]
    sequence = Sequence(model(), new_cache(model(), 90))
    (output,) = sequence.prefill(Prompt(ids=ids[:-1]), mode="full", logits_from=0)
    assert output.logits is not None
    whole = F.cross_entropy(output.logits, ids[1:], reduction="none")
    for chunk in (40, 89):
        torch.testing.assert_close(by_engine(model(), chunk=chunk)(ids), whole, rtol=1e-3, atol=1e-3)


def test_document_losses_score_every_token_once() -> None:
    pieces = []

    def score(ids: torch.Tensor) -> torch.Tensor:
        pieces.append(ids.tolist())
        return ids[1:].float()

    for n in (2, 5, 6, 7, 11):
        np.testing.assert_array_equal(document_losses(score, torch.arange(n), 0, 5), np.arange(1, n))
    assert pieces[-2:] == [[0, 1, 2, 3, 4, 5], [0, 6, 7, 8, 9, 10]]


def costs(name: str, kind: str, n: int, gap: float) -> Held:
    rng = np.random.default_rng(n)
    cost = rng.exponential(3, n)
    nats = {"twin": cost, "model": cost + gap + 0.1 * rng.standard_normal(n)}
    return Held(name=name, kind=kind, ids=torch.arange(n + 1), characters=4 * n, nats=nats)


def test_the_twin_is_compared_on_the_same_tokens() -> None:
    found = against_twin([costs("a", "text", 3000, 0.03), costs("b", "text", 900, 0.03)])
    assert found["tokens"] == 3900
    assert abs(found["nats_a_token"] - 0.03) < 3 * found["standard_error"] < 0.03
    assert found["reached"]
    assert not against_twin([costs("a", "text", 3000, 0.07)])["reached"]


def test_which_texts_are_judged() -> None:
    held = [costs(name, kind, 5, 0.0) for name, kind in (("bbe/A", "text"), ("plays/B", "text"), ("bbe/C", "chat"))]
    assert judged(held, ("bbe/*",)) == held[:1]
    assert judged(held, ("no/*",)) == held[:2]


def test_the_better_count_model_is_the_one_to_beat() -> None:
    book = costs("a", "text", 100, 0.0)
    book.nats["kneser_ney"] = book.nats["model"] / 0.88
    book.nats["kneser_ney_text"] = book.nats["model"] / 0.91
    found = against_counts([book])
    assert found["ratio"] == pytest.approx({"kneser_ney": 0.88, "kneser_ney_text": 0.91})
    assert not found["reached"]
    book.nats["kneser_ney_text"] = book.nats["model"] / 0.89
    assert against_counts([book])["reached"]
    row = totals([book])
    assert row["bits_a_character"]["model"] == pytest.approx(row["nats_a_token"]["model"] / math.log(2) / 4)


def test_refuses_what_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ToyCorpus()
    other.all["heldout"] = [d for d in other.all["heldout"] if d.turns]
    with pytest.raises(InputError, match="no text is held out"):
        held_documents(other)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="matplotlib is not installed"):
        language_report(model(), other, PLAN, plot=tmp_path / "x.png")
    other.tokenizer.add_tokens(["whale"])
    with pytest.raises(InputError, match="tokenizer is not the model's"):
        language_report(model(), other, PLAN)
