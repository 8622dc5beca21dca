"""The terms of the architecture and of this project, as data: printed, written as JSON or CSV, and `docs/glossary.md`.

The page is made from here, and a test keeps the two equal: `rorqual plan glossary --markdown > docs/glossary.md`.
"""

from __future__ import annotations

from rorqual.errors import InputError
from rorqual.planner.glossary.entry import TOPICS, UNVERIFIED, Entry, Work
from rorqual.planner.glossary.house_terms import HOUSE
from rorqual.planner.glossary.model_terms import AROUND, ATTENTION, FORMATS
from rorqual.planner.table import Table

__all__ = ["ENTRIES", "Entry", "Work", "details", "find", "glossary", "markdown"]

ENTRIES: tuple[Entry, ...] = (*ATTENTION, *AROUND, *FORMATS, *HOUSE)

_PREFACE = f"""# Glossary

Terms of DeepSeek-V4.1-Flash and of this project, each in its own words. Figures are the release's. "{UNVERIFIED}"
marks what could not be checked, "extrapolated" what is said beyond what the V4.1 report discloses.
`rorqual plan glossary TERM` prints one entry; this page is made from the same data.
"""


def find(term: str) -> Entry:
    """The entry of this term or alias, in any case. Without unit; source: `ENTRIES`.

    >>> find("csa2").term, find("Reuse").term, find("mxfp4").term
    ('CSA2', 'Full / Reindex / Reuse', 'E2M1/E8M0/32')

    Raises:
        InputError: no such term; the message names all of them.
    """
    wanted = _key(term)
    for entry in ENTRIES:
        if wanted in {_key(name) for name in (entry.term, *entry.aliases)}:
            return entry
    raise InputError(f"term must be one of {', '.join(entry.term for entry in ENTRIES)}; got {term!r}")


def glossary() -> Table:
    """All entries, one row each. Without unit; source: `ENTRIES`.

    >>> [row[0] for row in glossary().rows][:3]
    ['MHA', 'MQA', 'GQA']
    """
    return Table(
        name="glossary",
        title="Glossary",
        columns=("term", "stands for", "meaning"),
        rows=tuple((entry.term, entry.expansion, _text(entry)) for entry in ENTRIES),
        note="`rorqual plan glossary TERM` adds the prior work.",
    )


def details(entry: Entry) -> Table:
    """One entry in full, a row a fact. Without unit; source: the entry.

    >>> [row[0] for row in details(find("QAT")).rows]
    ['stands for', 'meaning', 'descends from', 'descends from', 'extrapolated']
    """
    rows = [("stands for", entry.expansion), ("meaning", entry.meaning)]
    rows += [("descends from", work.citation()) for work in entry.descends]
    rows += [("extrapolated", entry.extrapolated)] if entry.extrapolated else []
    return Table(name="entry", title=entry.term, columns=("what", "text"), rows=tuple(rows))


def markdown() -> str:
    """The page `docs/glossary.md`. Without unit; source: `ENTRIES`.

    >>> markdown().splitlines()[0]
    '# Glossary'
    """
    parts = [_PREFACE]
    for topic in TOPICS:
        parts.append(f"## {topic[0].upper()}{topic[1:]}\n")
        parts.extend(_paragraph(entry) for entry in ENTRIES if entry.topic == topic)
    return "\n".join(parts)


def _paragraph(entry: Entry) -> str:
    lines = [f"**{entry.term}** ({entry.expansion}). {entry.meaning}"]
    if entry.descends:
        lines.append(f"*Descends from* {'; '.join(work.citation() for work in entry.descends)}.")
    if entry.extrapolated:
        lines.append(f"*Extrapolated:* {entry.extrapolated}")
    # Two spaces at a line's end would be invisible in the source; a backslash is a line break too.
    return "\\\n".join(lines) + "\n"


def _text(entry: Entry) -> str:
    return f"{entry.meaning} Extrapolated: {entry.extrapolated}" if entry.extrapolated else entry.meaning


def _key(name: str) -> str:
    return "".join(name.lower().replace("-", " ").replace("_", " ").split())
