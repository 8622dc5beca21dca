"""A term of the glossary and the earlier work that it descends from, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Topic = Literal["attention and its cache", "around attention", "number formats", "this project's own words"]
TOPICS: tuple[Topic, ...] = (
    "attention and its cache",
    "around attention",
    "number formats",
    "this project's own words",
)
UNVERIFIED = "not verified here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A paper, report or standard. reference: an arXiv number where it is known. Where `verified` is false, only the
    name is known here, and the citation says so."""

    title: str
    year: int | None = None
    authors: str = ""
    reference: str = ""
    verified: bool = True

    def citation(self) -> str:
        """One line.

        >>> Work(title="On Time", year=1967, authors="A. Author").citation()
        'A. Author, "On Time", 1967'
        >>> Work(title="Rumour", verified=False).citation()
        '"Rumour" (not verified here)'
        """
        parts = [self.authors, f'"{self.title}"', str(self.year or ""), self.reference]
        line = ", ".join(part for part in parts if part)
        return line if self.verified else f"{line} ({UNVERIFIED})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One term. expansion: what the letters stand for. meaning: one to three sentences, figures of the release.

    aliases: other names that find it. descends: prior work. extrapolated: what is said here beyond what the V4.1 report
    discloses.
    """

    term: str
    expansion: str
    topic: Topic
    meaning: str
    aliases: tuple[str, ...] = ()
    descends: tuple[Work, ...] = ()
    extrapolated: str = ""

    def document(self) -> dict[str, object]:
        """For JSON, without the term, which is the key.

        >>> term = Entry(term="W", expansion="window", topic="number formats", meaning="It is.")
        >>> term.document()["descends_from"], term.document()["extrapolated"]
        ([], None)
        """
        return {
            "expansion": self.expansion,
            "topic": self.topic,
            "meaning": self.meaning,
            "descends_from": [work.citation() for work in self.descends],
            "extrapolated": self.extrapolated or None,
        }
