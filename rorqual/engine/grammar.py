"""Constrained text: which tokens may come next, asked of `llguidance`. Loaded only when a request is constrained."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.engine.params import Constraint
from rorqual.errors import InputError

INSTALL = "constraint: needs llguidance, which is not installed; pip install 'rorqual[constraints]'"

COMPACT = {"whitespace_flexible": False}
"""JSON without free white space: a small model would go on with blank lines until its budget ends."""


class Grammars:
    """Compiles constraints for one tokenizer.

    vocabulary: of the model's logits; ids that the tokenizer does not know are never allowed.

    Raises:
        InputError: `llguidance` is missing, or the model has no tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int, eos: int) -> None:
        if tokenizer is None:
            raise InputError("constraint: this checkpoint has no tokenizer.json; a constraint is about text")
        if find_spec("llguidance") is None:
            raise InputError(INSTALL)
        import llguidance

        self._guide: Any = llguidance
        self._tokenizer = tokenizer
        self._vocabulary, self._eos = vocabulary, eos
        self._tokens = llguidance.LLTokenizer(
            tokenizer.to_str(), n_vocab=max(vocabulary, tokenizer.get_vocab_size()), eos_token=eos
        )

    def matcher(self, constraint: Constraint) -> Matcher:
        """A fresh matcher. Raises InputError with the reason where the constraint is not legal."""
        found = self._guide.LLMatcher(self._tokens, self._grammar(constraint))
        if found.is_error():
            raise InputError(f"constraint: {' '.join(found.get_error().split())}")
        return Matcher(found, self._vocabulary, self._eos, self._opening(constraint))

    def _opening(self, constraint: Constraint) -> int | None:
        """The id of the token that a constraint begins after."""
        if constraint.after is None:
            return None
        found = self._tokenizer.token_to_id(constraint.after)
        if found is None:
            raise InputError(f"constraint: after {constraint.after!r} is no token of this model")
        return int(found)

    def _grammar(self, constraint: Constraint) -> str:
        make, value = self._guide.LLMatcher, constraint.value
        try:
            match constraint.kind:
                case "json_object":
                    grammar = make.grammar_from_json_schema({"type": "object"}, COMPACT)
                case "json_schema":
                    schema = value if isinstance(value, str) else json.dumps(value)
                    grammar = make.grammar_from_json_schema(schema, COMPACT)
                case "regex":
                    grammar = make.grammar_from_regex(value)
                case "choice":
                    grammar = make.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
                case _:
                    grammar = make.grammar_from_lark(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"constraint: {' '.join(str(error).split())}") from error
        return str(grammar)


class Matcher:
    """Where in its grammar one sequence stands. after: a token that has to come first; None where nothing has to."""

    def __init__(self, matcher: Any, vocabulary: int, eos: int, after: int | None = None) -> None:
        self._matcher, self._vocabulary, self._eos, self._after = matcher, vocabulary, eos, after

    def allowed(self) -> Tensor:
        """bool [V]: the tokens that may come next; eos where the text may end, and it alone where it must."""
        if self._after is not None:
            free = torch.ones(self._vocabulary, dtype=torch.bool)
            free[self._eos] = False
            return free
        if self._matcher.is_stopped():
            only = torch.zeros(self._vocabulary, dtype=torch.bool)
            only[self._eos] = True
            return only
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool))

    def take(self, token: int) -> None:
        """The token was chosen; one of `allowed`."""
        if self._after is not None:
            self._after = None if token == self._after else self._after
        elif not self._matcher.is_stopped() and token != self._eos:
            taken = self._matcher.consume_token(token)
            assert taken, f"token {token} does not match: {self._matcher.get_error()}"

    def fork(self) -> Matcher:
        """The same so far; they go on apart."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary, self._eos, self._after)
