"""`rorqual diff` finds a planted mistake, at its place, and calls it by its name; of equal dumps it says nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from rorqual.analysis.diff import diff
from rorqual.analysis.diff_dumps import Renames, compile_rule, open_dump, read_renames
from rorqual.analysis.diff_order import dimensions, order_key, parse
from rorqual.analysis.diff_report import Report
from rorqual.errors import InputError
from rorqual.formats.codec import dequantize, fake_quantize, quantize
from rorqual.formats.spec import FORMATS

Dump = dict[str, Tensor]
Change = Callable[[Tensor], Tensor]
ROTARY, THETA = 16, 160_000.0


@pytest.fixture(scope="module")
def text(goldens: Path) -> Dump:
    return load_file(goldens / "fp32-text" / "expected.safetensors")


@pytest.fixture(scope="module")
def native(goldens: Path) -> Dump:
    return load_file(goldens / "native-text" / "expected.safetensors")


def noisy(dump: Dump, relative: float = 1e-7) -> Dump:
    g = torch.Generator().manual_seed(0)

    def one(x: Tensor) -> Tensor:
        return (
            x + relative * x.abs().clamp(max=1) * torch.randn(x.shape, generator=g) if x.dtype == torch.float32 else x
        )

    return {name: one(x) for name, x in dump.items()}


def compare(dump: Dump, name: str, change: Change) -> Report:
    """Diff of a dump and a noisy copy of it, one tensor changed."""
    theirs = noisy(dump)
    theirs[name] = change(dump[name].clone())
    return diff(dump, theirs)


def verdict(report: Report) -> tuple[str, int | None, str, str]:
    assert report.first is not None
    assert report.cause is not None
    return report.first.name, report.first.row, report.cause.kind, report.cause.what


def swap_pairs(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)


def halves_of_bytes(x: Tensor) -> Tensor:
    """Bytes that hold elements i and i + n/2."""
    nibbles = torch.stack((x & 15, x >> 4), -1).flatten(-2)
    low, high = nibbles.chunk(2, -1)
    return low | (high << 4)


def to_halves(x: Tensor, d: int) -> Tensor:
    return torch.cat((x[..., :-d], x[..., -d::2], x[..., x.shape[-1] - d + 1 :: 2]), -1)


def to_pairs(x: Tensor, d: int) -> Tensor:
    return torch.cat((x[..., :-d], x[..., -d:].unflatten(-1, (2, d // 2)).transpose(-1, -2).flatten(-2)), -1)


def turn(x: Tensor, times: float, ratio: int = 1, start: float = 0.0, theta: float = THETA) -> Tensor:
    """Rotate the trailing pairs by `times` x (their position + start)."""
    x = x.double()
    position = torch.arange(len(x)).double() * ratio * times + start
    angle = position[:, None] * theta ** (-2 * torch.arange(ROTARY // 2).double() / ROTARY)
    a, b = x[:, -ROTARY::2], x[:, x.shape[1] - ROTARY + 1 :: 2]
    pairs = torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
    return torch.cat((x[:, :-ROTARY], pairs.flatten(1)), 1).float()


def turn_halves(x: Tensor) -> Tensor:
    """The same keys, rotated as (i, i + D/2) instead of (2i, 2i + 1)."""
    plain = turn(x, -1)
    mixed = torch.cat((plain[:, :-ROTARY], to_pairs(plain, ROTARY)[:, -ROTARY:]), 1)
    return to_halves(turn(mixed, 1), ROTARY)


def kept(x: Tensor, form: str) -> Tensor:
    found: Tensor = fake_quantize(x, FORMATS[form])
    return found


def next_code(x: Tensor, form: str) -> Tensor:
    packed = quantize(x, FORMATS[form])
    packed.codes[12, 3] ^= 1
    return dequantize(packed.codes, packed.scales, FORMATS[form])


def put(x: Tensor, where: tuple[int | slice, ...], value: float) -> Tensor:
    x[where] = value
    return x


def add(x: Tensor, where: tuple[int | slice, ...], value: float) -> Tensor:
    x[where] += value
    return x


HALF = "interleaved or half RoPE"
# name of the case: tensor, change, first divergent row, kind, what
PLANTED: dict[str, tuple[str, Change, int, str, str]] = {
    "nibbles of packed bytes": (
        "layers.3.compress_kv.packed",
        lambda x: (x >> 4) | (x << 4),
        0,
        "permutation",
        "nibble order",
    ),
    "nibbles in values": ("layers.3.compress_kv", swap_pairs, 0, "permutation", "nibble order"),
    "nibbles as halves": ("layers.1.index_k.packed", halves_of_bytes, 0, "permutation", "nibble order"),
    "halves, D 8": ("layers.3.window_kv", lambda x: to_halves(x, 8), 0, "permutation", HALF),
    "halves, D 16": ("layers.3.window_kv", lambda x: to_halves(x, 16), 0, "permutation", HALF),
    "halves, D 32": ("layers.1.index_k", lambda x: to_halves(x, 32), 0, "permutation", HALF),
    "pairs, D 16": ("layers.3.index_k", lambda x: to_pairs(x, 16), 0, "permutation", HALF),
    "halves, then quantised": (
        "layers.3.window_kv",
        lambda x: kept(to_halves(x, 64), "e4m3_e8m0_32"),
        0,
        "permutation",
        HALF,
    ),
    "rotated as halves": (
        "layers.3.window_kv",
        lambda x: kept(turn_halves(x), "e4m3_e8m0_32"),
        1,
        "permutation",
        HALF,
    ),
    "rotary channels first": (
        "layers.3.window_kv",
        lambda x: x.roll(16, 1),
        0,
        "permutation",
        "rotary channels first",
    ),
    "inverse rotation": (
        "layers.3.window_kv",
        lambda x: kept(turn(x, -2), "e4m3_e8m0_32"),
        1,
        "permutation",
        "RoPE rotated the other way",
    ),
    "inverse rotation, ratio 2": (
        "layers.1.compress_kv",
        lambda x: kept(turn(x, -2, 2), "e2m1_e4m3_16"),
        1,
        "permutation",
        "RoPE rotated the other way",
    ),
    "no rotation": (
        "layers.1.index_k",
        lambda x: kept(turn(x, -1, 2), "e2m1_e8m0_32"),
        1,
        "permutation",
        "RoPE missing",
    ),
    "group index as position": (
        "layers.1.compress_kv",
        lambda x: kept(turn(x, -0.5, 2), "e2m1_e4m3_16"),
        1,
        "permutation",
        "RoPE position",
    ),
    "one position on": ("layers.3.window_kv", lambda x: turn(x, 0, start=1), 0, "shift", "RoPE position"),
    "another theta": (
        "layers.3.window_kv",
        lambda x: turn(turn(x, -1), 1, theta=1e4),
        1,
        "error",
        "RoPE frequencies",
    ),
    "comb from and to": ("layers.3.attn_comb", lambda x: x.transpose(1, 2), 0, "permutation", "comb transposed"),
    "channel-major copies": (
        "layers.3.x_in",
        lambda x: x.transpose(1, 2).reshape(x.shape),
        0,
        "permutation",
        "axes transposed",
    ),
    "copies shuffled": ("layers.3.x_in", lambda x: x[:, [2, 0, 1, 3]], 0, "permutation", "copies in another order"),
    "heads shuffled": (
        "layers.3.index_weights",
        lambda x: x[:, [3, 0, 9, 1, 2, *range(4, 9), *range(10, 16)]],
        0,
        "permutation",
        "channels in another order",
    ),
    "groups shuffled": (
        "layers.3.attn_out",
        lambda x: x.unflatten(1, (4, 16))[:, [1, 0, 3, 2]].flatten(1),
        0,
        "permutation",
        "heads or groups in another order",
    ),
    "n-gram and head swapped": (
        "engram.hash_ids",
        lambda x: x.unflatten(-1, (3, 2)).transpose(-1, -2).flatten(-2),
        0,
        "permutation",
        "axes transposed",
    ),
    "rows shuffled": (
        "layers.3.ffn_in",
        lambda x: torch.cat((x[:20], x[20:40].flip(0), x[40:])),
        20,
        "permutation",
        "rows in another order",
    ),
    "rows one late": ("layers.3.ffn_out", lambda x: x.roll(1, 0), 0, "shift", "rows 1 late"),
    "one row twice": (
        "layers.3.ffn_out",
        lambda x: torch.cat((x[:50], x[49:-1])),
        50,
        "shift",
        "rows 1 late",
    ),
    "columns one late": (
        "layers.3.latent",
        lambda x: torch.cat((x[:, :1] * 0 + 9, x[:, :-1]), 1),
        0,
        "shift",
        "columns 1 late",
    ),
    "own group unseen": (
        "layers.3.index_score",
        lambda x: x.masked_fill(torch.eye(97, dtype=torch.bool), -torch.inf),
        0,
        "shift",
        "visibility",
    ),
    "indices from one": ("layers.3.topk_idxs", lambda x: torch.where(x >= 0, x + 1, x), 0, "shift", "indices"),
    "offsets left out": ("engram.hash_ids", lambda x: x - torch.arange(6) * 700, 0, "shift", "offset"),
    "a larger eps": ("layers.3.attn_pre", lambda x: x + 1e-3, 0, "error", "offset"),
    "a bias": ("layers.3.attn_in", lambda x: x + torch.linspace(-1, 1, 64), 0, "error", "offset"),
    "no 1/sqrt(d)": ("layers.3.index_score", lambda x: x * sqrt(32), 0, "scale", ""),
    "opposite sign": ("layers.3.attn_out", lambda x: -x, 0, "scale", ""),
    "no routed scaling": ("layers.3.moe_weights", lambda x: x / 1.5, 0, "scale", ""),
    "weights not normalised": (
        "layers.3.moe_weights",
        lambda x: x * torch.linspace(0.5, 0.9, 97)[:, None],
        0,
        "scale",
        "one a row",
    ),
    "norm weight": (
        "layers.3.attn_in",
        lambda x: x * torch.linspace(0.5, 2, 64),
        0,
        "scale",
        "one a channel",
    ),
    "bf16": ("layers.3.attn_in", lambda x: x.bfloat16(), 0, "precision", "bf16"),
    "sums in bf16": (
        "layers.3.attn_out",
        lambda x: x * (1 + 2e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))),
        0,
        "precision",
        "",
    ),
    "one code": ("layers.3.window_kv.codes", lambda x: add(x, (12, 3), 1), 12, "quantisation", ""),
    "one nibble": ("layers.3.compress_kv.packed", lambda x: x ^ put(x * 0, (12, 3), 16), 12, "quantisation", ""),
    "one scale": ("layers.3.window_kv.scale", lambda x: add(x, (5, 1), 1), 5, "quantisation", "scale byte"),
    "one E4M3 value": (
        "layers.3.window_kv",
        lambda x: next_code(x, "e4m3_e8m0_32"),
        12,
        "quantisation",
        "",
    ),
    "one main value": (
        "layers.3.compress_kv",
        lambda x: next_code(x, "e2m1_e4m3_16"),
        12,
        "quantisation",
        "",
    ),
    "one key value": ("layers.3.index_k", lambda x: next_code(x, "e2m1_e8m0_32"), 12, "quantisation", ""),
    "rounding down": (
        "layers.3.window_kv.codes",
        lambda x: x - (x & 2) // 2,
        0,
        "quantisation",
        "rounding rule",
    ),
    "experts in another order": (
        "layers.3.moe_indices",
        lambda x: x.flip(1),
        0,
        "permutation",
        "order of the selection",
    ),
    "another selection": (
        "layers.3.topk_idxs",
        lambda x: torch.cat((x[:60], torch.arange(8)[None].int(), x[61:])),
        60,
        "error",
        "another selection",
    ),
    "a few elements": ("layers.3.ffn_in", lambda x: add(x, (40, slice(5, 9)), 0.3), 40, "error", ""),
    "zero from a row on": ("layers.3.ffn_out", lambda x: put(x, (slice(41, None),), 0), 41, "error", ""),
    "NaN": ("layers.3.ffn_out", lambda x: put(x, (7, 3), torch.nan), 7, "error", "NaN"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_planted_mistake_is_found_and_named(case: str, text: Dump) -> None:
    name, change, row, kind, what = PLANTED[case]
    report = compare(text, name, change)
    assert verdict(report) == (name, row, kind, what)
    assert report.agreeing == report.common - 1
    assert [(g.relation, g.divergent) for g in report.groups] == [("first", 1)]


def test_equal_dumps_have_no_verdict(text: Dump, native: Dump) -> None:
    for dump in (text, noisy(text, 1e-6), noisy(text, 1e-5)):
        report = diff(text, dump)
        assert (report.equal, report.cause, report.groups, report.numerics) == (True, None, (), "fp32")
        assert report.agreeing == len(text)
    report = diff(native, native)
    assert (report.equal, report.numerics) == (True, "native")


def test_random_damage_is_no_permutation(text: Dump) -> None:
    """Numbers that are merely wrong: no detector may read a layout, a shift or a factor into them."""
    g = torch.Generator().manual_seed(5)
    layer = {n: x for n, x in text.items() if n.startswith("layers.1.")}
    for name in (n for n in layer if layer[n].is_floating_point()):
        x = layer[name]
        size = x[x.isfinite()].std()
        for rows in (slice(30, 31), slice(20, None), slice(None)):
            theirs = dict(layer)
            theirs[name] = x.clone()
            theirs[name][rows] += 0.5 * size * torch.randn(x[rows].shape, generator=g)
            report = diff(layer, theirs)
            if not report.equal:
                assert verdict(report)[::2] == (name, "error"), report.cause


def test_value_and_counts_of_the_first_element(text: Dump) -> None:
    report = compare(text, "layers.3.ffn_in", lambda x: add(x, (40, slice(5, 9)), 0.5))
    first = report.first
    assert first is not None
    assert (first.index, first.rows, first.of_rows) == ((40, 5), 1, 97)
    assert (first.elements, first.of_elements) == (4, 97 * 64)
    assert first.theirs == pytest.approx(text["layers.3.ffn_in"][40, 5].item() + 0.5)
    assert first.ours == text["layers.3.ffn_in"][40, 5].item()
    assert report.cause is not None
    assert "row 40 alone, channels 5 to 8 only" in report.cause.detail


def test_a_factor_is_named(text: Dump) -> None:
    report = compare(text, "layers.3.attn_in", lambda x: x * 8)
    assert report.cause is not None
    assert "0.125" in report.cause.detail
    assert "1/sqrt(64)" in report.cause.detail


def replaced(idxs: Tensor, scores: Tensor, row: int) -> tuple[int, int]:
    """(weakest chosen, strongest left out) of a row."""
    chosen = idxs[row].long()
    left = scores[row].clone()
    left[chosen] = -torch.inf
    return int(chosen[scores[row][chosen].argmin()]), int(left.argmax())


@pytest.mark.parametrize("with_margin", [True, False])
def test_tie_of_top_k(text: Dump, with_margin: bool) -> None:
    """With a tiny margin, or without margins and with near equal scores, another choice is a tie; else an error."""
    idxs, scores = "layers.3.topk_idxs", "layers.3.index_score"
    weakest, strongest = replaced(text[idxs], text[scores], 70)

    def chosen(x: Tensor) -> Tensor:
        x[70] = torch.where(x[70] == weakest, strongest, x[70]).sort().values
        return x

    ours = dict(text)
    if with_margin:
        ours["layers.3.topk_margin"] = put(text["layers.3.topk_margin"].clone(), (70,), 1e-7)
    else:
        del ours["layers.3.topk_margin"]
        ours[scores] = put(text[scores].clone(), (70, strongest), float(text[scores][70, weakest]))
    report = compare(ours, idxs, chosen)
    assert verdict(report) == (idxs, 70, "tie", "")
    assert report.cause is not None
    assert f"ours takes {weakest} where theirs takes {strongest}" in report.cause.detail
    assert verdict(compare(text, idxs, chosen)) == (idxs, 70, "error", "another selection")


def test_tie_of_experts_and_a_mixture(text: Dump) -> None:
    name, margin = "layers.3.moe_indices", "layers.3.moe_margin"
    ours = dict(text)
    ours[margin] = put(put(text[margin].clone(), (33,), 0.0), (50,), 0.5)

    def other(rows: list[int]) -> Change:
        def change(x: Tensor) -> Tensor:
            for row in rows:
                x[row, 1] = next(e for e in range(4) if e not in x[row].tolist())
            return x

        return change

    report = compare(ours, name, other([33]))
    assert verdict(report) == (name, 33, "tie", "")
    assert report.cause is not None
    assert "lowest index" in report.cause.detail
    report = compare(ours, name, other([33, 50]))
    assert verdict(report) == (name, 33, "error", "another selection")
    assert report.cause is not None
    assert report.cause.detail.startswith("row 50: ")
    assert "1 row of 2 are ties" in report.cause.detail


def test_weights_and_tile_scales() -> None:
    g = torch.Generator().manual_seed(1)
    w = torch.randn(128, 128, generator=g)
    tiles = 2.0 ** torch.randint(-3, 4, (4, 4), generator=g)
    grown, other = (s.repeat_interleave(32, 0).repeat_interleave(32, 1) for s in (tiles, tiles.T))
    turned = (w * grown).reshape(4, 32, 4, 32).transpose(1, 3).reshape(128, 128)
    scales = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    for name, ours, theirs, what in (
        ("w.weight", w * grown, (w * grown).T, "transposed"),
        ("w.weight", w * grown, turned, "transposed tile"),
        ("w.weight", w * grown, w * other, "transposed tile scales"),
        ("w.scale", tiles, tiles.T, "transposed tile scales"),
        ("w.scale", scales, scales.T.reshape(4, 8), "transposed tile scales"),
        ("w.weight", w[:64], w[:64].T, "axes transposed"),
    ):
        report = diff({name: ours}, {name: theirs.contiguous()})
        assert verdict(report)[2:] == ("permutation", what), (name, what)


def test_shapes(text: Dump) -> None:
    batched = {n: x[None] if dimensions(n) == x.dim() else x for n, x in text.items()}
    assert diff(text, batched).equal
    assert diff(batched, text).equal
    assert diff(batched, batched).equal

    report = compare(text, "layers.3.x_in", lambda x: x.flatten(1))
    assert report.equal
    assert report.reshaped == ("layers.3.x_in",)

    report = compare(text, "layers.3.attn_out", lambda x: x.T)
    assert verdict(report) == ("layers.3.attn_out", None, "permutation", "axes transposed")
    report = compare(text, "layers.3.attn_out", lambda x: x[1:])
    assert verdict(report) == ("layers.3.attn_out", None, "shift", "rows")
    report = compare(text, "layers.3.topk_idxs", lambda x: x[:, :4])
    assert verdict(report) == ("layers.3.topk_idxs", None, "shape", "")
    assert report.cause is not None
    assert "[97, 8] in ours, [97, 4] in theirs; equal where both have elements" in report.cause.detail


def test_batched_row_is_the_row(text: Dump) -> None:
    ours = {n: x[None] if dimensions(n) == x.dim() else x for n, x in text.items()}
    theirs = dict(ours)
    theirs["layers.3.x_in"] = add(ours["layers.3.x_in"].clone(), (0, 17, 2), 1)
    report = diff(ours, theirs)
    assert report.first is not None
    assert report.first.index == (17, 2, 0)


def test_later_divergences_are_after_the_first_unless_their_row_is_earlier(text: Dump) -> None:
    theirs = dict(text)
    for name, row in (("layers.3.attn_out", 60), ("layers.3.ffn_out", 60), ("layers.4.x_in", 61), ("logits", 60)):
        theirs[name] = add(text[name].clone(), (slice(row, None),), 0.5)
    report = diff(text, theirs)
    assert [(g.name, g.row, g.relation) for g in report.groups] == [
        ("layers.*.attn_out", 60, "first"),
        ("layers.*.ffn_out", 60, "after the first"),
        ("layers.*.x_in", 61, "after the first"),
        ("logits", 60, "after the first"),
    ]
    assert report.other is None

    theirs["layers.5.attn_in"] = text["layers.5.attn_in"] * 2
    theirs["state.layers.5.window"] = text["state.layers.5.window"] + 1
    report = diff(text, theirs)
    assert report.other is not None
    assert report.other_cause is not None
    assert (report.other.name, report.other.row, report.other_cause.kind) == ("layers.5.attn_in", 0, "scale")
    relations = {g.name: g.relation for g in report.groups}
    assert relations["layers.*.attn_in"] == "an earlier row"
    assert relations["state.layers.*.window"] == "after the first", "a ring slot is no position"


@pytest.mark.parametrize("stored", ["codes", "values"])
def test_codes_are_read_as_the_values_they_stand_for(text: Dump, stored: str) -> None:
    """A rotation moves a few scales by a step, which alone would look like rounding; the values tell."""
    stem = "layers.3.window_kv"
    packed = quantize(turn(text[stem], -2), FORMATS["e4m3_e8m0_32"])
    ours, theirs = dict(text), dict(text)
    theirs |= {f"{stem}.codes": packed.codes, f"{stem}.scale": packed.scales}
    if stored == "codes":
        del ours[stem], theirs[stem]
    else:
        theirs[stem] = dequantize(packed.codes, packed.scales, FORMATS["e4m3_e8m0_32"])
    report = diff(ours, theirs)
    name, _, *named = verdict(report)
    assert name == f"{stem}.scale"
    assert named == ["permutation", "RoPE rotated the other way"]
    assert report.cause is not None
    assert report.cause.detail.endswith(f"(seen in {stem})")


def test_a_scale_that_rounds_up_is_one_step(text: Dump) -> None:
    """Its group's codes all change, its values by a step at most."""
    stem, form = "layers.3.window_kv", FORMATS["e4m3_e8m0_32"]
    scale = add(text[f"{stem}.scale"].clone(), (12, 1), 1)
    codes = text[f"{stem}.codes"].clone()
    halved = codes[12, 32:].view(torch.float8_e4m3fn).float() / 2
    codes[12, 32:] = halved.to(torch.float8_e4m3fn).view(torch.uint8)
    theirs = dict(text)
    theirs |= {f"{stem}.codes": codes, f"{stem}.scale": scale, stem: dequantize(codes, scale, form)}
    report = diff(text, theirs)
    assert verdict(report) == (f"{stem}.scale", 12, "quantisation", "scale byte")


