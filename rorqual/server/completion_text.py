"""One completion's text as clients of text completions expect it: echo, and log-probabilities with offsets.

A token is told once the text has gone past where it begins, so a stop text never shows through its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from rorqual.engine.output import Delta, TokenLogprob
from rorqual.engine.text import Detokenizer

LEAST = -9999.0
"""The logarithm told of a probability of 0: the smallest that JSON readers of every kind take."""


class CompletionText:
    """Pieces of one choice.

    Args:
        spelling: of tokens.
        logprobs: they are told.
        start: characters in front of the first new token: those of an echoed prompt.
    """

    def __init__(self, spelling: Spelling, logprobs: bool, start: int = 0) -> None:
        self._spelling, self._logprobs = spelling, logprobs
        self._detokenizer = Detokenizer(spelling.tokenizer)
        self._begun = self._shown = start
        self._held: list[tuple[TokenLogprob, int]] = []

    def piece(self, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """The text that a delta adds, and the log-probabilities that may be told with it."""
        self._shown += len(delta.text)
        if not self._logprobs:
            return delta.text, None
        told = list(delta.logprobs or ())
        if delta.finish_reason == "stop" and isinstance(delta.stopped_by, int):
            told = told[:-1]
        for one in told:
            self._held.append((one, self._begun))
            self._begun += len(self._detokenizer.add(one.token))
        by_text = delta.finish_reason == "stop" and isinstance(delta.stopped_by, str)
        last = delta.finish_reason is not None and not by_text
        ready = [pair for pair in self._held if last or pair[1] < self._shown]
        self._held = self._held[len(ready) :]
        return delta.text, self._spelling.logprobs([one for one, _ in ready], [at for _, at in ready])


class Spelling:
    """How tokens are written. as_ids: by number, as `token_id:17`."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self.tokenizer, self.as_ids = tokenizer, as_ids

    def token(self, token: int) -> str:
        """A token's text; of one that is no whole characters its bytes, as `bytes:\\xe2\\x80`."""
        if self.as_ids:
            return f"token_id:{token}"
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" not in text:
            return text
        spelled = self.tokenizer.id_to_token(token) or ""
        if any(char not in BYTES for char in spelled):
            return text
        return "bytes:" + "".join(f"\\x{BYTES[char]:02x}" for char in spelled)

    def prompt(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of a prompt, and where each of its tokens begins in it."""
        detokenizer, text, offsets = Detokenizer(self.tokenizer), "", []
        for token in ids:
            offsets.append(len(text))
            text += detokenizer.add(token)
        return text + detokenizer.flush(), offsets

    def logprobs(self, told: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
        """Of new tokens, in OpenAI's shape for text completions."""
        return {
            "tokens": [self.token(one.token) for one in told],
            "token_logprobs": [finite(one.logprob) for one in told],
            "top_logprobs": [self._top(one) for one in told],
            "text_offset": list(offsets),
        }

    def echoed(
        self, ids: Sequence[int], found: Sequence[TokenLogprob | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Of a prompt's; its first token has none."""
        return {
            "tokens": [self.token(token) for token in ids],
            "token_logprobs": [None if one is None else finite(one.logprob) for one in found],
            "top_logprobs": [None if one is None else self._top(one) for one in found],
            "text_offset": list(offsets),
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """The likeliest, and the token itself; of two of one spelling the likelier."""
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            found.setdefault(self.token(token), finite(logprob))
        return found


def finite(logprob: float) -> float:
    """JSON knows no infinity.

    >>> finite(-1.5), finite(float("-inf"))
    (-1.5, -9999.0)
    """
    return max(logprob, LEAST)


def joined(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Log-probabilities of pieces, one behind the other; None where none are told."""
    told = [part for part in parts if part is not None]
    if not told:
        return None
    return {name: [each for part in told for each in part[name]] for name in told[0]}


def _bytes() -> dict[str, int]:
    """Character -> byte of a byte-level vocabulary: printable ones stand for themselves, others follow from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTES = _bytes()
