"""One completion's tokens on their way to chunks of a protocol: special tokens are no text, calls come whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from rorqual.engine.output import TokenLogprob
from rorqual.log import logger
from rorqual.server.tool_calls import Token, WholeCalls, chunk_of

Parts = list[Any]
REASONS = {"length": recipe.InferenceFinishReason.Length}


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """How the tokens of a call's completions become chunks.

    processor: makes what turns tokens into chunks, for one completion each. checker: makes one of Chat Completions for
    the same; None where no calls are parsed. offered: names of tools. several: calls that are told may be more than
    one. hidden: special tokens that are not told. end_think: ends the thinking; None where there is none.
    """

    processor: Callable[[], Any]
    checker: Callable[[], Any] | None
    offered: frozenset[str]
    several: bool
    hidden: frozenset[int]
    end_think: int | None


class Reply:
    """Chunks of one completion. done: the last of them has come, though the engine may go on."""

    def __init__(self, making: Making) -> None:
        self._processor = making.processor()
        self._calls = None
        if making.checker is not None:
            self._calls = WholeCalls(making.checker(), making.offered, making.several)
        self._hidden, self._end_think = making.hidden, making.end_think
        self._begun = self.done = False

    def begin(self, prompt: int, hit: int) -> Parts:
        """What comes before the first token; nothing the second time. Tokens of the prompt, and those found."""
        if self._begun:
            return []
        self._begun = True
        usage = recipe.PromptUsage(prompt_tokens=prompt, prompt_cache_hit_tokens=hit)
        return list(self._processor.push(recipe.InferenceChunk.ready(prompt_usage=usage)))

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> Parts:
        """What these tokens add."""
        found = self._told(ids, logprobs)
        if self._processor.finished:
            self.done = True
            return found + list(self._processor.finish())
        if self._calls is not None and self._calls.over is not None:
            return found + self.end("stop")
        return found

    def _told(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> Parts:
        tokens = [
            Token(token, None if logprobs is None else (logprobs[at].logprob, list(logprobs[at].top)))
            for at, token in enumerate(ids)
        ]
        if self._calls is None and self._hidden.isdisjoint(ids):
            return self._push(tokens)
        found: Parts = []
        ready: list[Token] = []
        for token in tokens:
            if self._is_hidden(token.id):
                found += self._push(ready) + self._counted(1)
                ready = []
            else:
                ready += [token] if self._calls is None else self._calls.add(token)
        return found + self._push(ready)

    def end(self, reason: str) -> Parts:
        """What comes after the last token. reason: the engine's; of a call that is not whole nothing is told."""
        found: Parts = []
        self.done = True
        if self._calls is not None and self._calls.held:
            why = self._calls.over or ("the budget ended in it" if reason == "length" else "it has no end")
            logger.warning("server: a tool call is not told: %s", why)
            found += self._counted(self._calls.held)
        if not self._processor.finished:
            reasons = REASONS.get(reason, recipe.InferenceFinishReason.Stop)
            found += self._processor.push(recipe.InferenceChunk.finish(reasons))
        return found + list(self._processor.finish())

    def _is_hidden(self, token: int) -> bool:
        """The first end of thinking is the parser's; another one is no text."""
        if token == self._end_think:
            self._end_think = None
            self._hidden |= {token}
            return False
        return token in self._hidden

    def _push(self, tokens: list[Token]) -> Parts:
        if not tokens or self._processor.finished:
            return []
        return list(self._processor.push(chunk_of(tokens)))

    def _counted(self, tokens: int) -> Parts:
        """Tokens that are not told are tokens of the answer all the same."""
        if self._processor.finished:
            return []
        return list(self._processor.push(recipe.InferenceChunk.text("", tokens)))