def test_native_tolerance(native: Dump) -> None:
    """A bf16 step here and there is nothing; a copied row, a swapped layout and a lost row are something."""
    g = torch.Generator().manual_seed(4)
    theirs = dict(native.items())
    for name, x in native.items():
        if x.dtype == torch.bfloat16 and not name.endswith(("window_kv", "compress_kv", "index_k")):
            theirs[name] = (x.float() * (1 + 2e-3 * torch.randn(x.shape, generator=g))).bfloat16()
    codes = native["layers.1.window_kv.codes"].clone()
    codes[::20, 5] ^= 1
    theirs["layers.1.window_kv.codes"] = codes
    report = diff(native, theirs)
    assert (report.equal, report.numerics) == (True, "native"), report.first

    theirs["layers.3.attn_out"] = native["layers.3.attn_out"].clone()
    theirs["layers.3.attn_out"][88] = native["layers.3.attn_out"][87]
    assert verdict(diff(native, theirs)) == ("layers.3.attn_out", 88, "shift", "rows 1 late")
    assert not diff(native, theirs, numerics="fp32").equal
    theirs["layers.2.x_in"] = native["layers.2.x_in"].transpose(1, 2).reshape(native["layers.2.x_in"].shape)
    assert verdict(diff(native, theirs)) == ("layers.2.x_in", 0, "permutation", "axes transposed")


