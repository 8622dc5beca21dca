"""What every source yields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Turn:
    """role: one of ROLES."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text, or one conversation.

    name: what held-out patterns match; unique in a data set but where a file is called as a repeat of another, or as a
        line of it, would be (`a.txt#2`, `a.jsonl:1`; see `rorqual.training.data.sources`).
    text: of a text, turns: of a conversation; the other is empty.
    group: documents of one group are held out together ("" stands for the name): the same book in two translations.
    """

    name: str
    text: str = ""
    turns: tuple[Turn, ...] = ()
    group: str = ""

    @property
    def kind(self) -> str:
        """ "text" or "chat"."""
        return "chat" if self.turns else "text"

    @property
    def family(self) -> str:
        return self.group or self.name

    @property
    def passages(self) -> tuple[str, ...]:
        """Its plain texts, markers left out."""
        return tuple(turn.content for turn in self.turns) if self.turns else (self.text,)

    @property
    def characters(self) -> int:
        return sum(len(passage) for passage in self.passages)


class Source(Protocol):
    """Documents that can be read again, in the same order."""

    def documents(self) -> Iterator[Document]:
        """Lazily; nothing is held."""

    def fingerprint(self) -> str:
        """A hash that changes whenever what `documents` gives does."""
