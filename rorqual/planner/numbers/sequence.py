"""Windows against global KV: the bytes of one sequence."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from rorqual.layout import KVLayout
from rorqual.planner.figure import Figure
from rorqual.planner.ledger import crossing_tokens
from rorqual.planner.numbers.exact import MILLION, exact
from rorqual.planner.spelling import row_formula
from rorqual.planner.units import decimal_bytes, fixed_text, number_text


def figures(layout: KVLayout) -> Iterator[Figure]:
    """From `swa_total_bytes` to `window_equals_global_tokens`. Bytes and tokens; from the config and SPEC 11.

    >>> from rorqual.config import presets
    >>> [figure.shown for figure in figures(KVLayout(presets.load("v4.1-flash")))]
    ['2,703,360', '890 MB', '329', '3,037.5']
    """
    config, windows = layout.config, layout.window_bytes_logical
    layers, window, row = config.num_hidden_layers, config.sliding_window, layout.window_format
    yield Figure(
        id="swa_total_bytes",
        value=windows,
        shown=f"{windows:,}",
        unit="B/sequence",
        formula=f"num_hidden_layers x sliding_window x ({row_formula(row, 'head_dim')})",
        expression=f"{layers} x {window:,} x ({row_formula(row, config.head_dim)})",
        provenance="derived",
        note=f"Logical. Rings allocate {layout.window_bytes_allocated:,} B: {layout.draft_rows} rows more for drafts.",
    )
    if layout.sources:
        yield from _against(layout, windows)


def _against(layout: KVLayout, windows: int) -> Iterator[Figure]:
    pool, spelled = layout.global_bytes_logical(MILLION), number_text(layout.bytes_per_token)
    yield Figure(
        id="pool_1m_bytes",
        value=pool,
        shown=decimal_bytes(pool),
        unit="B",
        formula="10^6 tokens x global_token_bytes",
        expression=f"10^6 x {spelled}",
        provenance="derived",
    )
    yield Figure(
        id="pool_over_window_1m",
        value=exact(Fraction(pool, windows)),
        shown=fixed_text(Fraction(pool, windows)),
        unit="1",
        formula="pool_1m_bytes / swa_total_bytes",
        expression=f"10^6 x {spelled} / {windows:,}",
        provenance="derived",
    )
    yield Figure(
        id="window_equals_global_tokens",
        value=exact(crossing_tokens(layout)),
        shown=fixed_text(crossing_tokens(layout), 1),
        unit="tokens",
        formula="swa_total_bytes / global_token_bytes",
        expression=f"{windows:,} / {spelled}",
        provenance="derived",
        note="Below this context the windows of a sequence have more bytes than its global KV.",
    )