def test_order_of_computation(goldens: Path) -> None:
    """Every golden's names are known, and what is computed from something comes after it."""
    chain = [
        "input_ids",
        "engram.hash_ids",
        "embed_out",
        "layers.0.engram.gate",
        "layers.0.x_in",
        "layers.0.pre_in",
        "layers.0.attn_comb",
        "layers.0.attn_in",
        "layers.0.attn_out",
        "layers.0.ffn_comb",
        "layers.0.ffn_in",
        "layers.0.moe_indices",
        "layers.0.moe_weights",
        "layers.0.ffn_out",
        "layers.0.pre_out",
        "layers.1.engram.x_in",
        "layers.1.x_in",
        "layers.1.attn_in",
        "layers.1.latent",
        "layers.1.compress_kv.scale",
        "layers.1.compress_kv.packed",
        "layers.1.compress_kv",
        "layers.1.index_k.scale",
        "layers.1.index_weights",
        "layers.1.index_score",
        "layers.3.candidates",
        "layers.3.topk_idxs",
        "layers.3.window_kv",
        "layers.3.attn_out",
        "layers.10.x_in",
        "layers.10.x_out",
        "final_hidden",
        "final_norm",
        "logits",
        "mtp.0.window_kv",
        "decode.ids",
        "decode.layers.0.moe_indices",
        "decode.logits",
        "spec.main_x",
        "spec.mtp.0.x_in",
        "spec.logits",
        "state.layers.0.window",
        "decode_stale.logits",
        "ced.layers.0.window_codes_last",
        "ced.logits",
        "ced.decode.logits",
        "hit32.layers.1.topk_idxs",
        "hit96.layers.1.topk_idxs",
        "block.9",
        "block.10",
        "layers.0.query",
    ]
    assert sorted(sorted(chain), key=order_key) == chain
    for case in ("fp32-text", "fp32-dspark", "fp32-vision", "fp32-replay", "native-replay"):
        stored = load_file(goldens / case / "expected.safetensors")
        assert [n for n in stored if not parse(n).known] == []
        wrong = {n: x.dim() for n, x in stored.items() if dimensions(n) != x.dim() and x.shape[:1] != (1,)}
        assert wrong == {}


