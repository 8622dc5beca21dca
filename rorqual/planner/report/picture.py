"""A drawing on the page: an SVG that names and describes itself, a caption, and a legend in HTML, which wraps."""

from __future__ import annotations

from collections.abc import Sequence

from rorqual.planner.report.markup import Markup, coordinate, lines, tag


def drawing(
    id: str,
    title: str,
    description: str,
    content: Sequence[str],
    *,
    width: float,
    height: float,
    kind: str = "chart",
) -> Markup:
    """An inline SVG of width x height user units. A screen reader reads title and description in its place.

    kind: "chart" keeps to the width of the text; "wide" is shown at its own size and scrolls.

    >>> print(drawing("d", "Bytes", "890 B", [], width=2, height=1))
    <svg class="chart" viewBox="0 0 2 1" role="img" aria-labelledby="d-title d-text"><title id="d-title">Bytes</title>
    <desc id="d-text">890 B</desc></svg>

    Source: SVG 2 and WAI-ARIA 1.2 on `img`.
    """
    labels = (tag("title", title, id=f"{id}-title"), tag("desc", description, id=f"{id}-text"))
    own_size = f"width: {coordinate(width)}px" if kind == "wide" else None
    return tag(
        "svg",
        lines((*labels, *content)),
        class_=kind,
        viewBox=f"0 0 {coordinate(width)} {coordinate(height)}",
        role="img",
        aria_labelledby=f"{id}-title {id}-text",
        style=own_size,
    )


def framed(id: str, svg: Markup, caption: str, legend: Sequence[tuple[str, str]] = ()) -> Markup:
    """The drawing as a figure. legend: classes that colour a swatch, and what they stand for.

    >>> print(framed("f", drawing("d", "", "", [], width=1, height=1), "Bytes.", [("c1", "stored")]).splitlines()[-1])
    <figcaption><ul class="legend"><li><span class="swatch c1" aria-hidden="true"></span>stored</li></ul>Bytes.\
</figcaption></figure>

    Without unit; source: the caller.
    """
    entries = [tag("li", tag("span", class_=f"swatch {kind}", aria_hidden="true"), name) for kind, name in legend]
    listed = tag("ul", *entries, class_="legend") if entries else ""
    box = tag("div", svg, class_="scroll", role="region", aria_label=f"Drawing: {caption.split('. ')[0]}", tabindex=0)
    return tag("figure", lines((box, tag("figcaption", listed, caption))), id=id)


def words(x: float, y: float, written: str, kind: str = "") -> Markup:
    """Text with its baseline at (x, y) in user units. kind: classes, such as "mid" or "end faint".

    >>> words(1, 2, "890 B", "end")
    '<text x="1" y="2" class="end">890 B</text>'

    Source: the caller.
    """
    return tag("text", written, x=float(x), y=float(y), class_=kind or None)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """A straight line in user units.

    >>> line(0, 1.25, 2, 3, "axis")
    '<line x1="0" y1="1.2" x2="2" y2="3" class="axis"></line>'

    Source: the caller.
    """
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=kind)


def box(x: float, y: float, width: float, height: float, kind: str, told: str = "") -> Markup:
    """A rectangle in user units; `told` appears when a pointer rests on it.

    >>> box(0, 0, 2, 1, "part c1", "weights")
    '<rect x="0" y="0" width="2" height="1" class="part c1"><title>weights</title></rect>'

    Source: the caller.
    """
    label = [tag("title", told)] if told else []
    return tag("rect", *label, x=float(x), y=float(y), width=float(width), height=float(height), class_=kind)


def circle(x: float, y: float, radius: float, kind: str, told: str = "") -> Markup:
    """A circle in user units; `told` appears when a pointer rests on it.

    >>> circle(1, 2, 3, "dot")
    '<circle cx="1" cy="2" r="3" class="dot"></circle>'

    Source: the caller.
    """
    label = [tag("title", told)] if told else []
    return tag("circle", *label, cx=float(x), cy=float(y), r=float(radius), class_=kind)
