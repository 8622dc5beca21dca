"""Tokens to text as they come: whole characters only, and nothing that a stop text may still take back."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

INCOMPLETE = "\ufffd"


class Detokenizer:
    """Text deltas of a token stream; bytes of one character split over tokens are held back until it is whole.

    alone: texts of single tokens, as far as they were needed; several streams of one tokenizer may share it.
    """

    def __init__(self, tokenizer: Tokenizer | None, alone: dict[int, str] | None = None) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0
        self._alone: dict[int, str] = {} if alone is None else alone

    def add(self, token: int) -> str:
        """The text that this token completes; without a tokenizer, its id and a space."""
        if self.tokenizer is None:
            return f"{token} "
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(INCOMPLETE):
            return ""
        delta = text[len(self._shown_text()) :]
        # What is shown is forgotten but for the tokens that came with the last delta: a decoder may treat the first
        # token of a text in another way than the others. So each delta costs the same, however long the text.
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return delta

    def flush(self) -> str:
        """What is left at the end, incomplete bytes included."""
        if self.tokenizer is None or len(self._ids) == self._shown:
            return ""
        rest = self._decode(self._ids)[len(self._shown_text()) :]
        self._shown = len(self._ids)
        return rest

    def _shown_text(self) -> str:
        """Of the tokens that are still held and were shown: mostly one, whose text is looked up."""
        if self._shown != 1:
            return self._decode(self._ids[: self._shown])
        token = self._ids[0]
        if token not in self._alone:
            self._alone[token] = self._decode([token])
        return self._alone[token]

    def _decode(self, ids: Sequence[int]) -> str:
        assert self.tokenizer is not None
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


class StopText:
    """Looks for stop texts in a stream of deltas; what may be the beginning of one is held back.

    stops: the one that is complete first ends the text, and of those complete at once the one that began first.

    >>> stop = StopText(["\\n\\n", "END"])
    >>> [stop.add(delta) for delta in ("a\\n", "b E", "NE", "ND.")], stop.found
    (['a', '\\nb ', 'EN', ''], 'END')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def add(self, delta: str) -> str:
        """What may be shown now. Once a stop text is `found`, nothing follows what is in front of it."""
        assert self.found is None
        if not self._stops or not delta:
            return delta
        text, already = self._held + delta, len(self._held)
        for end in range(already + 1, len(text) + 1):
            matches = [stop for stop in self._stops if text.endswith(stop, 0, end)]
            if matches:
                self.found, self._held = max(matches, key=len), ""
                return text[: end - len(self.found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop text begins with, less than all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
