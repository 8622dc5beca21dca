"""Divergences that are the right numbers in the wrong places.

A layout of the last dimension is an index p with `ours[..., i] == theirs[..., p[i]]`. Named layouts are tried first, on
the divergent rows only; then blocks in any order; then moves of whole rows and transpositions of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.analysis.diff_case import SCREEN_ROWS, Case, Cause
from rorqual.analysis.diff_order import QUANTISED
from rorqual.analysis.diff_tolerance import rows_of
from rorqual.formats.fp4 import unpack_nibbles

MOST_DIVISORS = 48
TILES = (128, 64, 32, 16)
SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4)
NEAR = 0.2
"""Largest relative RMS rest that still is the same numbers after another quantisation."""
FAR = 0.5
"""Least relative RMS error, over the elements that a layout moves, of what a layout may explain nearly."""


@dataclass(frozen=True, slots=True)
class Layout:
    what: str
    detail: str
    index: Tensor


def divisors(n: int) -> list[int]:
    """Divisors of n from 2 to n / 2, at most MOST_DIVISORS."""
    return [d for d in range(2, n // 2 + 1) if n % d == 0][:MOST_DIVISORS]


def rotary_widths(width: int) -> list[int]:
    """Plausible numbers of rotary channels: even divisors and powers of two, 4 to `width`."""
    powers = {1 << p for p in range(2, width.bit_length()) if 1 << p <= width}
    return sorted({d for d in (*divisors(width), width) if d % 2 == 0 and d >= 4} | powers)


def mixing(count: int) -> Tensor:
    """0, n/2, 1, n/2 + 1, ...: reads two halves in turns."""
    return torch.arange(count).reshape(2, count // 2).T.flatten()


def layouts(width: int, *, packed: bool, rotary: bool) -> Iterator[Layout]:
    """Named layouts of a last dimension. packed: the elements are the nibbles of packed bytes, low first. rotary: some
    trailing channels may be rotated."""
    whole = torch.arange(width)
    if width % 2 == 0 and width > 2:
        detail = "the nibbles of every byte" if packed else "the elements of every pair (2i, 2i+1)"
        yield Layout("nibble order", f"{detail} are swapped", whole.reshape(-1, 2).flip(1).flatten())
        if packed:
            halves = "a byte of theirs holds elements i and i + n/2, one of ours 2i and 2i + 1"
            yield Layout("nibble order", halves, mixing(width).argsort())
    for d in rotary_widths(width) if rotary else ():
        yield from _rotary_layouts(width, d, whole[: width - d])
    for n in divisors(width):
        index = whole.reshape(width // n, n).T.flatten()
        yield Layout(
            "axes transposed", f"the last dimension is {n} x {width // n} in ours, {width // n} x {n} in theirs", index
        )
    yield Layout("reversed", "the last dimension runs backwards", whole.flip(0))


def _rotary_layouts(width: int, d: int, rest: Tensor) -> Iterator[Layout]:
    start, half = width - d, d // 2
    where = f"the last {d} channels" if d < width else f"all {d} channels"
    what = "interleaved or half RoPE"
    mixed = torch.cat((rest, start + mixing(d)))
    yield Layout(what, f"{where} are pairs (2i, 2i+1) in ours and halves (i, i+{half}) in theirs", mixed)
    apart = torch.cat((rest, start + mixing(d).argsort()))
    yield Layout(what, f"{where} are halves (i, i+{half}) in ours and pairs (2i, 2i+1) in theirs", apart)
    if d == width:
        return
    swapped = torch.cat((rest, torch.arange(start, width).reshape(-1, 2).flip(1).flatten()))
    yield Layout("RoPE pairs swapped", f"real and imaginary part change places in {where}", swapped)
    lead = torch.arange(width).roll(-d)
    yield Layout("rotary channels first", f"{where} of ours are the first {d} of theirs", lead)
    yield Layout("rotary channels last", f"the first {d} channels of ours are the last {d} of theirs", lead.argsort())


def elements(case: Case, x: Tensor) -> Tensor:
    """Nibbles of a packed tensor, the tensor itself otherwise."""
    return unpack_nibbles(x) if case.parsed.part == ".packed" else x


def find_layout(case: Case) -> Cause | None:
    """A rearrangement within rows that makes every divergent row agree."""
    if case.ours.dim() < 2:
        return None
    rows = case.rows
    ours, theirs = elements(case, case.ours[rows]), elements(case, case.theirs[rows])
    if theirs.dim() > 2 and (found := _inner_axes(case, ours, theirs)):
        return found
    packed, rotary = case.parsed.part == ".packed", case.parsed.last in QUANTISED or not case.parsed.known
    for layout in layouts(ours.shape[-1], packed=packed, rotary=rotary):
        few = theirs[:SCREEN_ROWS, ..., layout.index]
        if case.equal(ours[:SCREEN_ROWS], few) and case.equal(ours, theirs[..., layout.index]):
            return Cause(kind="permutation", what=layout.what, detail=layout.detail)
    return _blocks(case, ours, theirs)


def _inner_axes(case: Case, ours: Tensor, theirs: Tensor) -> Cause | None:
    """Rows that are matrices: transposed, or their first axis (copies) in another order."""
    n, d = ours.shape[-2:]
    turned = theirs.reshape(*theirs.shape[:-2], d, n).transpose(-1, -2)
    if min(n, d) > 1 and case.equal(ours, turned):
        if case.parsed.last.endswith("_comb"):
            return Cause(
                kind="permutation", what="comb transposed", detail="rows of ours are 'from', rows of theirs are 'to'"
            )
        detail = f"each row is {n} x {d} copy-major in ours and channel-major ({d} x {n}) in theirs"
        return Cause(kind="permutation", what="axes transposed", detail=detail)
    few = slice(SCREEN_ROWS)
    order = match_order(ours[few], theirs[few], ours.dim() - 2)
    if order is not None and case.equal(ours, theirs.index_select(-2, order)):
        return Cause(kind="permutation", what="copies in another order", detail=_order_text(order, f"slice of {d}"))
    return None


def _blocks(case: Case, ours: Tensor, theirs: Tensor) -> Cause | None:
    """Blocks of the last dimension (heads, groups, channels) in any order, the largest blocks first."""
    width = ours.shape[-1]
    for size in (*reversed(divisors(width)), 1):
        # Single channels of one or two rows match by chance: quantised rows hold few distinct values.
        if len(ours) * size < 4:
            continue
        a, b = (x.reshape(*x.shape[:-1], width // size, size) for x in (ours, theirs))
        few = slice(SCREEN_ROWS)
        order = match_order(a[few], b[few], a.dim() - 2)
        if order is None or not case.equal(a[few], b[few].index_select(-2, order)):
            continue
        if case.equal(a, b.index_select(-2, order)):
            what = "heads or groups in another order" if size > 1 else "channels in another order"
            return Cause(
                kind="permutation", what=what, detail=_order_text(order, f"block of {size}" if size > 1 else "channel")
            )
    return None


def match_order(ours: Tensor, theirs: Tensor, axis: int) -> Tensor | None:
    """The order of `theirs` along `axis` that could be `ours`, by a fixed random projection of all else; None when it
    is the order they already have. Whoever asks must check it."""
    a, b = (
        x.movedim(axis, 0).reshape(x.shape[axis], -1).double().nan_to_num(posinf=1e3, neginf=-1e3)
        for x in (ours, theirs)
    )
    at = torch.arange(1, a.shape[1] + 1, dtype=torch.float64)
    mix = torch.cos(at * at * 0.7390851) + 1.5
    order = torch.empty(a.shape[0], dtype=torch.int64)
    order[torch.argsort(a @ mix, stable=True)] = torch.argsort(b @ mix, stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order


def _order_text(order: Tensor, unit: str) -> str:
    moved = (order != torch.arange(len(order))).nonzero().flatten()
    shown = ", ".join(f"{i} <- {int(order[i])}" for i in moved[:6].tolist())
    more = ", ..." if len(moved) > 6 else ""
    return f"{len(moved)} of {len(order)} moved, each a {unit} (ours <- theirs: {shown}{more})"


def near_layout(case: Case) -> Cause | None:
    """As `find_layout`, for values that were quantised after they were rearranged: equal but for rounding steps."""
    if case.parsed.last not in QUANTISED or case.ours.dim() != 2 or not case.ours.is_floating_point():
        return None
    rows = case.rows[:SCREEN_ROWS]
    ours, theirs = case.ours[rows], case.theirs[rows]
    best: tuple[float, Layout] | None = None
    for layout in layouts(ours.shape[-1], packed=False, rotary=True):
        moved = layout.index != torch.arange(len(layout.index))
        size = ours[:, moved].square().sum()
        before = float((ours - theirs)[:, moved].square().sum() / size) ** 0.5
        # Rounding may also have changed what did not move, so the rest is taken over everything.
        rest = float((ours - theirs[:, layout.index]).square().sum() / ours.square().sum()) ** 0.5
        if before > FAR and rest < NEAR and (best is None or rest < best[0]):
            best = rest, layout
    if best is None:
        return None
    rest, layout = best
    return Cause(
        kind="permutation",
        what=layout.what,
        detail=f"{layout.detail} (before quantisation; {rest:.1%} relative RMS is left)",
    )


def find_moved_rows(case: Case) -> Cause | None:
    """Whole rows elsewhere: one or a few positions late or early, or in any order."""
    rows, count = case.rows, case.ours.shape[0]
    if count < 2:
        return None
    for shift in SHIFTS:
        inside = rows[(rows - shift >= 0) & (rows - shift < count)]
        source, target = case.ours[inside - shift], case.theirs[inside]
        # A neighbour that is equal anyway (all zero, all masked) explains nothing, nor do a few numbers.
        if target.numel() < 8 or len(inside) * 2 < len(rows) or not case.equal(source, target):
            continue
        side = "late" if shift > 0 else "early"
        detail = (
            f"row {int(inside[0])} of theirs is row {int(inside[0]) - shift} of ours, and so on for {len(inside)} rows"
        )
        return Cause(kind="shift", what=f"rows {abs(shift)} {side}", detail=detail)
    order = match_order(case.ours, case.theirs, 0)
    if order is not None and case.ours[0].numel() > 1 and case.equal(case.ours, case.theirs[order]):
        return Cause(kind="permutation", what="rows in another order", detail=_order_text(order, "row"))
    return None


def find_moved_columns(case: Case) -> Cause | None:
    """The last dimension one or a few places late or early."""
    if case.ours.dim() < 2:
        return None
    ours, theirs = case.ours[case.rows], case.theirs[case.rows]
    width = ours.shape[-1]
    for shift in SHIFTS:
        kept = width - abs(shift)
        if kept * len(ours) < 8 or kept < 2:
            continue
        a = ours[..., :kept] if shift > 0 else ours[..., -kept:]
        b = theirs[..., -kept:] if shift > 0 else theirs[..., :kept]
        if case.equal(a, b):
            side = "late" if shift > 0 else "early"
            return Cause(
                kind="shift",
                what=f"columns {abs(shift)} {side}",
                detail=f"element j of theirs is element j {-shift:+d} of ours",
            )
    return None


def find_transposed(case: Case) -> Cause | None:
    """A matrix, or each of its tiles, transposed: weights and tile scales."""
    if case.ours.dim() != 2:
        return None
    ours, theirs = case.ours, case.theirs
    n, k = ours.shape
    if min(n, k) > 1 and case.equal(ours, theirs.reshape(k, n).T):
        what = "transposed tile scales" if case.name.endswith(".scale") else "transposed"
        how = (
            "rows and columns change places"
            if n == k
            else f"theirs are the numbers of a {k} x {n} tensor, read as {n} x {k}"
        )
        return Cause(kind="permutation", what=what, detail=how)
    for tile in TILES:
        if n % tile or k % tile:
            continue
        turned = theirs.reshape(n // tile, tile, k // tile, tile).transpose(1, 3).reshape(n, k)
        if case.equal(ours, turned):
            return Cause(kind="permutation", what="transposed tile", detail=f"each {tile} x {tile} tile is transposed")
    return None


def find_tile_scales(case: Case) -> Cause | None:
    """Dequantised weights whose tile scales stand at the wrong tiles: one power of two a 32 x 32 tile."""
    if case.ours.dim() != 2 or not case.ours.is_floating_point():
        return None
    n, k = case.ours.shape
    tile = 32
    if n % tile or k % tile or min(n, k) < 2 * tile:
        return None
    a, b = (x.reshape(n // tile, tile, k // tile, tile).transpose(1, 2).flatten(2) for x in (case.ours, case.theirs))
    ratio = (a * b).sum(-1) / b.square().sum(-1)
    # One factor for the whole tensor is no matter of tiles.
    if bool(torch.allclose(ratio, ratio[0, 0], rtol=1e-3)):
        return None
    if not bool((ratio.isfinite() & (ratio > 0)).all()) or not case.equal(rows_of(a), rows_of(b * ratio[..., None])):
        return None
    if n == k and bool(torch.allclose(ratio * ratio.T, torch.ones_like(ratio), rtol=1e-3)):
        return Cause(
            kind="permutation", what="transposed tile scales", detail="tile (i, j) carries the scale of tile (j, i)"
        )
    return Cause(
        kind="scale",
        what="tile scales",
        detail=f"each {tile} x {tile} tile is off by a factor of its own: misplaced or misread scales",
    )
