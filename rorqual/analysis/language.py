"""How well a model knows its language: against counts, against a dense twin, by position, in what it writes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.analysis.kneser_ney import KneserNey, summary
from rorqual.analysis.means import mean_and_error
from rorqual.analysis.position_plot import draw_positions, require_matplotlib
from rorqual.analysis.positions import (
    BLOCK,
    LENGTH,
    Score,
    beginnings,
    by_engine,
    model_bounds,
    position_losses,
    position_report,
    with_begin,
    without_begin,
)
from rorqual.analysis.text_quality import SamplingPlan, text_quality
from rorqual.errors import InputError
from rorqual.model.transformer import Transformer

KNESER_NEY_AT_MOST = 0.90
"""Bits a character over those of the count model."""
TWIN_AT_MOST = 0.05
"""Nats a token above the dense twin."""

Floats = NDArray[np.float64]
Progress = Callable[[str], None]
TEXT, CHAT = "text", "chat"


class Corpus(Protocol):
    """What is read of the training data; `rorqual.training.data.prepare.TrainingData` is one."""

    tokenizer: Tokenizer

    def documents(self, split: str) -> Iterable[tuple[str, str, Any]]:
        """(name, "text" or "chat", token ids) of "train" or "heldout", whole documents in a fixed order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguagePlan:
    """books: names (shell patterns) of the held-out texts that the bars are on; all where none matches. order: of the
    n-grams. length: tokens that the model reads of a document at once. windows: for loss by position, at most, spread
    over the texts; beginnings: short ones, for the bounds near a start. chunk: of the engine's prefill."""

    books: tuple[str, ...] = ("bbe/*", "web/*")
    order: int = 5
    length: int = LENGTH
    windows: int = 96
    beginnings: int = 300
    chunk: int = 512
    sampling: SamplingPlan = field(default_factory=SamplingPlan)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """One held-out document. ids: int64 [n], the begin token first; characters: of its text, special tokens none.
    nats: by what read it, float64 [n - 1], of every token but the first."""

    name: str
    kind: str
    ids: Tensor
    characters: int
    nats: dict[str, Floats] = field(default_factory=dict)


def language_report(
    model: Transformer,
    corpus: Corpus,
    plan: LanguagePlan | None = None,
    *,
    twin: Score | None = None,
    trained: Mapping[str, Any] | None = None,
    plot: Path | None = None,
    note: Progress = lambda _: None,
) -> dict[str, Any]:
    """Everything, with its bars, as plain numbers for JSON.

    "positions" is over the judged books, "positions_all_texts" over every held-out text where there are others; each if
    one of its texts is as long as `length`.

    Args:
        twin: the dense twin's losses (`by_learner(twin.learner, Phase())`); without it the comparison is left out.
        trained: what "against_twin" says of the twin's training (`TrainedTwin.trained`).
        plot: where the figure of loss by position goes: of the judged books, or of all texts where no book is as long.
        note: told what is being done.

    Raises:
        InputError: the model's tokenizer is not the corpus's; nothing is held out; matplotlib is missing for `plot`.
    """
    plan = plan or LanguagePlan()
    plan = dataclasses.replace(plan, length=min(plan.length, model.config.max_position_embeddings))
    check_tokenizer(model, corpus)
    if plot is not None:
        require_matplotlib()
    held = held_documents(corpus)
    counts = _read_by_counts(held, corpus, model.config.vocab_size, plan, note)
    readers = {"model": by_engine(model, chunk=plan.chunk)} | ({"twin": twin} if twin is not None else {})
    for name, score in readers.items():
        for document in held:
            note(f"{name} reads {document.name}")
            document.nats[name] = document_losses(score, document.ids, model.config.bos_token_id, plan.length)
    books = judged(held, plan.books)
    groups = {"books": books} | {kind: [d for d in held if d.kind == kind] for kind in (TEXT, CHAT)}
    report: dict[str, Any] = {
        "kneser_ney": counts,
        "heldout": {name: totals(documents) for name, documents in groups.items() if documents},
        "documents": [{"name": d.name, "kind": d.kind, "judged": d in books} | totals([d]) for d in held],
        "against_kneser_ney": against_counts(books),
    }
    if twin is not None:
        report["against_twin"] = against_twin(books) | dict(trained or {})
    report |= _positions(model, books, groups[TEXT], plan, plot, note)
    report |= text_quality(model, _all_documents(corpus), plan.sampling, note)
    return report


def check_tokenizer(model: Transformer, corpus: Corpus) -> None:
    """InputError unless both read text as the same ids."""
    if model.tokenizer is None:
        raise InputError("model: it has no tokenizer.json, and so reads no text")
    if model.tokenizer.to_str() != corpus.tokenizer.to_str():
        raise InputError("data: its tokenizer is not the model's; prepare the data by the recipe of the model")


def held_documents(corpus: Corpus) -> list[Held]:
    """Held-out documents that say anything.

    Raises:
        InputError: there is no text among them.
    """
    found = []
    for name, kind, ids in corpus.documents("heldout"):
        tokens = _tensor(ids)
        if len(tokens) > 1:
            characters = len(corpus.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))
            found.append(Held(name=name, kind=kind, ids=tokens, characters=characters))
    if not any(document.kind == TEXT for document in found):
        raise InputError("data: no text is held out; give data.heldout patterns")
    return found


