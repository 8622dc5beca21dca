"""What a caller may ask of the choice of tokens, and when it ends. Checked here, once, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rorqual.errors import InputError

MAX_LOGPROBS = 20
"""Alternatives a token; the bound of the APIs that ask for them."""
CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "choice")


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What the text has to match; tokens that cannot lead there have no probability.

    kind: one of `CONSTRAINTS`. value: a JSON schema (text or object), a regular expression, a Lark grammar, or a list
    of texts; nothing for `json_object`. after: the spelling of a token; the text is free until it has come, and does
    not end before: what a model thinks before it answers.
    """

    kind: str
    value: Any = None
    after: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINTS:
            raise InputError(f"constraint: {self.kind!r} is not one of {', '.join(CONSTRAINTS)}")
        if (self.value is None) != (self.kind == "json_object"):
            raise InputError(f"constraint: {self.kind} takes {'no value' if self.value is not None else 'a value'}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and how many.

    temperature: 0 is greedy. top_k: 0 keeps every token. top_p: 1 keeps every token. min_p: drops tokens below this
        share of the likeliest one's probability.
    presence_penalty, frequency_penalty: subtracted from the logit of a generated token, once and per occurrence.
    repetition_penalty: divides positive logits of tokens in prompt and output, multiplies negative ones.
    logit_bias: token id -> added to its logit.
    seed: makes the text repeatable, whatever else runs; None draws a fresh one.
    n: completions of one prompt. max_tokens, min_tokens: of each; before `min_tokens` nothing ends it.
    stop: texts that end it; they are not part of the text. stop_ids: tokens that end it, as eos does.
    ignore_eos: eos is a token like any other.
    logprobs: alternatives reported beside each token, 0 for its own alone; None reports nothing. They are of the
        model's distribution, before anything above. prompt_logprobs: the same of the prompt (`full` prefill).
    constraint: what the text has to match.

    Raises:
        InputError: naming the parameter and its legal values.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        self._check_choice()
        self._check_end()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _legal(name, value, value is None or 0 <= value <= MAX_LOGPROBS, f"0..{MAX_LOGPROBS}, or none")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Logits depend on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def _check_choice(self) -> None:
        t, bias, p = self.temperature, self.logit_bias, self.repetition_penalty
        _legal("temperature", t, math.isfinite(t) and t >= 0, "0 (greedy) or a positive number")
        _legal("top_k", self.top_k, self.top_k >= 0, "0 (off) or a positive count")
        _legal("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1")
        _legal("min_p", self.min_p, 0 <= self.min_p <= 1, "0..1")
        for name in ("presence_penalty", "frequency_penalty"):
            _legal(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "-2..2")
        _legal("repetition_penalty", p, math.isfinite(p) and p > 0, "a positive number; 1 is off")
        _legal("seed", self.seed, self.seed is None or 0 <= self.seed < 2**63, "0..2^63 - 1")
        for token, value in bias.items():
            _legal(f"logit_bias of {token}", value, isinstance(token, int) and math.isfinite(value), "a finite number")

    def _check_end(self) -> None:
        _legal("n", self.n, self.n >= 1, "at least 1")
        _legal("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        low, most = self.min_tokens, self.max_tokens
        _legal("min_tokens", low, 0 <= low <= most, f"0..max_tokens, which is {most}")
        for text in self.stop:
            _legal("stop", text, isinstance(text, str) and text != "", "texts of at least 1 character")
        for token in self.stop_ids:
            _legal("stop_ids", token, isinstance(token, int) and token >= 0, "token ids")


def _legal(name: str, value: object, is_legal: bool, legal: str) -> None:
    if not is_legal:
        raise InputError(f"{name}: {value!r} is not legal; legal: {legal}")
