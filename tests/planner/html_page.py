"""Reads a page as a browser would, and complains of what a browser would forgive."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = ("meta",)


@dataclass
class Sheet:
    """A table: caption, header cells with their scopes, rows of text."""

    caption: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    scopes: set[str | None] = field(default_factory=set)


class Page(HTMLParser):
    """Fails on unbalanced tags; collects what tests ask for."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[tuple[int, str]] = []
        self.sheets: dict[str, Sheet] = {}
        self.text = ""
        self._open: list[str] = []
        self._sheet = ""
        self._cell: list[str] | None = None
        self.feed(source)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    @property
    def ids(self) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get("id"))]

    def attributes(self, name: str) -> list[str]:
        """Every value of an attribute."""
        return [value for _, attributes in self.tags if (value := attributes.get(name)) is not None]

    def svgs(self) -> dict[str, ElementTree.Element]:
        """Inline drawings as XML, by the id of their title."""
        trees = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", self.source, re.DOTALL)]
        return {tree[0].attrib["id"].removesuffix("-drawing-title"): tree for tree in trees}

    def described(self, name: str) -> str:
        """The text alternative of a drawing."""
        return self.svgs()[name].findtext("desc") or ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert len(attributes) == len(attrs), f"an attribute twice in <{tag}>"
        self.tags.append((tag, attributes))
        if tag in VOID:
            return
        self._open.append(tag)
        if tag == "div" and attributes.get("class") == "sheet":
            self._sheet = attributes["id"] or ""
            self.sheets[self._sheet] = Sheet()
        if tag == "tr" and "tbody" in self._open:
            self.sheets[self._sheet].rows.append([])
        if tag in ("th", "td", "caption", "h1", "h2", "h3"):
            self._cell = []
        if tag == "th":
            self.sheets[self._sheet].scopes.add(attributes.get("scope"))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()
        if tag in ("th", "td", "caption", "h1", "h2", "h3"):
            assert self._cell is not None
            self._keep(tag, "".join(self._cell))
            self._cell = None

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        raise AssertionError(f"<{tag}/> is open to HTML")

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if self._cell is not None:
            self._cell.append(data)

    def _keep(self, tag: str, text: str) -> None:
        if tag.startswith("h"):
            self.headings.append((int(tag[1]), text))
        elif tag == "caption":
            self.sheets[self._sheet].caption = text
        elif "thead" in self._open:
            self.sheets[self._sheet].columns.append(text)
        else:
            self.sheets[self._sheet].rows[-1].append(text)
