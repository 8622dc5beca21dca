"""Divergences of one code step: a value that stood near a rounding boundary and fell on the other side."""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.analysis.diff_case import Case, Cause
from rorqual.analysis.diff_order import QUANTISED
from rorqual.errors import FormatError
from rorqual.formats.codec import quantize
from rorqual.formats.fp4 import E2M1_BY_BYTE, encode_e2m1, unpack_nibbles
from rorqual.formats.fp8 import E4M3_BY_BYTE, decode_e4m3, decode_e8m0, encode_e4m3
from rorqual.formats.spec import FORMATS, NumberFormat

FEW = 0.05
"""Above this share of elements, steps are no accident: another rounding rule, or noise before the quantiser."""


def is_few(case: Case) -> bool:
    return float(case.wrong.float().mean()) <= FEW


def find_step(case: Case) -> Cause | None:
    """Codes, scales or dequantised values that differ by one code each."""
    n = case.parsed
    if n.last not in QUANTISED:
        return None
    what, detail = "", ""
    if n.part or n.last == "window_codes_last":
        steps = code_steps(case, "e2m1" if n.part == ".packed" else "e4m3" if n.part != ".scale" else "scale")
        if not bool((steps <= 1).all()):
            return None
        count = int((steps == 1).sum())
        what = "scale byte" if n.part == ".scale" else ""
        detail = f"{count} of {steps.numel()} codes are one step off, none further"
        if not count:
            detail = "the same magnitudes, but the sign of zero differs"
    elif case.ours.is_floating_point():
        if not values_one_step(case):
            return None
        count, form = int(case.wrong.sum()), QUANTISED[n.last]
        detail = f"{count} of {case.wrong.numel()} values stand on the neighbouring code of {form}"
    else:
        return None
    if not is_few(case):
        what, detail = (
            "rounding rule",
            f"{detail}; too many for ties: another rounding or scale rule, or noise before it",
        )
    return Cause(kind="quantisation", what=what, detail=detail)


def code_steps(case: Case, code: str) -> Tensor:
    """int64: distance of codes in their order of magnitude; a scale byte's order is its own."""
    ours, theirs = case.ours, case.theirs
    if code == "scale":
        return (ours - theirs).abs()
    if code == "e2m1":
        ours, theirs = unpack_nibbles(ours), unpack_nibbles(theirs)
    top = 8 if code == "e2m1" else 128
    return (ordinal(ours, top) - ordinal(theirs, top)).abs()


def ordinal(code: Tensor, top: int) -> Tensor:
    """Sign-magnitude codes as integers in order of value; both zeros are 0."""
    code = code.to(torch.int64)
    return torch.where(code < top, code, top - code)


def values_one_step(case: Case) -> bool:
    """Whether all out-of-tolerance groups lie on one grid and differ by one code at most, or on grids of neighbouring
    scales and differ by one coarse step."""
    fmt = FORMATS[QUANTISED[case.parsed.last]]
    if case.ours.shape[-1] % fmt.group:
        return False
    bad = case.wrong.unflatten(-1, (-1, fmt.group)).any(-1)
    ours, theirs = (x.float().unflatten(-1, (-1, fmt.group))[bad] for x in (case.ours, case.theirs))
    try:
        scales = [own_scales(case, side, fmt)[bad] for side in (0, 1)]
    except FormatError:
        return False
    done = torch.zeros(len(ours), dtype=torch.bool)
    done = torch.zeros(len(ours), dtype=torch.bool)
    # Rounded values may ask for half the scale that they were kept at, and noise above the largest for twice as much.
    for scale in (f * s for f in (1, 2, 0.5) for s in scales):
        codes, on_grid = zip(*(_on_grid(x, scale[:, None], fmt) for x in (ours, theirs)), strict=True)
        done |= on_grid[0] & on_grid[1] & ((codes[0] - codes[1]).abs() <= 1).all(-1)
    own = [_on_grid(x, scale[:, None], fmt)[1] for x, scale in zip((ours, theirs), scales, strict=True)]
    near = (scales[0] / scales[1]).log2().abs() <= (1 if fmt.scale == "e8m0" else 0.2)
    coarse = 2.2 * fmt.tolerance * torch.maximum(ours.abs().amax(-1), theirs.abs().amax(-1))
    rescaled = near & (scales[0] != scales[1]) & own[0] & own[1] & ((ours - theirs).abs().amax(-1) <= coarse)
    return bool((done | rescaled).all())


def own_scales(case: Case, side: int, fmt: NumberFormat) -> Tensor:
    """fp32 [rows, groups]: the dump's own scale bytes where it has them, else those that its values ask for."""
    decode = decode_e4m3 if fmt.scale == "e4m3" else decode_e8m0
    stored = case.look(case.parsed.stem + ".scale")[side]
    values = (case.ours, case.theirs)[side]
    if stored is not None and stored.shape == (*values.shape[:-1], values.shape[-1] // fmt.group):
        return decode(stored.clamp(0, 255).to(torch.uint8))
    return decode(quantize(values.float(), fmt).scales)


def _on_grid(values: Tensor, scale: Tensor, fmt: NumberFormat) -> tuple[Tensor, Tensor]:
    """Codes in order of value under `scale`, and bool [groups]: whether they stand for exactly these values."""
    e2m1 = fmt.value == "e2m1"
    encode, top = (encode_e2m1, 8) if e2m1 else (encode_e4m3, 128)
    table = E2M1_BY_BYTE[:16, 0] if e2m1 else E4M3_BY_BYTE
    code = encode((values / scale).nan_to_num()).to(torch.int64)
    gap = (table[code] * scale - values).abs()
    return ordinal(code, top), (gap <= 1e-5 * values.abs().amax(-1, keepdim=True) + 1e-30).all(-1)