def document_losses(score: Score, ids: Tensor, bos: int, length: int) -> Floats:
    """Nats of every token after the begin token, float64; in pieces of `length`, each with a begin token of its own."""
    body = without_begin(ids, bos)
    parts = [score(with_begin(piece, bos)) for piece in body.split(length)]
    return np.asarray(torch.cat(parts).double().cpu().numpy())


def judged(held: Sequence[Held], patterns: Sequence[str]) -> list[Held]:
    """The held-out texts whose name a pattern matches; all of them where none does."""
    texts = [document for document in held if document.kind == TEXT]
    return [d for d in texts if any(fnmatchcase(d.name, pattern) for pattern in patterns)] or texts


def against_twin(documents: Sequence[Held]) -> dict[str, Any]:
    """Nats a token above the twin; standard error over blocks of neighbouring tokens."""
    gaps = [document.nats["model"] - document.nats["twin"] for document in documents]
    _, error = mean_and_error([part.mean() for gap in gaps for part in np.split(gap, range(BLOCK, len(gap), BLOCK))])
    every = np.concatenate(gaps)
    gap = float(every.mean())
    return {
        "nats_a_token": gap,
        "standard_error": error,
        "tokens": len(every),
        "at_most": TWIN_AT_MOST,
        "reached": gap <= TWIN_AT_MOST,
    }


def _read_by_counts(
    held: Sequence[Held], corpus: Corpus, vocab_size: int, plan: LanguagePlan, note: Progress
) -> dict[str, Any]:
    """Trains the count models and has them read; "kneser_ney" saw what the model saw.

    Conversations may repeat texts (a play and its dialogue), and counting those twice spoils the discounts: another,
    "kneser_ney_text", counts texts only.
    """
    found = {}
    kinds = {"kneser_ney": (TEXT, CHAT), "kneser_ney_text": (TEXT,)}
    for name, counted in kinds.items():
        note(f"counting n-grams: {', '.join(counted)}")
        documents = [np.asarray(ids) for _, kind, ids in corpus.documents("train") if kind in counted]
        if not documents:
            raise InputError("data: no text to train on")
        counts = KneserNey.train(documents, vocab_size, plan.order)
        for document in held:
            document.nats[name] = counts.losses(document.ids.numpy())[1:]
        found[name] = summary(counts) | {"tokens": sum(map(len, documents))}
    return found


def totals(documents: Sequence[Held]) -> dict[str, Any]:
    """Tokens, characters, and by reader nats a token and bits a character."""
    tokens, characters = sum(len(d.ids) - 1 for d in documents), sum(d.characters for d in documents)
    row: dict[str, Any] = {"tokens": tokens, "characters": characters, "nats_a_token": {}, "bits_a_character": {}}
    for reader in documents[0].nats:
        nats = float(sum(d.nats[reader].sum() for d in documents))
        row["nats_a_token"][reader] = nats / tokens
        row["bits_a_character"][reader] = nats / math.log(2) / max(1, characters)
    return row


def against_counts(documents: Sequence[Held]) -> dict[str, Any]:
    """Bits a character over the count models'; the bar is on the better of them."""
    bits = totals(documents)["bits_a_character"]
    ratios = {name: bits["model"] / bits[name] for name in ("kneser_ney", "kneser_ney_text")}
    return {"ratio": ratios, "at_most": KNESER_NEY_AT_MOST, "reached": max(ratios.values()) <= KNESER_NEY_AT_MOST}


def _positions(
    model: Transformer,
    books: Sequence[Held],
    texts: Sequence[Held],
    plan: LanguagePlan,
    plot: Path | None,
    note: Progress,
) -> dict[str, Any]:
    """Loss by position over the judged books and, where they are more, over all texts; the figure is of the first."""
    score, bos = by_engine(model, chunk=plan.chunk), model.config.bos_token_id
    bounds = model_bounds(model.config, chunk=plan.chunk, length=plan.length)
    groups = {"positions": books} | ({"positions_all_texts": texts} if len(texts) > len(books) else {})
    found: dict[str, Any] = {}
    for name, documents in groups.items():
        if not any(len(document.ids) > plan.length for document in documents):
            continue
        note(f"{name.replace('_', ' ')}: loss by position")
        ids = [document.ids for document in documents]
        scores = position_losses(score, ids, bos, length=plan.length, limit=plan.windows)
        if plot is not None and not found:
            draw_positions(scores, bounds, plot)
        note(f"{name.replace('_', ' ')}: loss around bounds near the start")
        short = beginnings(score, ids, bos, length=plan.length, limit=plan.beginnings)
        found[name] = position_report(scores, bounds, short)
    return found


def _all_documents(corpus: Corpus) -> Iterator[tuple[str, str, str, Tensor]]:
    for split in ("train", "heldout"):
        for name, kind, ids in corpus.documents(split):
            yield split, name, kind, _tensor(ids)


def _tensor(ids: Any) -> Tensor:
    return ids.to(torch.int64) if isinstance(ids, Tensor) else torch.from_numpy(np.asarray(ids, np.int64))
