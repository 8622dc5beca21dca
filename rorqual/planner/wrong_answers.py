"""Wrong answers that calculators give for this kind of cache, and the mistake behind each (field case 4)."""

from __future__ import annotations

from fractions import Fraction

from rorqual.layout import KVLayout
from rorqual.planner.spelling import entries_per_token, per_token, total
from rorqual.planner.table import Table
from rorqual.planner.units import Number, plain_number


def wrong_table(layout: KVLayout) -> Table:
    """Bytes a token that other calculators give, and the mistake that yields each. Source: field case 4.

    >>> from rorqual.config import presets
    >>> [row[0] for row in wrong_table(KVLayout(presets.load("v4.1-flash"))).rows]
    [10324, 81920, 20480, 800]
    """
    rows = []
    for mistake, formula, count in _mistakes(layout):
        times = float(count / layout.bytes_per_token) if layout.sources else None
        rows.append((plain_number(count), mistake, formula, times))
    return Table(
        name="wrong_answers",
        title="Wrong answers to recognise",
        columns=("claimed [B/token]", "mistake", "formula", "times the truth"),
        rows=tuple(rows),
        note="Nor is a pool's size over its longest context bytes a token: fixed bytes are a sequence's.",
    )


def recognise(layout: KVLayout, claimed: Number) -> str | None:
    """The mistake behind a claimed number of bytes a token, to the byte; None for the truth and for the unknown.

    Source: `wrong_table`.

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> recognise(layout, 10_324), recognise(layout, 890)
    ('every layer counted as storing its own global KV', None)
    """
    stated, half = Fraction(claimed), Fraction(1, 2)
    if abs(stated - layout.bytes_per_token) < half:
        return None
    near = (mistake for mistake, _, count in _mistakes(layout) if abs(stated - count) < half)
    return next(near, None)


def _mistakes(layout: KVLayout) -> list[tuple[str, str, Fraction]]:
    """(mistake, formula, bytes a token) of field case 4; those that are no mistake for this config are left out."""
    config = layout.config
    layers, dim = config.num_hidden_layers, config.head_dim
    entry = layout.sources[0].entry_bytes if layout.sources else 0
    readers = [role.ratio for role in config.backbone_roles if role.ratio]
    unshared = sum((Fraction(entry, ratio) for ratio in readers), Fraction(0))
    codes = [layout.main_format.code_bytes(dim)]
    codes += [layout.index_format.code_bytes(config.index_head_dim)] if entry else []
    entries = per_token(source.ratio for source in layout.sources)
    wrong = [
        ("every layer counted as storing its own global KV", per_token(readers, entry), unshared),
        ("a key and a value in bf16 in every layer", f"{layers} x 2 x {dim:,} x 2", Fraction(layers * 4 * dim)),
        ("the latent in FP8 in every layer, without scales", f"{layers} x {dim:,}", Fraction(layers * dim)),
        ("codes without their scales", f"({entries}) x ({total(codes)})", entries_per_token(layout) * sum(codes)),
    ]
    return [each for each in wrong if each[2] != layout.bytes_per_token]
