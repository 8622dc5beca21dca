"""Tool calls reach a client whole or not at all: tokens of a call wait until its arguments are a JSON object.

The protocol's own parser streams arguments as they are written, before it is known how they end: a client that is cut
off, or whose model writes a number that is none, would be left with half of a call. So a second parser reads ahead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

Logprob = tuple[float, list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Token:
    """As the engine gave it. logprob: its own and those of the likeliest, where they are asked for."""

    id: int
    logprob: Logprob | None = None


class WholeCalls:
    """Lets through what is no call, and calls once they are whole.

    Args:
        checker: a stream processor of Chat Completions for the same answer.
        offered: names of tools.
        several: more than one call is told.

    over: why nothing is told any more: a call that no client can answer, or enough of them.
    """

    def __init__(self, checker: Any, offered: frozenset[str], several: bool) -> None:
        self._checker, self._offered, self._several = checker, offered, several
        self._arguments: Arguments | None = None
        self._index = -1
        self._held: list[Token] = []
        self.over: str | None = None
        self.broken = False

    @property
    def held(self) -> int:
        """Tokens that wait; what still does at the end is not told."""
        return len(self._held)

    def add(self, token: Token) -> list[Token]:
        """What may be told once this token has come, in order."""
        if self.over is not None:
            return []
        if self._checker.finished:
            return [token]
        self._held.append(token)
        ended = False
        for chunk in self._checker.push(chunk_of([token])):
            for choice in json.loads(chunk.to_json())["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    ended = self._take(call) or ended
        if self.broken or self._arguments is not None:
            return []
        told, self._held = self._held, []
        if ended and not self._several:
            self.over = "one call was asked for"
        return told

    def _take(self, call: dict[str, Any]) -> bool:
        """A piece of a call; whether it is whole now."""
        function = call["function"]
        if call["index"] != self._index:
            if self._arguments is not None:
                self._break("its arguments have no end")
            self._index, self._arguments = call["index"], Arguments()
            if function["name"] not in self._offered:
                self._break("its tool was not offered")
        if self._arguments is None or not self._arguments.add(function.get("arguments") or ""):
            return False
        if not self._arguments.legal:
            self._break("its arguments are no JSON object")
        self._arguments = None
        return True

    def _break(self, why: str) -> None:
        self.over, self.broken = self.over or why, True


class Arguments:
    """A JSON text as it is written; it ends where its first bracket is closed."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._depth = 0
        self._quoted = self._escaped = False

    def add(self, text: str) -> bool:
        """Whether it has ended."""
        self._parts.append(text)
        for char in text:
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return True
        return False

    @property
    def legal(self) -> bool:
        """It is an object, of what JSON has.

        >>> made = Arguments()
        >>> made.add('{"a": "}'), made.add('", "b": NaN}'), made.legal
        (False, True, False)
        """
        try:
            return isinstance(json.loads("".join(self._parts), parse_constant=_refuse), dict)
        except (ValueError, RecursionError):
            return False


def chunk_of(tokens: list[Token]) -> Any:
    """What a stream processor takes."""
    told = [token.logprob for token in tokens if token.logprob is not None]
    return recipe.InferenceChunk.tokens([token.id for token in tokens], told or None)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
