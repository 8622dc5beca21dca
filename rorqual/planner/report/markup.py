"""HTML and SVG by construction: a plain string is text and is escaped, `Markup` is markup and passes.

Elements are always closed by a tag of their own, so that what is written here is XML too, except for `meta`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

Attribute = str | int | float | bool | None

_VOID = ("meta",)
# What neither HTML nor XML can hold: control characters, and the halves of characters that an odd file name has.
_ILLEGAL = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Markup(str):
    """A piece of a page that stands as it is."""

    __slots__ = ()


def text(value: str) -> Markup:
    """A string as the content of an element; what no page can hold becomes U+FFFD. Source: the HTML standard, syntax.

    Without unit.

    >>> text("W < c & 2"), text(Markup("<b>W</b>"))
    ('W &lt; c &amp; 2', '<b>W</b>')
    """
    return value if isinstance(value, Markup) else Markup(escape(_legal(value), quote=False))


def prose(words: str) -> Markup:
    """Text in which backticks hold code, as in messages and notes. Without unit; source: the caller's words.

    >>> prose("see `plan ledger`"), prose("one ` alone")
    ('see <code>plan ledger</code>', 'one ` alone')
    """
    parts = words.split("`")
    if len(parts) % 2 == 0:
        return text(words)
    return Markup("".join(tag("code", part) if odd % 2 else text(part) for odd, part in enumerate(parts)))


def tag(name: str, /, *content: str, **attributes: Attribute) -> Markup:
    """An element. In a name of an attribute `_` is `-`, and one at its end is dropped; None leaves the attribute out.

    >>> tag("td", "1 < 2", class_="n", data_unit=None)
    '<td class="n">1 &lt; 2</td>'
    >>> tag("rect", x=1.26, aria_label='a "b"')
    '<rect x="1.3" aria-label="a &quot;b&quot;"></rect>'

    Source: the HTML standard, syntax. Numbers are in the unit of the attribute, floats to one decimal.
    """
    spelled = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{spelled}>")
    return Markup(f"<{name}{spelled}>{''.join(text(part) for part in content)}</{name}>")


def lines(parts: Iterable[str]) -> Markup:
    """Pieces one below the other; empty ones leave no line. Without unit; source: the caller's pieces.

    >>> lines([tag("b", "x"), "", "y"])
    '<b>x</b>\\ny'
    """
    return Markup("\n".join(text(part) for part in parts if part))


def coordinate(value: float) -> str:
    """A length in user units of a drawing, to a tenth. Source: the caller; the same on every machine.

    >>> coordinate(12.04), coordinate(0.96), coordinate(-0.01)
    ('12', '1', '0')
    """
    rounded = f"{value:.1f}".rstrip("0").rstrip(".")
    return "0" if rounded == "-0" else rounded


def slug(name: str) -> str:
    """A name as an id: letters and digits, hyphens between. Without unit; source: the caller's name.

    >>> slug("Full / Reindex / Reuse"), slug("E2M1/E4M3/16")
    ('full-reindex-reuse', 'e2m1-e4m3-16')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    spelled = "" if value is True else coordinate(value) if isinstance(value, float) else str(value)
    return f' {key.rstrip("_").replace("_", "-")}="{escape(_legal(spelled))}"'


def _legal(value: str) -> str:
    return _ILLEGAL.sub("\ufffd", value)