def test_renames(text: Dump, tmp_path: Path) -> None:
    theirs = {
        n.replace("layers.", "model.blk.").replace(".attn_out", ".attn.o").replace("window_kv", "kvWindow"): x
        for n, x in text.items()
        if n.startswith("layers.")
    }
    theirs["rope.cache"] = torch.zeros(3)
    file = tmp_path / "names.toml"
    file.write_text(
        '"model.blk.*.attn.o" = "layers.*.attn_out"\n'
        "'re:^model\\.blk\\.(\\d+)\\.kvWindow(.*)$' = 're:layers.\\1.window_kv\\2'\n"
        '"lm_head" = "logits"\n'
        '[model]\n"blk.**" = "layers.**"\n'
    )
    report = diff(text, theirs, renames=read_renames(file))
    assert report.equal
    assert report.common == len(theirs) - 1
    assert report.unused_renames == ("lm_head",)
    assert report.only_theirs == ("rope.cache",)
    assert "logits" in report.only_ours
    assert "layers.0.x_in" not in report.only_ours
    file = tmp_path / "names.json"
    file.write_text(json.dumps({"model": {"blk.**": "layers.**"}}))
    assert diff(text, theirs, renames=read_renames(file)).only_theirs[-1] == "rope.cache"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("a = = b", "TOML"),
        ("a = 3", "'a' maps to 3"),
        ('"a.*" = "*.*"', "more stars"),
        ("'re:(a' = 'b'", "re:(a"),
        ("'re:a' = '\\2'", "group reference"),
    ],
)
def test_bad_rename_file(content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "names.toml").write_text(content)
    with pytest.raises(InputError, match="rename: ") as caught:
        read_renames(tmp_path / "names.toml")
    assert named in str(caught.value)


