"""The document: head, header, what matters in short, contents, the sections, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from rorqual.planner.capacity_tables import sessions_table
from rorqual.planner.ledger import crossing_tokens
from rorqual.planner.numbers import numbers
from rorqual.planner.report.markup import Markup, lines, prose, tag
from rorqual.planner.report.sections import Section, sections
from rorqual.planner.report.style import stylesheet
from rorqual.planner.report.subject import Subject
from rorqual.planner.report.tables import cell
from rorqual.planner.traffic import HANDOVERS, handover_bytes
from rorqual.planner.units import decimal_bytes, fixed_text, number_text

# The page asks nobody for anything; a browser that obeys this could not even if it did.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(subject: Subject) -> str:
    """The whole page as text: HTML that no other file belongs to. Equal subjects give equal pages, byte for byte.

    >>> from rorqual.planner.report.example import example
    >>> whole = page(example())
    >>> whole.splitlines()[:2], whole == page(example())
    (['<!DOCTYPE html>', '<html lang="en">'], True)

    Units are in every column's name; source: `sections.sections`. Raises InputError as that does.
    """
    title = f"Plan of {subject.model}"
    parts = sections(subject)
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", title),
        tag("style", Markup(f"\n{stylesheet()}\n")),
    )
    body = (
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", lines((tag("h1", title), tag("dl", lines(_facts(subject)), class_="facts")))),
        _contents(parts),
        tag("main", lines((_short(subject), *(_section(part) for part in parts))), id="content", tabindex=-1),
        tag("footer", tag("p", prose("Made by `rorqual plan report`. Every figure is arithmetic on the config."))),
    )
    return f"<!DOCTYPE html>\n{_document(head, body)}\n"


def _document(head: Sequence[Markup], body: Sequence[Markup]) -> Markup:
    parts = ("\n", tag("head", "\n", lines(head), "\n"), "\n", tag("body", "\n", lines(body), "\n"), "\n")
    return tag("html", *parts, lang="en")


def _facts(subject: Subject) -> Iterator[Markup]:
    """What the page was made from."""
    deployment, layout, case = subject.deployment, subject.layout, subject.case
    ranks = deployment.ranks
    facts = {
        "Model": subject.model,
        "Fingerprint": layout.config.fingerprint(),
        "Date": subject.date,
        "KV page": f"{layout.page_tokens:,} tokens",
        "Devices": f"{ranks.count} x {deployment.device.title}, tp {ranks.tp}, attention groups {ranks.dp_attention}, "
        f"ep {ranks.ep}, {float(deployment.utilisation):g} of the memory",
        "Loaded": _loaded(subject),
        "Rows stored": deployment.rows.storage,
        "Requests": f"{case.prompt:,} tokens in, {case.output:,} out, {number_text(case.rate)} a second, "
        f"{number_text(100 * Fraction(case.hit_rate))} % of the prompt in the pool",
    }
    for name, value in facts.items():
        if value:
            yield lines((tag("dt", name), tag("dd", value)))


def _loaded(subject: Subject) -> str:
    config, placement = subject.layout.config, subject.deployment.placement
    engram = "left out" if placement.engram == "off" else f"on {placement.engram}"
    engram = engram if config.engram_layer_ids else "none"
    drafts = _kept(config.num_nextn_predict_layers > 0, placement.drafts)
    vision = _kept(config.vision is not None, placement.vision)
    return f"Engram {engram}, drafts {drafts}, vision {vision}"


def _kept(there: bool, kept: bool) -> str:
    return ("loaded" if kept else "left out") if there else "none"


def _short(subject: Subject) -> Markup:
    """The handful of figures that most readers come for."""
    cards = [tag("li", tag("strong", figure), meaning) for figure, meaning in _highlights(subject)]
    heading = tag("h2", "In short", id="short-heading")
    content = lines((heading, tag("ul", lines(cards), class_="cards")))
    return tag("section", content, id="short", aria_labelledby="short-heading")


def _highlights(subject: Subject) -> Iterator[tuple[str, str]]:
    layout, figures = subject.layout, numbers(subject.layout.config)
    yield f"{number_text(layout.bytes_per_token)} B", "of global KV a token"
    yield f"{layout.window_bytes_logical:,} B", "of windows a sequence, whatever its length"
    if layout.sources:
        yield f"{fixed_text(crossing_tokens(layout), 1)} tokens", "is where global KV overtakes the windows"
    if "active_params_decode" in figures:
        yield f"{figures['active_params_decode'].shown} parameters", "are multiplied with a decoded token"
    rows = sessions_table(subject.deployment, subject.mixes).records()
    for row in dict.fromkeys((0, len(rows) - 1)):
        count, context = rows[row]["sessions a replica"], rows[row]["context [tokens]"]
        devices = f"{subject.deployment.ranks.count} x {subject.deployment.device.title}"
        yield f"{count:,} session{'' if count == 1 else 's'}", f"of {cell(context)} tokens on {devices}"
    least = min(HANDOVERS, key=lambda mode: handover_bytes(layout, subject.case.prompt, mode))
    size = decimal_bytes(handover_bytes(layout, subject.case.prompt, least))
    yield size, f"handed over for a prompt of {subject.case.prompt:,} tokens ({least})"


def _contents(parts: Sequence[Section]) -> Markup:
    links = [tag("li", tag("a", "In short", href="#short"))]
    links += [tag("li", tag("a", part.title, href=f"#{part.id}")) for part in parts]
    heading = tag("h2", "Contents", id="contents")
    return tag("nav", lines((heading, tag("ol", lines(links)))), aria_labelledby="contents")


def _section(part: Section) -> Markup:
    heading = tag("h2", part.title, id=f"{part.id}-heading")
    return tag("section", lines((heading, part.content)), id=part.id, aria_labelledby=f"{part.id}-heading")
