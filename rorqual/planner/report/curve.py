"""Bytes of one sequence over its context, on two logarithmic axes: global KV, windows, both, and where they cross."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rorqual.layout import KVLayout
from rorqual.planner.ledger import crossing_tokens
from rorqual.planner.report.axis import Axis, logarithmic
from rorqual.planner.report.markup import Markup, coordinate, tag
from rorqual.planner.report.picture import circle, drawing, framed, line, words
from rorqual.planner.units import Number, decimal_bytes, fixed_text, number_text

WIDTH, HEIGHT = 560.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 10.0, 44.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plane:
    """Tokens to the right, bytes upwards."""

    tokens: Axis
    nbytes: Axis

    def point(self, tokens: Number, nbytes: Number) -> tuple[float, float]:
        x = LEFT + self.tokens.share(tokens) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - self.nbytes.share(nbytes) * (HEIGHT - TOP - BOTTOM)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Curve:
    """kind: its class. dashes: as SVG writes them, so that the curves differ without colours too."""

    name: str
    kind: str
    dashes: str | None
    nbytes: Callable[[int], int]


def context_chart(layout: KVLayout, contexts: Sequence[int]) -> Markup:
    """The figure "contexts-chart": logical bytes from a quarter of the least context on to the longest.

    >>> from rorqual.config import presets
    >>> figure = context_chart(KVLayout(presets.load("v4.1-flash")), [4096, 2**20])
    >>> "At 4,096 tokens: global KV 3,645,440 B, windows 2,703,360 B, together 6,348,800 B." in figure
    True
    >>> "Global KV overtakes the windows at 3,037.5 tokens." in figure
    True

    Source: `KVLayout.global_bytes_logical`, `KVLayout.window_bytes_logical`, `ledger.crossing_tokens`.
    """
    curves = _curves(layout)
    samples = _samples(layout, contexts)
    plane = _Plane(
        tokens=Axis(low=float(samples[0]), high=float(samples[-1]), logarithmic=True, text=number_text),
        nbytes=logarithmic((c.nbytes(tokens) for c in curves for tokens in samples), decimal_bytes, below=2, above=2),
    )
    content = [*_grid(plane)]
    for curve in curves:
        content.append(_drawn(curve, plane, samples))
        content += [_dot(curve, plane, tokens) for tokens in contexts if curve.nbytes(tokens)]
    content += _crossing(layout, plane)
    title = "Bytes of one sequence by its context, both axes logarithmic"
    described = " ".join((f"{title}.", *(_at(curves, tokens) for tokens in contexts), crossing_sentence(layout)))
    svg = drawing("contexts-drawing", title, described, content, width=WIDTH, height=HEIGHT)
    legend = [(curve.kind, f"{curve.name}{f' ({_DASHES[curve.dashes]})' if curve.dashes else ''}") for curve in curves]
    return framed("contexts-chart", svg, f"{title}. {crossing_sentence(layout)}", legend)


def crossing_sentence(layout: KVLayout) -> str:
    """Where global KV overtakes the windows, in tokens, in words.

    >>> from rorqual.config import presets
    >>> crossing_sentence(KVLayout(presets.load("v4.1-flash").without("compression")))
    'No layer stores global KV: the cache does not grow with the context.'

    Source: `ledger.crossing_tokens`.
    """
    if not layout.sources:
        return "No layer stores global KV: the cache does not grow with the context."
    tokens, longest = crossing_tokens(layout), layout.config.max_position_embeddings
    beyond = f", beyond the model's {longest:,} positions" if tokens > longest else ""
    return f"Global KV overtakes the windows at {fixed_text(tokens, 1)} tokens{beyond}."


_DASHES = {"7 4": "dashed", "2 3": "dotted"}


def _curves(layout: KVLayout) -> list[_Curve]:
    windows = layout.window_bytes_logical
    fixed = _Curve(name="windows", kind="c2", dashes="7 4", nbytes=lambda _: windows)
    if not layout.sources:
        return [fixed]
    stored = layout.global_bytes_logical
    return [
        _Curve(name="global KV", kind="c1", dashes=None, nbytes=stored),
        fixed,
        _Curve(name="together", kind="c6", dashes="2 3", nbytes=lambda tokens: stored(tokens) + windows),
    ]


def _samples(layout: KVLayout, contexts: Sequence[int]) -> list[int]:
    """Ascending tokens: powers of two, and the contexts themselves."""
    longest = max(*contexts, layout.config.max_position_embeddings, 2)
    least = min(contexts)
    if layout.sources:
        least = min(least, int(crossing_tokens(layout)))
    first = 1 << (max(1, min(least, longest // 2) // 4).bit_length() - 1)
    doubled = [first << power for power in range((longest // first).bit_length())]
    return sorted({*doubled, longest, *contexts})


def _grid(plane: _Plane) -> Iterator[Markup]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in plane.tokens.ticks():
        x, _ = plane.point(tick, 1)
        yield line(x, TOP, x, bottom, "hair")
        yield words(x, bottom + 16, plane.tokens.text(tick), "end faint" if x > WIDTH - 40 else "mid faint")
    for tick in plane.nbytes.ticks():
        _, y = plane.point(1, tick)
        yield line(LEFT, y, right, y, "hair")
        yield words(LEFT - 6, y + 4, plane.nbytes.text(tick), "end faint")
    yield line(LEFT, bottom, right, bottom, "axis")
    yield line(LEFT, TOP, LEFT, bottom, "axis")
    yield words((LEFT + right) / 2, HEIGHT - 8, "context [tokens]", "mid faint")


def _drawn(curve: _Curve, plane: _Plane, samples: Sequence[int]) -> Markup:
    points = [plane.point(tokens, curve.nbytes(tokens)) for tokens in samples if curve.nbytes(tokens)]
    spelled = " ".join(f"{coordinate(x)},{coordinate(y)}" for x, y in points)
    return tag("polyline", points=spelled, class_=f"curve {curve.kind}", stroke_dasharray=curve.dashes)


def _dot(curve: _Curve, plane: _Plane, tokens: int) -> Markup:
    told = f"{curve.name} at {tokens:,} tokens: {curve.nbytes(tokens):,} B"
    return circle(*plane.point(tokens, curve.nbytes(tokens)), 4, curve.kind, told)


def _crossing(layout: KVLayout, plane: _Plane) -> Iterator[Markup]:
    if not layout.sources or crossing_tokens(layout) > plane.tokens.high:
        return
    tokens = crossing_tokens(layout)
    x, y = plane.point(tokens, layout.window_bytes_logical)
    yield line(x, y, x, HEIGHT - BOTTOM, "axis")
    yield circle(x, y, 6, "ring", crossing_sentence(layout))
    left = x < WIDTH / 2
    yield words(x + (8 if left else -8), HEIGHT - BOTTOM - 8, f"{fixed_text(tokens, 1)} tokens", "" if left else "end")


def _at(curves: Sequence[_Curve], tokens: int) -> str:
    return f"At {tokens:,} tokens: {', '.join(f'{curve.name} {curve.nbytes(tokens):,} B' for curve in curves)}."
