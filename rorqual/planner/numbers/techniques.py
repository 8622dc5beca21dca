"""Figures of one technique each: FP4 range, mHC, speculation."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from rorqual.config import ModelConfig
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.layout import KVLayout
from rorqual.planner.figure import Figure
from rorqual.planner.numbers.exact import exact
from rorqual.planner.speculation import ACCEPTANCE, tokens_per_step
from rorqual.planner.units import fixed_text, number_text

MISREADING = "A widely read summary calls 3.69 the accepted drafts and 4.69 the output: one token is counted twice."


def figures(layout: KVLayout) -> Iterator[Figure]:
    """`fp4_range`, `mhc_traffic`, `spec_tokens_per_step` and `spec_accepted`, in tokens and ratios.

    From the config, SPEC 2, 6 and 9.

    >>> from rorqual.config import presets
    >>> [figure.shown for figure in figures(KVLayout(presets.load("v4.1-flash")))]
    ['2,688', '1/2', '3.69', '2.69']
    """
    if layout.sources and (layout.main_format.value, layout.main_format.scale) == ("e2m1", "e4m3"):
        yield _range(layout)
    if layout.config.hc_mult > 1:
        yield _mixing(layout.config.hc_mult)
    if layout.config.num_nextn_predict_layers:
        yield from _speculation(layout.config)


def _range(layout: KVLayout) -> Figure:
    code, scale = int(layout.main_format.value_max), int(E4M3_E8M0_32.value_max)
    return Figure(
        id="fp4_range",
        value=code * scale,
        shown=f"{code * scale:,}",
        unit="1",
        formula="largest E2M1 code x largest E4M3 scale",
        expression=f"{code} x {scale}",
        provenance="derived",
        note="Main KV above it is clipped. Index keys have E8M0 scales and no such bound.",
    )


def _mixing(copies: int) -> Figure:
    value = Fraction(2 * copies + 2, 4 * copies + 4)
    return Figure(
        id="mhc_traffic",
        value=value,
        shown=str(value),
        unit="1",
        formula="(2 x hc_mult + 2) / (4 x hc_mult + 4)",
        expression=f"(2 x {copies} + 2) / (4 x {copies} + 4)",
        provenance="derived",
        note="Rows of hidden_size moved a sub-layer: in one pass over the copies, against two.",
    )


def _speculation(config: ModelConfig) -> Iterator[Figure]:
    block = config.dspark_block_size
    emitted = tokens_per_step(ACCEPTANCE, block)
    accept, reject = number_text(ACCEPTANCE), number_text(1 - ACCEPTANCE)
    formula = f"(1 - a^(dspark_block_size + 1)) / (1 - a){{}}, a = {accept}"
    expression = f"(1 - {accept}^{block + 1}) / {reject}"
    yield Figure(
        id="spec_tokens_per_step",
        value=exact(emitted),
        shown=fixed_text(emitted, 2),
        unit="tokens",
        formula=formula.format(""),
        expression=expression,
        provenance="derived",
        note=f"Emitted a verification: the accepted drafts and one bonus token. {MISREADING}",
    )
    yield Figure(
        id="spec_accepted",
        value=exact(emitted - 1),
        shown=fixed_text(emitted - 1, 2),
        unit="tokens",
        formula=formula.format(" - 1"),
        expression=f"{expression} - 1",
        provenance="derived",
        note=f"Drafts accepted a verification. {MISREADING}",
    )
