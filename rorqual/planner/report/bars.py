"""Horizontal bars, each under a line that says what it is and how much: readable at any width, and without colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rorqual.planner.report.axis import Axis
from rorqual.planner.report.markup import Markup
from rorqual.planner.report.picture import box, drawing, line, words
from rorqual.planner.units import Number

WIDTH, SIDE, TOP = 560.0, 6.0, 4.0
ROW, BASE, THICK = 44.0, 14.0, 18.0  # a row; in it the baseline of the words, and the bar
FOOT = 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A piece of a bar from `start` to `end` on the axis. kind: the class that colours it. told: its exact size."""

    name: str
    start: Number
    end: Number
    kind: str
    told: str

    @property
    def sentence(self) -> str:
        """Name and size."""
        return f"{self.name} {self.told}".strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A bar with its name on the left and what it amounts to on the right."""

    label: str
    told: str
    spans: tuple[Span, ...]


def stack(parts: Sequence[tuple[str, str, Number, str]]) -> tuple[Span, ...]:
    """Spans end to end from 0: (name, class, size, size as text); those of size 0 are left out.

    >>> [(span.name, span.start, span.end) for span in stack([("a", "c1", 2, "2 B"), ("b", "c2", 3, "3 B")])]
    [('a', 0, 2), ('b', 2, 5)]

    In the unit of the sizes; source: the caller.
    """
    spans: list[Span] = []
    place: Number = 0
    for name, kind, size, told in parts:
        if size:
            spans.append(Span(name=name, start=place, end=place + size, kind=kind, told=told))
            place += size
    return tuple(spans)


def bar_chart(id: str, title: str, bars: Sequence[Bar], axis: Axis, unit: str, mark: Number | None = None) -> Markup:
    """The bars as an SVG, in the axis' unit. unit: what stands below it. mark: a value with a line across all bars.

    >>> from rorqual.planner.report.axis import linear
    >>> bar = Bar(label="replay", told="5 B", spans=stack([("pages", "c1", 3, "3 B"), ("tails", "c2", 2, "2 B")]))
    >>> svg = bar_chart("b", "Bytes", [bar], linear(5, str), "bytes")
    >>> "<desc" in svg, "Bytes. replay: 5 B (pages 3 B; tails 2 B)." in svg
    (True, True)

    Source: the caller.
    """
    bottom = TOP + ROW * len(bars)
    content = [*_scale(axis, bottom, unit)]
    for number, bar in enumerate(bars):
        content += _row(bar, axis, TOP + ROW * number, mark)
    described = " ".join((f"{title}.", *(f"{_spelled(bar)}." for bar in bars)))
    return drawing(id, title, described, content, width=WIDTH, height=bottom + FOOT)


def _scale(axis: Axis, bottom: float, unit: str) -> Iterator[Markup]:
    for tick in axis.ticks():
        x = _x(axis, tick)
        # Text that is centred on a tick at the edge would be cut off.
        side = "end " if x > WIDTH - 40 else "" if x < 40 else "mid "
        yield words(x, bottom + 18, axis.text(tick), f"{side}faint")
    yield line(SIDE, bottom + 4, WIDTH - SIDE, bottom + 4, "axis")
    yield words(WIDTH / 2, bottom + 34, unit, "mid faint")


def _row(bar: Bar, axis: Axis, top: float, mark: Number | None) -> Iterator[Markup]:
    """Words, and below them the bar; ticks and mark keep to the bar, so that nothing crosses the words."""
    yield words(SIDE, top + BASE, bar.label)
    yield words(WIDTH - SIDE, top + BASE, bar.told, "end")
    upper, lower = top + BASE + 3, top + BASE + THICK + 9
    yield from (line(_x(axis, tick), upper, _x(axis, tick), lower, "hair") for tick in axis.ticks())
    for span in bar.spans:
        left, right = _x(axis, span.start), _x(axis, span.end)
        yield box(left, upper + 3, right - left, THICK, f"part {span.kind}", span.sentence)
    if mark is not None:
        yield line(_x(axis, mark), upper, _x(axis, mark), lower, "mark")


def _x(axis: Axis, value: Number) -> float:
    return SIDE + axis.share(value) * (WIDTH - 2 * SIDE)


def _spelled(bar: Bar) -> str:
    parts = "; ".join(span.sentence for span in bar.spans) if len(bar.spans) > 1 else ""
    return f"{bar.label}: {bar.told}{f' ({parts})' if parts else ''}"
