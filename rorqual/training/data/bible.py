"""A translation of the Bible out of a `pythonbible-*` package, as running text.

The packages hold one long string with marks of how it was made. A verse here is plain: foreign verse numbers, brackets
round supplied words and empty footnotes are gone, a backtick is the apostrophe or quotation mark that it stands for,
and the runs of blanks that lay out verse are line ends. An empty line ends a chapter; verses have no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

BOOK_DIGITS, CHAPTER_DIGITS = 1_000_000, 1_000
"""A verse id is book, chapter, verse in base 1000."""

_FOREIGN_NUMBER = re.compile(r"\\+(\d+:\d+\\+)?")
_PSALM_HEADING = re.compile(r"\s+(BOOK [IVX]+\s+)?Psalm \d+(?P<title>.*)$", re.DOTALL)
_WRAPPED = re.compile(r" {6,}(?=[a-z])")
"""A line of verse that was too wide, going on."""
_LAYOUT = re.compile(r" {2,}")
_DROPPED = str.maketrans("", "", "[]+")


def books(package: Any) -> Iterator[tuple[str, str]]:
    """(name, text) of each book in canonical order. package: the `bible` object of a plain-text module."""
    content: str = package.scripture_content
    ends: Mapping[int, int] = package.verse_end_indices
    if max(ends.values()) > len(content):
        # The offsets of this version were taken where its backslashes were still written twice.
        content = content.replace("\\", "\\\\")
    names = {book.value: name for book, name in package.short_titles.items()}
    chapters: dict[int, dict[int, list[str]]] = {}
    for verse, start in package.verse_start_indices.items():
        book, chapter = verse // BOOK_DIGITS, verse // CHAPTER_DIGITS % 1000
        chapters.setdefault(book, {}).setdefault(chapter, []).append(content[start : ends[verse]])
    for book in sorted(chapters):
        yield names[book], _book([chapters[book][chapter] for chapter in sorted(chapters[book])])


def _book(chapters: list[list[str]]) -> str:
    texts, title = [], ""
    for verses in chapters:
        # The heading of a psalm hangs on the verse before it.
        heading = _PSALM_HEADING.search(verses[-1])
        if heading:
            verses = [*verses[:-1], verses[-1][: heading.start()]]
        texts.append(title + _chapter(verses))
        title = _plain(heading["title"]) + "\n" if heading and heading["title"].strip() else ""
    return "\n\n".join(texts) + "\n"


def _chapter(verses: list[str]) -> str:
    """Verses with a blank between them, or a line end where one of the two is laid out in lines."""
    told = [verse for verse in verses if verse.strip(" []+")]
    joined = []
    for verse, following in zip(told, [*told[1:], ""], strict=True):
        laid_out = "  " in verse.strip() or following.startswith("  ")
        joined.append(verse.strip() + ("  " if laid_out else " "))
    return _plain("".join(joined))


def _plain(raw: str) -> str:
    text = _FOREIGN_NUMBER.sub("", raw)
    text = text.replace("***", "...").replace("`", "'").translate(_DROPPED)
    text = re.sub(r"(\w)\(", r"\1 (", text)
    return _LAYOUT.sub("\n", _WRAPPED.sub(" ", text)).strip()
