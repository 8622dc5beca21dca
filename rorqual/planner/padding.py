"""What a page size costs: the unused end of every sequence's last page."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rorqual.errors import ConfigError
from rorqual.layout import KVLayout
from rorqual.planner.mix import Mix
from rorqual.planner.storage import RowFormat, bytes_per_token

PAGES = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """One page size. Bytes a session, exact.

    worst: a last page with one token. expected: lengths that fall evenly between two page ends. mix: at exactly the
    contexts of a mix, on average. share: of the mix's allocated global bytes. illegal: why the model cannot have it.
    """

    page_tokens: int
    page_bytes: int
    worst: Fraction
    expected: Fraction
    mix: Fraction
    share: Fraction
    illegal: str = ""


def padding(layout: KVLayout, mix: Mix, rows: RowFormat, page_tokens: int) -> Padding:
    """The waste of one page size; a size that the model's ratios do not divide keeps its reason.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.mix import one_context
    >>> from rorqual.planner.storage import row_format
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> one = padding(layout, one_context(1000), row_format(layout, "packed"), 128)
    >>> one.worst, one.expected, one.mix, one.share
    (Fraction(113030, 1), Fraction(56515, 1), Fraction(21360, 1), Fraction(3, 128))

    Unit: bytes a session. Source: 127 x 890; half of it; (8 x 128 - 1,000) x 890, which is 24 of 1,024 tokens.
    """
    token = bytes_per_token(layout, rows)
    unused = mean_pages_of(mix, page_tokens) * page_tokens - mix.mean_tokens
    illegal = ""
    try:
        KVLayout(layout.config, page_tokens=page_tokens, draft_rows=layout.draft_rows)
    except ConfigError as error:
        illegal = str(error)
    return Padding(
        page_tokens=page_tokens,
        page_bytes=int(token * page_tokens),
        worst=(page_tokens - 1) * token,
        expected=Fraction(page_tokens - 1, 2) * token,
        mix=unused * token,
        share=unused / (unused + mix.mean_tokens),
        illegal=illegal,
    )


def mean_pages_of(mix: Mix, page_tokens: int) -> Fraction:
    """Pages of a session of a mix, on average, for any page size. Unit: pages.

    >>> from rorqual.planner.mix import one_context
    >>> mean_pages_of(one_context(1000), 64)
    Fraction(16, 1)

    Source: each context rounded up.
    """
    return sum((share * -(-tokens // page_tokens) for tokens, share in mix.parts), Fraction(0))


def paddings(layout: KVLayout, mix: Mix, rows: RowFormat) -> tuple[Padding, ...]:
    """The waste of every size in `PAGES`, and of the layout's own.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.mix import one_context
    >>> from rorqual.planner.storage import row_format
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> [float(row.expected) for row in paddings(layout, one_context(4096), row_format(layout, "packed"))]
    [6675.0, 13795.0, 28035.0, 56515.0, 113475.0, 227395.0, 455235.0]

    Unit: bytes a session. Source: `padding`.
    """
    sizes = sorted({*PAGES, layout.page_tokens})
    return tuple(padding(layout, mix, rows, page_tokens) for page_tokens in sizes)
