"""The parts of the page, in reading order: what each says, draws and tabulates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rorqual.planner import capacity_tables, ledger
from rorqual.planner.explain import TECHNIQUES, chain_table, overview, waterfall, waterfall_table
from rorqual.planner.figure import Figure
from rorqual.planner.glossary import ENTRIES, Entry
from rorqual.planner.glossary.entry import TOPICS, UNVERIFIED
from rorqual.planner.numbers import numbers
from rorqual.planner.report.charts import handover_chart, memory_chart, sessions_chart, waterfall_chart
from rorqual.planner.report.curve import context_chart
from rorqual.planner.report.layer_map import layer_map
from rorqual.planner.report.markup import Markup, lines, prose, slug, tag
from rorqual.planner.report.subject import Subject, cuts
from rorqual.planner.report.tables import sheet
from rorqual.planner.table import Table
from rorqual.planner.traffic_tables import traffic_tables
from rorqual.planner.wrong_answers import wrong_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """id: its anchor. title: its heading."""

    id: str
    title: str
    content: Markup


def sections(subject: Subject) -> tuple[Section, ...]:
    """All parts. Units are in every table's columns; source: the planner's functions, each named in its own text.

    >>> from rorqual.planner.report.example import example
    >>> [section.id for section in sections(example())]
    ['layers', 'ledger', 'contexts', 'waterfall', 'capacity', 'decode', 'traffic', 'numbers', 'techniques', 'glossary']

    Raises InputError for a context above the model's positions, or requests that cannot be.
    """
    parts = (
        ("layers", "Layers", _layers(subject)),
        ("ledger", "Ledger", _ledger(subject)),
        ("contexts", "Bytes by context", _contexts(subject)),
        ("waterfall", "From multi-head attention to this cache", _waterfall(subject)),
        ("capacity", "Capacity", _capacity(subject)),
        ("decode", "A decode step at best", _decode(subject)),
        ("traffic", "Traffic", _traffic(subject)),
        ("numbers", "All numbers", _numbers(subject)),
        ("techniques", "Techniques", _techniques(subject)),
        ("glossary", "Glossary", _glossary()),
    )
    return tuple(Section(id=id, title=title, content=lines(content)) for id, title, content in parts)


def figures_sheet(figures: dict[str, Figure]) -> Markup:
    """Figures with what is shown, the value unrounded, unit, formula, evaluated expression, provenance and note.

    >>> from rorqual.config import presets
    >>> "<td>(3 / 2 + 1 / 1) x 288</td><td>derived</td>" in figures_sheet(numbers(presets.load("v4.1-flash")))
    True

    Each in its own unit; source: `numbers.numbers`.
    """
    columns = ("figure", "shown", "unrounded", "unit", "formula", "evaluated", "provenance", "note")
    rows = tuple(
        (f.id, f.shown, _unrounded(f), f.unit, f.formula, f.expression, f.provenance, f.note) for f in figures.values()
    )
    note = "report: stated there; config: read off it; derived: computed here from the two."
    return sheet(
        Table(name="figures", title="Figures that are quoted of this model", columns=columns, rows=rows, note=note),
        "numbers-figures",
        fold="open",
    )


def _unrounded(figure: Figure) -> str:
    value = figure.document()["value"]
    if isinstance(value, list):
        return " : ".join(map(str, value))
    assert isinstance(value, int | float), figure
    return f"{value:,}"


def _layers(subject: Subject) -> Iterator[Markup]:
    yield _words("Every layer has a window of its own. Only a few make global KV, and the others read it from them.")
    yield layer_map(subject.layout)
    yield sheet(ledger.layer_table(subject.layout), "layers-table")


def _ledger(subject: Subject) -> Iterator[Markup]:
    layout = subject.layout
    yield _words(
        "Bytes a token grow with the context; bytes a sequence do not. They are never divided into each other. "
        "Logical bytes are what the mathematics needs, allocated bytes what the cache makes."
    )
    tables = [ledger.entry_table(layout), ledger.token_table(layout), ledger.sequence_table(layout)]
    tables += [ledger.residency_table(layout), *([wrong_table(layout)] if layout.sources else [])]
    for table in tables:
        yield sheet(table, f"ledger-{slug(table.name)}")


def _contexts(subject: Subject) -> Iterator[Markup]:
    yield context_chart(subject.layout, subject.contexts)
    yield sheet(ledger.context_table(subject.layout, subject.contexts), "contexts-table", fold="open")
    if subject.layout.sources:
        yield sheet(ledger.crossing_table(subject.layout), "contexts-crossing")


def _waterfall(subject: Subject) -> Iterator[Markup]:
    config = subject.layout.config
    yield _words("Each step takes one technique more; the last is exactly what a token adds to this cache.")
    yield waterfall_chart(waterfall(config))
    yield sheet(waterfall_table(config), "waterfall-table")
    yield sheet(chain_table(config), "waterfall-chain")


def _capacity(subject: Subject) -> Iterator[Markup]:
    deployment, mixes = subject.deployment, subject.mixes
    found = cuts(deployment, mixes)
    # Weights alone too large make the same complaint for every context.
    for complaint in dict.fromkeys(cut.complaint for cut in found if cut.complaint):
        yield tag("p", tag("strong", "Does not fit."), " ", prose(complaint), ".", class_="warning", role="note")
    yield memory_chart(deployment, found)
    yield sheet(capacity_tables.weights_table(deployment), "capacity-weights", fold="open")
    for number, cut in enumerate(found):
        if cut.plan is not None:
            table = capacity_tables.memory_table(deployment, cut.plan, cut.mix)
            yield sheet(table, f"capacity-memory-{number}", fold="closed" if number else "open")
    yield sheet(capacity_tables.outside_table(deployment), "capacity-beside")
    sessions = capacity_tables.sessions_table(deployment, mixes)
    yield sessions_chart(sessions)
    yield sheet(sessions, "capacity-sessions", fold="open")
    yield sheet(capacity_tables.storage_table(deployment, mixes[0]), "capacity-storage")
    yield sheet(capacity_tables.padding_table(deployment, mixes[0]), "capacity-padding")


def _decode(subject: Subject) -> Iterator[Markup]:
    device = subject.deployment.device
    if not device.has_bandwidth:
        yield _words(f"No memory bandwidth is known for {device.title}, so nothing can be said about its speed.")
        return
    contexts = sorted({tokens for mix in subject.mixes for tokens, _ in mix.parts})
    yield _words(f"Rates are published ones: {device.source}.")
    yield sheet(capacity_tables.roofline_table(subject.deployment, contexts), "decode-roofline", fold="open")


def _traffic(subject: Subject) -> Iterator[Markup]:
    case = subject.case
    yield _words(
        f"A request of {case.prompt:,} tokens in and {case.output:,} out. Rates and times are an example until they "
        "are given."
    )
    handover, links, figures = traffic_tables(subject.layout, case)
    yield handover_chart(handover)
    for table in (handover, links, figures):
        yield sheet(table, f"traffic-{slug(table.name)}", fold="open")


def _numbers(subject: Subject) -> Iterator[Markup]:
    yield figures_sheet(numbers(subject.layout.config))


def _techniques(subject: Subject) -> Iterator[Markup]:
    yield sheet(overview(subject.layout.config), "techniques-overview", fold="open")
    yield sheet(
        Table(
            name="pays",
            title="What each moves, and what it pays",
            columns=("technique", "moves", "approximation", "expressiveness", "training"),
            rows=tuple((t.name, t.moves, t.approximation, t.expressiveness, t.training) for t in TECHNIQUES),
        ),
        "techniques-pays",
    )


def _glossary() -> Iterator[Markup]:
    yield _words(
        f'Figures are the release\'s. "{UNVERIFIED}" marks what could not be checked, "extrapolated" what is said '
        "beyond what the V4.1 report discloses."
    )
    for topic in TOPICS:
        yield tag("h3", f"{topic[0].upper()}{topic[1:]}")
        entries = [_term(entry) for entry in ENTRIES if entry.topic == topic]
        yield tag("dl", lines(entries), class_="terms")


def _term(entry: Entry) -> Markup:
    said = [entry.meaning]
    if entry.descends:
        said.append(f"Descends from {'; '.join(work.citation() for work in entry.descends)}.")
    if entry.extrapolated:
        said.append(f"Extrapolated: {entry.extrapolated}")
    heading = tag("dt", f"{entry.term} ", tag("span", f"({entry.expansion})"), id=f"term-{slug(entry.term)}")
    return lines((heading, *(tag("dd", prose(words)) for words in said)))


def _words(said: str) -> Markup:
    return tag("p", prose(said))
