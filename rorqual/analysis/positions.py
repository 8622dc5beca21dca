"""Loss by position: does a longer past help, and does the loss step anywhere that a mechanism begins or ends?

Every long document is read in windows of one length whose starts lie a stride apart, each after a begin token, as are
the pieces of documents that training packs. So one token is met at many positions, and positions can be compared on the
very same tokens: most of the noise, which is what the text happens to say there, cancels.

The stride is far below the length, so windows of one document overlap and are no independent samples. Standard errors
over windows are right where what is taken of each lies within a stride (around a bound), and too small over the wide
buckets and in the figure's right half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rorqual.analysis.means import mean_and_error
from rorqual.config import ModelConfig
from rorqual.engine.sequence import Prompt, new_cache
from rorqual.engine.sequence import Sequence as Running
from rorqual.errors import InputError
from rorqual.model.transformer import Transformer
from rorqual.training.batch import Packed
from rorqual.training.learner import Learner, Phase

Floats = NDArray[np.float64]
Score = Callable[[Tensor], Tensor]
"""ids int64 [n + 1], the begin token first -> nats fp32 [n] of every token but that."""

LENGTH = 4096
STRIDE = 0.116
"""Of the length, 475 of 4,096: it divides no bound, so that a token at a bound is met elsewhere in other windows."""
BUCKETS = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096)
EARLY, LATE = (1 / 8, 1 / 4), (1 / 2, 1)
"""Of a window's length: 512-1K and 2K-4K of 4,096."""
HALF = 32
"""Positions on each side of a bound that are compared."""
BEGINNING = 640
"""Tokens of the short windows that decide about bounds near the start, up to one at 512 with 2 x 64 around it."""
BEGINNING_STRIDE = 4 * HALF
"""So that what is compared around a bound is other text in every window."""
BLOCK = 512
"""Neighbouring tokens whose differences count as one sample: they share what the text is about."""
FEW = 16
"""Windows below which matched tokens say less than plain ones."""
STEP_NATS = 0.01
"""A step smaller than this is none, however sure."""
UNSURE_NATS = 0.1
"""Three standard errors above this could hide a step that matters: not finding one decides nothing."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionLosses:
    """losses: float64 [windows, length], at position p of the token after the begin token and p more.
    tokens: int64 [windows, length], which token of the text was predicted; equal numbers are the same token."""

    losses: Floats
    tokens: NDArray[np.int64]

    @property
    def length(self) -> int:
        return int(self.losses.shape[1])


def by_learner(learner: Learner, phase: Phase) -> Score:
    """Losses as training sees them."""

    def score(ids: Tensor) -> Tensor:
        packed = Packed(ids=ids[:-1], targets=ids[1:], starts=(0,), number=0)
        return learner.token_losses([packed], phase)[0]

    return score


def by_engine(model: Transformer, *, chunk: int = 512) -> Score:
    """Losses of the model as it is used: packed caches, prefilled in chunks, every layer on every token."""

    @torch.no_grad()
    def score(ids: Tensor) -> Tensor:
        sequence = Running(model, new_cache(model, len(ids)))
        losses: list[Tensor] = []
        outputs = sequence.prefill(Prompt(ids=ids[:-1]), mode="full", chunk=chunk, logits_from=0)
        for first, output in zip(range(0, len(ids), chunk), outputs, strict=False):
            assert output.logits is not None
            losses.append(
                F.cross_entropy(output.logits, ids[first + 1 : first + 1 + len(output.logits)], reduction="none")
            )
        return torch.cat(losses)

    return score


def without_begin(ids: Tensor, bos: int) -> Tensor:
    """The tokens of a document after its begin token, if it has one."""
    return ids[1:] if len(ids) and int(ids[0]) == bos else ids


def with_begin(ids: Tensor, bos: int) -> Tensor:
    """A piece of a document as training and use present it."""
    return torch.cat((ids.new_full((1,), bos), ids))


def position_losses(
    score: Score,
    documents: Iterable[Tensor],
    bos: int,
    *,
    length: int = LENGTH,
    stride: int | None = None,
    limit: int | None = None,
    first: int = 0,
    least: int = 0,
) -> PositionLosses:
    """Losses in all windows of documents of `length` tokens or more, or in `limit` of them.

    documents: int64 [n] each, with their begin token `bos` or without.
    stride: tokens from one window's start to the next one's; None: `STRIDE` of the length.
    first: token of a document's text at which its first window starts.
    least: tokens that a document must have to be read at all; it counts in the numbering of tokens all the same.
    limit: shared out evenly among the documents, as far as each has windows. Each gives its first: neighbours overlap,
        so that tokens are still met at several positions.

    Raises:
        InputError: no document is long enough.
    """
    stride = stride or max(1, round(STRIDE * length))
    bodies = [without_begin(ids, bos) for ids in documents]
    starts = [range(first, len(body) - length + 1, stride) if len(body) >= least else () for body in bodies]
    places = [(i, start) for i, some in enumerate(starts) for start in some]
    if not places:
        raise InputError(f"documents: none has {max(first + length, least)} tokens")
    # By start, a round takes one window of every document that has any left.
    chosen = sorted(sorted(places, key=lambda place: place[1])[:limit])
    bases = np.cumsum([0, *map(len, bodies)])
    losses = [score(with_begin(bodies[i][start : start + length], bos)).double().cpu().numpy() for i, start in chosen]
    tokens = [bases[i] + start + np.arange(length) for i, start in chosen]
    return PositionLosses(losses=np.stack(losses), tokens=np.stack(tokens))


def bucket_losses(scores: PositionLosses, edges: Sequence[int] = BUCKETS) -> list[dict[str, Any]]:
    """Mean loss at positions [start, end) of each bucket, standard error over windows as if they did not overlap."""
    edges = [*(edge for edge in edges if edge < scores.length), scores.length]
    return [
        {"start": start, "end": end, **_mean(scores.losses[:, start:end].mean(1))} for start, end in pairwise(edges)
    ]


def paired_change(
    scores: PositionLosses, early: tuple[float, float] = EARLY, late: tuple[float, float] = LATE
) -> dict[str, Any]:
    """Loss at late positions less that at early ones; early, late: start and end as fractions of the length.

    On tokens met at both ("paired"), standard error over blocks of text; where there are none, on each window's own
    tokens, over windows. "reached": at most 2 standard errors above 0.
    """
    (e0, e1), (l0, l1) = ((round(a * scores.length), round(b * scores.length)) for a, b in (early, late))
    change = _token_means(scores, l0, l1) - _token_means(scores, e0, e1)
    both = np.flatnonzero(~np.isnan(change))
    if len(both):
        _, block = np.unique(both // BLOCK, return_inverse=True)
        samples = np.bincount(block, change[both]) / np.bincount(block)
    else:
        samples = scores.losses[:, l0:l1].mean(1) - scores.losses[:, e0:e1].mean(1)
    found = _mean(samples)
    return {
        "early": [e0, e1],
        "late": [l0, l1],
        "paired": bool(len(both)),
        "tokens": len(both),
        "samples": len(samples),
        "change": found["mean"],
        "standard_error": found["standard_error"],
        "reached": bool(found["mean"] <= 2 * (found["standard_error"] or 0.0)),
    }


def _token_means(scores: PositionLosses, start: int, end: int) -> Floats:
    """By token, its mean loss at positions [start, end), NaN where it was not met there."""
    count = int(scores.tokens.max()) + 1
    tokens = scores.tokens[:, start:end].ravel()
    total = np.bincount(tokens, scores.losses[:, start:end].ravel(), minlength=count)
    seen = np.bincount(tokens, minlength=count)
    return np.where(seen > 0, total / np.maximum(seen, 1), np.nan)


def beginnings(
    score: Score, documents: Sequence[Tensor], bos: int, *, length: int, limit: int
) -> PositionLosses | None:
    """Short windows, many, over the texts that windows of `length` read; None where there is no room for any.

    They begin where those windows' late positions do, so that most of their tokens have a late loss to be matched with.
    """
    try:
        return position_losses(
            score,
            documents,
            bos,
            length=min(BEGINNING, length),
            stride=BEGINNING_STRIDE,
            limit=limit,
            first=length // 2,
            least=length,
        )
    except InputError:
        return None


def residuals(scores: PositionLosses, late: PositionLosses | None = None) -> Floats:
    """Losses [windows, length] less the same token's mean at other windows' late positions, NaN where it has none.

    Late is the second half, where the loss has levelled out, so that what is subtracted hardly depends on position.

    late: whose late positions; the scores' own when not given. Tokens must be numbered alike.
    """
    if late is not None:
        count = max(int(scores.tokens.max()), int(late.tokens.max())) + 1
        tokens, losses = late.tokens[:, late.length // 2 :].ravel(), late.losses[:, late.length // 2 :].ravel()
        total, seen = np.bincount(tokens, losses, minlength=count), np.bincount(tokens, minlength=count)
        mean: Floats = np.where(seen > 0, total / np.maximum(seen, 1), np.nan)
        found: Floats = scores.losses - mean[scores.tokens]
        return found
    half = scores.length // 2
    in_half = np.zeros_like(scores.losses, dtype=bool)
    in_half[:, half:] = True
    count = int(scores.tokens.max()) + 1
    total = np.bincount(scores.tokens[in_half], scores.losses[in_half], minlength=count)[scores.tokens]
    seen = np.bincount(scores.tokens[in_half], minlength=count)[scores.tokens]
    total, seen = total - np.where(in_half, scores.losses, 0), seen - in_half
    return np.where(seen > 0, scores.losses - total / np.maximum(seen, 1), np.nan)


def step_at(scores: PositionLosses, bound: int, matched: Floats | None = None) -> dict[str, Any]:
    """By how much the loss jumps at `bound`: 32 positions after less 32 before, less what the trend around explains.

    With m1..m4 the means of four neighbouring runs of 32, the bound in the middle, it is (m3 - m2) less the mean of
    (m2 - m1) and (m4 - m3): 0 for any parabola. Runs are at most a quarter of the way to the start, where the loss
    falls too steeply for that. Standard error over windows; at the stride of `position_losses` the 128 positions around
    a bound are other text in each, though what is subtracted as a token's late loss comes from windows that overlap.

    "none": False of a step beyond 3 standard errors and `STEP_NATS`; else True, or None (undecided) where 3 standard
    errors are more than `UNSURE_NATS` or there is a single window.

    matched: `residuals` of the scores, computed when not given.
    """
    half = min(HALF, bound // 4, (scores.length - bound) // 2)
    assert half > 0, f"{bound} has nothing around it"
    span = slice(bound - 2 * half, bound + 2 * half)
    rows = (residuals(scores) if matched is None else matched)[:, span]
    rows = rows[~np.isnan(rows).any(1)]
    content_matched = len(rows) >= FEW
    if not content_matched:
        rows = scores.losses[:, span]
    m1, m2, m3, m4 = rows.reshape(len(rows), 4, half).mean(2).T
    found = _mean((m3 - m2) - ((m2 - m1) + (m4 - m3)) / 2)
    step, error = found["mean"], found["standard_error"]
    none: bool | None = None
    if error is not None and abs(step) > max(3 * error, STEP_NATS):
        none = False
    elif error is not None and 3 * error <= UNSURE_NATS:
        none = True
    return {
        "bound": bound,
        "half": half,
        "windows": len(rows),
        "content_matched": content_matched,
        "step": step,
        "standard_error": error,
        "none": none,
    }


def model_bounds(config: ModelConfig, *, chunk: int = 512, length: int = LENGTH) -> dict[str, int]:
    """Where something begins or ends: position -> by name, as far as it lies within `length`.

    The window is full; the visible groups outnumber Top-K, or the candidate pool; a prefill chunk ends.
    """
    bounds = {"window": config.sliding_window}
    ratios = sorted({role.ratio for role in config.backbone_roles if role.ratio})
    for ratio in ratios:
        bounds[f"top-k x ratio {ratio}"] = config.index_topk * ratio
    if config.candidate_source_layer_id >= 0:
        ratio = config.roles[config.candidate_source_layer_id].ratio
        bounds["candidates"] = config.candidate_topk_blocks * config.candidate_block_size * ratio
    for n, bound in enumerate(range(chunk, length, chunk), 1):
        bounds[f"chunk {n}"] = bound
    return {name: bound for name, bound in bounds.items() if 4 <= bound <= length - 4}


def position_report(
    scores: PositionLosses, bounds: Mapping[str, int], short: PositionLosses | None = None
) -> dict[str, Any]:
    """Buckets, the late-against-early comparison, and the step at each bound; plain numbers for JSON.

    "no_step": False where there is a step at a bound, None where none is found and some bound is undecided.

    short: from `beginnings`; bounds that lie well inside them are judged by them, for they are many.
    """
    matched = residuals(scores)
    reach = 0 if short is None else short.length - 2 * HALF
    near = None if short is None else residuals(short, scores)
    steps = {
        name: step_at(scores, bound, matched) if short is None or bound > reach else step_at(short, bound, near)
        for name, bound in bounds.items()
    }
    verdicts = [step["none"] for step in steps.values()]
    return {
        "length": scores.length,
        "windows": len(scores.losses),
        "buckets": bucket_losses(scores),
        "late_against_early": paired_change(scores),
        "steps": steps,
        "no_step": None if None in verdicts and False not in verdicts else all(verdicts),
    }


def curve(rows: Floats, width: int = HALF) -> tuple[Floats, Floats, Floats]:
    """(middle, mean, standard error) of runs of `width` positions over windows, NaNs left out; the error as if windows
    did not overlap."""
    runs = rows.shape[1] // width
    cut = rows[:, : runs * width].reshape(len(rows), runs, width)
    known = np.asarray(~np.isnan(cut).any(axis=2))
    means = np.where(known[..., None], cut, 0).mean(2)
    count = known.sum(0)
    mean = means.sum(0) / np.maximum(count, 1)
    spread = np.where(known, (means - mean) ** 2, 0).sum(0) / np.maximum(count - 1, 1)
    error = np.sqrt(spread / np.maximum(count, 1))
    middle = (np.arange(runs) + 0.5) * width
    return middle, np.where(count > 0, mean, np.nan), np.where(count > 1, error, np.nan)


def _mean(samples: Floats) -> dict[str, Any]:
    mean, error = mean_and_error(samples)
    return {"mean": mean, "standard_error": error}
