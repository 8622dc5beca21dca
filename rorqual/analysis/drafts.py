"""Greedy speculation, measured: how many tokens one verification yields.

    propose a block after the next token -> verify both in one forward -> keep the drafts up to the first one that is
    not the backbone's own choice, and that choice (the bonus) -> rewind over the rest

The text is that of plain greedy decoding, to the bit, because a row's bits do not depend on its neighbours.
A small model's own greedy text soon runs in circles, which flatters a draft; `follow` measures on given text instead:
the next token is the text's, and what counts is how far the draft agrees with the backbone's choices after it.
Nothing that is said after EOS counts, and of a text that a budget ends nothing past the budget.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.engine.draft import feed_draft, propose_after
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.errors import InputError
from rorqual.model.step import SequenceOutput
from rorqual.model.transformer import Transformer


@dataclass(slots=True, kw_only=True)
class Tally:
    """accepted[i]: verifications that kept draft i (and all before it). emitted: tokens that verifications gave; the
    first of a text is not among them, the prefill gives it."""

    verifications: int = 0
    accepted: list[int] = field(default_factory=list)
    emitted: int = 0

    def add(self, kept: int, block: int, emitted: int) -> None:
        """One verification of `block` drafts, the first `kept` of them accepted, that gave `emitted` tokens."""
        self.accepted += [0] * (block - len(self.accepted))
        self.verifications += 1
        self.emitted += emitted
        for i in range(kept):
            self.accepted[i] += 1

    def merge(self, verifications: int, accepted: Seq[int], emitted: int) -> None:
        """Add another tally's counts."""
        self.accepted += [0] * (len(accepted) - len(self.accepted))
        self.verifications += verifications
        self.emitted += emitted
        for i, count in enumerate(accepted):
            self.accepted[i] += count

    @property
    def tokens_a_verification(self) -> float:
        """Accepted drafts and the bonus token, as far as they were emitted; plain decoding has 1. 0 of nothing."""
        return self.emitted / max(1, self.verifications)

    @property
    def by_position(self) -> list[float]:
        """Share of verifications that kept draft i."""
        return [count / max(1, self.verifications) for count in self.accepted]

    @property
    def conditional(self) -> list[float]:
        """Acceptance of draft i where all before it were kept; 0 where that never happened."""
        before = [self.verifications, *self.accepted]
        return [count / base if base else 0.0 for count, base in zip(self.accepted, before, strict=False)]


@dataclass(slots=True)
class Drafted:
    """ids: the new tokens, equal to those of plain greedy decoding."""

    ids: list[int]
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """drafts int64 [g] after a next token; choices int64 [g + 1], the backbone's own after it and after each draft."""

    drafts: Tensor
    choices: Tensor
    output: SequenceOutput
    eos: int

    @property
    def agreeing(self) -> int:
        """Drafts before the first one that is not the backbone's choice."""
        return int((self.drafts == self.choices[:-1]).long().cumprod(0).sum())

    @property
    def new(self) -> list[int]:
        """The tokens that it gives: drafts that agree and the bonus, none after EOS, which a draft may have been."""
        found: list[int] = self.choices[: self.agreeing + 1].tolist()
        return found[: found.index(self.eos) + 1] if self.eos in found else found

    @property
    def kept(self) -> int:
        """Drafts among them."""
        return min(self.agreeing, len(self.new))


class Drafting:
    """A prefilled sequence whose draft windows are fed; `first` is its first greedy token.

    Raises:
        InputError: a model without drafts, or no room for `new` tokens and a block.
    """

    def __init__(self, model: Transformer, prompt: Tensor, new: int, prefill: str, chunk: int | None) -> None:
        if model.draft is None:
            raise InputError("model: it has no draft layers to measure")
        room, limit = len(prompt) + new + model.config.dspark_block_size, model.config.max_position_embeddings
        if room > limit:
            raise InputError(f"prompt: {room:,} positions with the drafts do not fit the model's {limit:,}")
        self.sequence = Sequence(model, new_cache(model, room))
        outputs = self.sequence.prefill(Prompt(ids=prompt), mode=prefill, chunk=chunk)
        for output in outputs:
            if output.main_hidden is not None:
                feed_draft(self.sequence, output)
        assert outputs[-1].logits is not None
        self.first = int(outputs[-1].logits[-1].argmax())

    def verify(self, token: int) -> Block:
        """Draft after the next token, and run both. The draft windows wait for `settle`."""
        following = torch.tensor([token])
        drafts = propose_after([self.sequence], following, lambda logits_BV, _i: logits_BV.argmax(-1)).ids_Bg[0]
        output = self.sequence.append(torch.cat((following, drafts)), logits_from=0)
        assert output.logits is not None
        choices, eos = output.logits.argmax(-1), self.sequence.model.config.eos_token_id
        return Block(drafts=drafts, choices=choices, output=output, eos=eos)

    def settle(self, block: Block, kept: int) -> None:
        """Keep the first so many rows of the block, the next token's included, and forget the rest."""
        self.sequence.rewind(block.output.first + kept)
        feed_draft(self.sequence, block.output, accepted=kept)


def speculate(
    model: Transformer, prompt: Tensor, max_tokens: int, *, prefill: str = "ced", chunk: int | None = 512
) -> Drafted:
    """Greedy tokens after a prompt int64 [N], at most `max_tokens`, none after EOS.

    Raises:
        InputError: a model without drafts, or no room for the tokens and a block.
    """
    drafting = Drafting(model, prompt, max_tokens, prefill, chunk)
    eos, found = model.config.eos_token_id, Drafted([drafting.first], Tally())
    while len(found.ids) < max_tokens and found.ids[-1] != eos:
        block = drafting.verify(found.ids[-1])
        drafting.settle(block, 1 + block.kept)
        emitted = block.new[: max_tokens - len(found.ids)]
        found.tally.add(block.kept, len(block.drafts), len(emitted))
        found.ids += emitted
    return found


def follow(model: Transformer, prompt: Tensor, text: Tensor, *, prefill: str = "ced", chunk: int | None = 512) -> Tally:
    """A draft after every token of `text` int64 [n], which continues the prompt; nothing is skipped.

    Raises:
        InputError: as `speculate`.
    """
    drafting, tally = Drafting(model, prompt, len(text), prefill, chunk), Tally()
    for token in text.tolist():
        block = drafting.verify(token)
        tally.add(block.kept, len(block.drafts), len(block.new))
        drafting.settle(block, 1)
    return tally


def plain_greedy(
    model: Transformer, prompt: Tensor, max_tokens: int, *, prefill: str = "ced", chunk: int | None = 512
) -> list[int]:
    """What `speculate` must equal: one token a step."""
    sequence = Sequence(model, new_cache(model, len(prompt) + max_tokens))
    logits = sequence.prefill(Prompt(ids=prompt), mode=prefill, chunk=chunk)[-1].logits
    assert logits is not None
    ids = [int(logits[-1].argmax())]
    while len(ids) < max_tokens and ids[-1] != model.config.eos_token_id:
        logits = sequence.append(torch.tensor(ids[-1:])).logits
        assert logits is not None
        ids.append(int(logits[-1].argmax()))
    return ids
