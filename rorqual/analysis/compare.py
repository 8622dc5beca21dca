"""Comparing tensors the way the goldens ask: tolerances by numerics, exact integers except at marked near-ties."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FP32_TOLERANCE = 1e-4
"""|a - b| <= t + t |b| in fp32 numerics."""
FP32_MARGIN = 1e-5
"""Integer rows whose selection margin is below this may differ in fp32 numerics."""
NATIVE_RMS = 4e-3
"""Relative RMS error allowed in native numerics, or twice the noise that the case states."""
NATIVE_MARGIN = 1e-2
"""Rows with a selection margin below this are counted, not compared, in native numerics."""
NATIVE_BYTES = 0.99
"""Share of cache bytes that must be equal in native numerics."""

MARGINS = {
    "topk_idxs": "topk_margin",
    "moe_indices": "moe_margin",
    "moe_weights": "moe_margin",
    "candidates": "candidate_margin",
}
CACHE_BYTES = re.compile(
    r"(window_kv\.(codes|scale)|window_codes_last|compress_kv\.(packed|scale)|index_k\.(packed|scale))$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One tensor's comparison. `error` is in units of `unit`; `near_ties` rows were let differ."""

    name: str
    ok: bool
    error: float
    unit: str
    note: str = ""
    near_ties: int = 0


def group_of(name: str) -> str:
    """A tensor's group: its name without layer and image numbers.

    >>> group_of("decode.layers.3.topk_idxs"), group_of("spec.mtp.0.x_in")
    ('decode.layers.*.topk_idxs', 'spec.mtp.*.x_in')
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def same_shape(name: str, ours: Tensor | None, theirs: Tensor) -> Outcome | None:
    """A failed outcome when a tensor is absent or has another shape or dtype."""
    if ours is None:
        return Outcome(name=name, ok=False, error=float("inf"), unit="absent", note="not produced")
    if ours.shape != theirs.shape:
        note = f"shape {list(ours.shape)} against {list(theirs.shape)}"
        return Outcome(name=name, ok=False, error=float("inf"), unit="shape", note=note)
    if ours.dtype != theirs.dtype:
        return Outcome(
            name=name, ok=False, error=float("inf"), unit="dtype", note=f"{ours.dtype} against {theirs.dtype}"
        )
    return None


def near_tie_rows(name: str, stored: Mapping[str, Tensor], limit: float) -> Tensor | None:
    """bool [rows] of a selection whose stored margin is below `limit`, or None when it has no margin."""
    stem, _, last = name.rpartition(".")
    margin = stored.get(f"{stem}.{MARGINS[last]}") if last in MARGINS else None
    return None if margin is None else margin < limit


def fp32_outcome(name: str, ours: Tensor | None, theirs: Tensor, stored: Mapping[str, Tensor]) -> Outcome:
    """Floats within the tolerance, integers equal except rows at a near-tie."""
    wrong = same_shape(name, ours, theirs)
    if wrong is not None or ours is None:
        assert wrong is not None
        return wrong
    ties = near_tie_rows(name, stored, FP32_MARGIN)
    if not theirs.is_floating_point():
        kept = min(theirs.dim(), 1 if ties is None else ties.dim())
        differing = ours != theirs
        differing = differing.flatten(kept).any(-1) if theirs.dim() > kept else differing
        allowed = torch.zeros_like(differing) if ties is None else ties & differing
        count = int((differing & ~allowed).sum())
        return Outcome(name=name, ok=not count, error=count, unit="rows", near_ties=int(allowed.sum()))
    error = excess(ours.float(), theirs.float())
    if ties is not None and error.shape[: ties.dim()] == ties.shape:
        error[ties] = 0
    worst = float(error.max()) if error.numel() else 0.0
    return Outcome(name=name, ok=worst <= 1, error=worst * FP32_TOLERANCE, unit="abs/(1+|b|)")


def excess(ours: Tensor, theirs: Tensor) -> Tensor:
    """|a - b| / (t + t |b|); equal infinities count as equal, unequal ones and NaN as inf."""
    error = (ours - theirs).abs() / (FP32_TOLERANCE + FP32_TOLERANCE * theirs.abs())
    error = torch.where(ours == theirs, torch.zeros_like(error), error)
    return error.nan_to_num(nan=float("inf"), posinf=float("inf"))


def native_outcome(name: str, ours: Tensor | None, theirs: Tensor, noise: float, near_ties: Tensor | None) -> Outcome:
    """Relative RMS error within max(2 x noise, 4e-3); cache bytes equal on 99 %, other integers on all.

    near_ties: bool [rows], rows that hang on a selection made by less than NATIVE_MARGIN. Those of them that disagree
    are left out and counted; those that agree stay in.
    """
    wrong = same_shape(name, ours, theirs)
    if wrong is not None or ours is None:
        assert wrong is not None
        return wrong
    bound, count = max(2 * noise, NATIVE_RMS), 0
    if near_ties is not None and theirs.dim() and theirs.shape[0] == near_ties.shape[0]:
        dropped = near_ties & disagreeing_rows(ours, theirs, bound)
        ours, theirs, count = ours[~dropped], theirs[~dropped], int(dropped.sum())
    if not theirs.is_floating_point():
        equal = float((ours == theirs).float().mean()) if theirs.numel() else 1.0
        need = NATIVE_BYTES if CACHE_BYTES.search(name) else 1.0
        return Outcome(name=name, ok=equal >= need, error=1 - equal, unit="unequal", near_ties=count)
    error = float(gaps(ours, theirs).square().mean().sqrt()) / scale_of(theirs) if theirs.numel() else 0.0
    return Outcome(name=name, ok=error <= bound, error=error, unit="rms", near_ties=count)


def gaps(ours: Tensor, theirs: Tensor) -> Tensor:
    """ours - theirs in fp64, 0 where equal (equal infinities included)."""
    a, b = ours.double(), theirs.double()
    return torch.where(a == b, torch.zeros_like(a), a - b)


def scale_of(theirs: Tensor) -> float:
    """RMS of the finite values, 1 where that is 0."""
    finite = theirs.double()[theirs.isfinite()]
    return (float(finite.square().mean().sqrt()) if finite.numel() else 0.0) or 1.0


def disagreeing_rows(ours: Tensor, theirs: Tensor, bound: float) -> Tensor:
    """bool [rows] whose own RMS error, in units of the tensor's RMS, is above the bound; integers: any inequality."""
    if not theirs.is_floating_point():
        return (ours != theirs).flatten(1).any(1) if theirs.dim() > 1 else ours != theirs
    gap = gaps(ours, theirs)
    rows = gap.flatten(1).square().mean(1).sqrt() if theirs.dim() > 1 else gap.abs()
    return rows / scale_of(theirs) > bound
