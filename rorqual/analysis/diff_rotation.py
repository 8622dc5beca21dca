"""RoPE gone wrong: the rotary channels of window KV, main KV or index keys, turned by another angle.

Ours turn the pair (2i, 2i+1) of the trailing D channels by position x f_i, and f_0 = 1 whatever the theta (SPEC 4). So
the product ours x conj(theirs) of the first pair turns by 2 radians a position when theirs rotate the other way, by 1
when they do not rotate, and stands still but for a constant when their positions are off. Other pairs must turn
evenly too. Theirs may also pair channel i with i + D/2: then the first element of both, turned back, must agree. None
of this asks for theta, and all of it survives quantisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.analysis.diff_case import Case, Cause
from rorqual.analysis.diff_layouts import rotary_widths
from rorqual.analysis.diff_order import ROTATED

# R rows, C channels, P pairs of the rotary channels

LEAST_ROWS = 12
"""Fewer rows turn evenly by chance."""
CHANGED = 0.25
"""Relative RMS error from which a channel counts as rotated otherwise and not as quantised otherwise."""
COHERENT = 0.9
"""Least share of a pair's length that adds up when turned back by the right angle; FP4 noise costs some 3 %."""


def find_rotation(case: Case) -> Cause | None:
    """What angle separates the dumps, if one does."""
    n = case.parsed
    if n.last not in ROTATED or n.part or n.phase or case.ours.dim() != 2 or len(case.ours) < LEAST_ROWS:
        return None
    ours, theirs = case.ours, case.theirs
    if not ours.is_floating_point():
        return None
    error = (ours - theirs).square().mean(0).sqrt() / ours.square().mean(0).sqrt().clamp(min=1e-30)
    changed = (error > CHANGED).nonzero().flatten()
    if not len(changed) or not bool(ours.isfinite().all() and theirs.isfinite().all()):
        return None
    width = ours.shape[1]
    widths = [d for d in rotary_widths(width) if d >= width - int(changed[0])]
    ratio = rows_a_group(case)
    positions = torch.arange(len(ours), dtype=torch.float64) * ratio
    for d in widths[:1]:
        if found := _turned(ours[:, width - d :], theirs[:, width - d :], positions, ratio):
            return found
    for d in widths:
        if _half_pairs(ours[:, width - d :], theirs[:, width - d :], positions):
            detail = f"the last {d} channels are rotated as pairs (2i, 2i+1) in ours and as (i, i+{d // 2}) in theirs"
            return Cause(kind="permutation", what="interleaved or half RoPE", detail=detail)
    return None


def rows_a_group(case: Case) -> int:
    """Positions a row stands for: the compression ratio, from the rows of the layer's other tensors."""
    for last in ("attn_in", "x_in", "window_kv", "attn_out"):
        other = case.look(case.parsed.sibling(last))[0]
        if other is not None:
            return max(1, round(other.shape[0] / case.ours.shape[0]))
    return 1


def _turned(ours_RD: Tensor, theirs_RD: Tensor, positions: Tensor, ratio: int) -> Cause | None:
    d = ours_RD.shape[1]
    a, b = (torch.complex(x[:, 0::2].contiguous(), x[:, 1::2].contiguous()) for x in (ours_RD, theirs_RD))
    z_RP = a * b.conj()
    length_P = (a.abs().square().sum(0) * b.abs().square().sum(0)).sqrt().clamp(min=1e-30)
    even = torch.fft.fft(z_RP, n=16 * len(positions), dim=0).abs().amax(0) / length_P
    still = z_RP.sum(0).abs() / length_P
    if float((even * length_P).sum() / length_P.sum()) < COHERENT:
        return None
    where = f"the last {d} channels"
    claims = {
        2.0: ("RoPE rotated the other way", f"theirs turn {where} by minus the angle (the inverse rotation)"),
        1.0: ("RoPE missing", f"theirs do not rotate {where}"),
        -1.0: ("RoPE applied twice", f"theirs turn {where} by twice the angle"),
    }
    if ratio > 1:
        claims[(ratio - 1) / ratio] = (
            "RoPE position",
            f"theirs rotate group g as position g; ours as g x {ratio}, its first token",
        )
    for speed, (what, detail) in claims.items():
        turn = torch.polar(torch.ones_like(positions), -speed * positions)
        if float((z_RP[:, 0] * turn).sum().abs() / length_P[0]) > COHERENT:
            return Cause(kind="permutation", what=what, detail=detail)
    if float(still[0]) < COHERENT:
        return None
    offset = -float(z_RP[:, 0].sum().angle())
    if abs(offset) > 0.5 and abs(offset - round(offset)) < 0.1:
        return Cause(
            kind="shift", what="RoPE position", detail=f"theirs rotate {where} as if {round(offset):+d} positions on"
        )
    if abs(offset) < 0.1 and bool(((even > COHERENT) & (still < COHERENT - 0.1)).any()):
        detail = f"later pairs of {where} turn at another speed: another theta, or YaRN on one side only"
        return Cause(kind="error", what="RoPE frequencies", detail=detail)
    return None


def _half_pairs(ours_RD: Tensor, theirs_RD: Tensor, positions: Tensor) -> bool:
    half = ours_RD.shape[1] // 2
    norm_a, norm_b = ours_RD.norm(dim=1), theirs_RD.norm(dim=1)
    if float((norm_a - norm_b).abs().sum() / norm_a.sum()) > CHANGED / 2:
        return False
    back = torch.polar(torch.ones_like(positions), -positions)
    a = (torch.complex(ours_RD[:, 0], ours_RD[:, 1]) * back).real
    b = (torch.complex(theirs_RD[:, 0], theirs_RD[:, half]) * back).real
    return float((a @ b) / (a.norm() * b.norm()).clamp(min=1e-30)) > COHERENT