def test_two_names_for_one(text: Dump) -> None:
    rules = Renames([compile_rule("their.*", "logits")])
    with pytest.raises(InputError, match=r"'their\.a' and 'their\.b' both become 'logits'"):
        diff(text, {"their.a": text["logits"], "their.b": text["logits"]}, renames=rules)


def test_npz_and_odd_dtypes(text: Dump, tmp_path: Path) -> None:
    """numpy's view of a dump: bf16 as raw bytes, fp8 codes, bool for 0 and 1, other integer widths, a number."""
    half = text["layers.3.attn_in"].bfloat16()
    ours = {
        "layers.3.attn_in": half,
        "layers.3.window_kv.codes": text["layers.3.window_kv.codes"].view(torch.float8_e4m3fn),
        "layers.3.candidates": text["layers.3.candidates"],
        "layers.3.topk_idxs": text["layers.3.topk_idxs"],
        "ced.first_row": torch.tensor(81),
    }
    raw = half.view(torch.int16).numpy().view("V2")
    arrays: dict[str, Any] = {
        "layers.3.attn_in": raw,
        "layers.3.window_kv.codes": text["layers.3.window_kv.codes"].numpy(),
        "layers.3.candidates": text["layers.3.candidates"].numpy().astype(bool),
        "layers.3.topk_idxs": text["layers.3.topk_idxs"].numpy().astype(np.int64),
        "ced.first_row": np.uint32(81),
    }
    np.savez(tmp_path / "theirs.npz", **arrays)
    dump = open_dump(tmp_path / "theirs.npz")
    assert diff(ours, dump).equal
    arrays["ced.first_row"] = np.uint32(80)
    np.savez(tmp_path / "theirs.npz", **arrays)
    assert verdict(diff(ours, open_dump(tmp_path / "theirs.npz")))[:2] == ("ced.first_row", 0)


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 16, 33]), min_size=0, max_size=4)
NAMES = (
    "x",
    "layers.1.window_kv",
    "layers.1.window_kv.codes",
    "layers.1.topk_idxs",
    "layers.0.x_in",
    "w.scale",
    "argmax",
)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_two_tensors_get_an_answer(data: st.DataObject) -> None:
    """Whatever shapes and dtypes meet, there is a verdict and no exception."""
    name = data.draw(st.sampled_from(NAMES))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    sides = []
    shape = data.draw(SHAPES)
    for _ in range(2):
        shape = shape if data.draw(st.booleans()) else data.draw(SHAPES)
        x = 5 * torch.randn(shape, generator=g)
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool]))
        x = x.to(dtype) if dtype != torch.uint8 else x.abs().to(dtype)
        if x.is_floating_point() and x.numel() and data.draw(st.booleans()):
            x.reshape(-1)[0] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf, 0.0]))
        sides.append(x)
    report = diff({name: sides[0]}, {name: sides[1]}, numerics=data.draw(st.sampled_from(["fp32", "native", "auto"])))
    assert report.equal == (report.cause is None)
    assert diff({name: sides[0]}, {name: sides[0].clone()}).equal or bool(sides[0].float().isnan().any())
