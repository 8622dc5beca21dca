"""How the page looks: two palettes, and the rules that use them. A test holds every pair of colours to its contrast."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CATEGORIES = 8
"""Colours for parts of a bar, `c1` to `c8`."""

LIGHT: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#ffffff",
        "panel": "#f3f5f8",
        "ink": "#18202a",
        "muted": "#4a5563",
        "line": "#7f8b99",
        "hair": "#d5dbe2",
        "link": "#0b4f94",
        "warn": "#9c2f10",
        "saved": "#cfdded",
        "c1": "#1f4e79",
        "c2": "#c05a14",
        "c3": "#2b7a4b",
        "c4": "#8250a8",
        "c5": "#a3283c",
        "c6": "#5d6b78",
        "c7": "#0f7482",
        "c8": "#7d6608",
        "swa": "#e6eaef",
        "full": "#ffcf99",
        "reindex": "#b9dcff",
        "reuse": "#cdeed6",
    }
)
DARK: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#11161c",
        "panel": "#1a212a",
        "ink": "#e8edf2",
        "muted": "#aab5c1",
        "line": "#7c8896",
        "hair": "#333f4c",
        "link": "#8ec5ff",
        "warn": "#ffab91",
        "saved": "#2f4a66",
        "c1": "#6ea8dc",
        "c2": "#f0a060",
        "c3": "#63c08a",
        "c4": "#c09be0",
        "c5": "#f08a96",
        "c6": "#9aa7b4",
        "c7": "#5cc4d0",
        "c8": "#d6bd55",
        "swa": "#2b3540",
        "full": "#7a4a12",
        "reindex": "#174f80",
        "reuse": "#1e5535",
    }
)

_RULES = """
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word;
}
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.5rem 0 1rem; }
h2 { font-size: 1.35rem; margin: 2.5rem 0 0.5rem; padding-top: 0.5rem; border-top: 1px solid var(--hair); }
h3 { font-size: 1.1rem; margin: 1.5rem 0 0.5rem; }
p, dl, ol, ul { max-width: 52rem; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
code { font: 0.92em ui-monospace, monospace; }
.skip { position: absolute; left: -100rem; padding: 0.5rem 1rem; background: var(--paper); }
.skip:focus { left: 1rem; }
nav ol { columns: 14rem; padding-left: 1.5rem; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; }
.facts dt { color: var(--muted); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: 0.75rem; max-width: none; }
.cards { padding: 0; list-style: none; }
.cards li { padding: 0.6rem 0.9rem; background: var(--panel); border-radius: 0.4rem; }
.cards strong { display: block; font-size: 1.3rem; }
.note, figcaption { color: var(--muted); font-size: 0.92rem; }
.note { margin: 0.35rem 0 1rem; }
.warning { padding: 0.6rem 0.9rem; border-left: 4px solid var(--warn); background: var(--panel); max-width: none; }
.warning strong { color: var(--warn); }
.scroll { overflow-x: auto; max-width: 100%; }
.sheet { margin: 1.25rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; }
caption { text-align: left; font-weight: 600; padding: 0.25rem 0; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--hair); text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; }
tbody th { font-weight: 500; }
td { max-width: 34rem; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
thead .n { white-space: normal; }
summary { cursor: pointer; padding: 0.35rem 0; font-weight: 600; }
details > .scroll caption { position: absolute; clip-path: inset(50%); white-space: nowrap; }
.terms dt { font-weight: 600; margin-top: 0.9rem; }
.terms dt span { font-weight: 400; color: var(--muted); }
.terms dd { margin: 0.1rem 0 0 1rem; }
.terms dd + dd { color: var(--muted); font-size: 0.92rem; }
figure { margin: 1.25rem 0; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; margin: 0.3rem 0; padding: 0; list-style: none; }
.swatch {
  display: inline-block; width: 0.95em; height: 0.95em; margin-right: 0.4em; vertical-align: -0.1em;
  border: 1px solid var(--line);
}
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg.chart { max-width: 48rem; min-width: 26rem; }
svg text { fill: var(--ink); }
svg .faint { fill: var(--muted); font-size: 12px; }
svg .hair { stroke: var(--hair); stroke-width: 1; }
svg .axis { stroke: var(--line); stroke-width: 1; }
svg .mark { stroke: var(--ink); stroke-width: 2; }
svg .mid { text-anchor: middle; }
svg .end { text-anchor: end; }
svg .part { stroke: var(--paper); stroke-width: 1; }
svg .cell { stroke: var(--line); stroke-width: 1; }
svg .curve { fill: none; stroke-width: 2.5; }
svg .link { stroke: var(--line); stroke-width: 2; }
svg .dot { fill: var(--ink); }
svg .ring { fill: var(--paper); stroke: var(--ink); stroke-width: 2; }
.saved { fill: var(--saved); background: var(--saved); stroke: var(--line); }
footer { margin-top: 3rem; padding-top: 0.5rem; border-top: 1px solid var(--hair); }
@media print {
  body { max-width: none; padding: 0; font-size: 9pt; }
  nav, .skip { display: none; }
  .scroll { overflow: visible; }
  table { font-size: 7pt; }
  th, td { padding: 0.1rem 0.3rem; white-space: normal; overflow-wrap: anywhere; }
  tr, figure, .cards li, dt { break-inside: avoid; }
  h2, h3, caption, summary { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
  svg.chart { min-width: 0; max-width: 30rem; }
  svg.wide { max-width: 100%; }
  .swatch, svg { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def stylesheet() -> str:
    """All rules of the page. Dark is for screens alone: paper is light. Lengths in CSS units; source: this module.

    >>> stylesheet().splitlines()[0][:40]
    ':root { color-scheme: light dark; --pape'
    """
    modes = "\n".join(_filled(name, name) for name in ("swa", "full", "reindex", "reuse"))
    parts = "\n".join(_filled(f"c{number + 1}", f"c{number + 1}") for number in range(CATEGORIES))
    strokes = "\n".join(f"svg .curve.c{number} {{ fill: none; stroke: var(--c{number}); }}" for number in (1, 2, 6))
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}"
    return "\n".join(
        (f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}", dark, _RULES.strip(), modes, parts, strokes)
    )


def _filled(name: str, colour: str) -> str:
    return f".{name} {{ fill: var(--{colour}); background: var(--{colour}); }}"


def _variables(palette: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in palette.items())
