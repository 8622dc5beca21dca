"""One request alone: what the engine adds to a loop over the model, and what a prefix saves that is there already."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rorqual.bench.checkpoints import random_ids
from rorqual.bench.latency import first_token
from rorqual.bench.report import Bar, TimeRow
from rorqual.bench.timing import Sample, elapsed, undisturbed
from rorqual.engine.engine import Engine
from rorqual.engine.params import SamplingParams
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model.transformer import Transformer

TURN = 8
"""Tokens that one contestant decodes before the other does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Single:
    """Tokens. context: of the prompt that is decoded after. shared: of the prefix that two requests have in common, in
    whole pages. suffix: of what each has for itself."""

    context: int = 2048
    decoded: int = 64
    shared: int = 8192
    suffix: int = 32
    chunk: int = 512

    def within(self, positions: int, page_tokens: int) -> Single:
        """Cut to what a model can hold: half of its positions before decoding, three quarters of them shared."""
        shared = min(self.shared, positions * 3 // 4)
        return replace(self, context=min(self.context, positions // 2), shared=shared // page_tokens * page_tokens)


FULL = Single()
QUICK = Single(context=40, decoded=4, shared=256, suffix=8, chunk=64)


def decode_row(model: Transformer, single: Single, repeats: int, bar: Bar | None) -> TimeRow:
    """A greedy request of the engine against `Sequence.append` of the same tokens, in turn; seconds a token.

    The engine also plans, chooses the token and makes text of it; the bare loop is given its tokens. Drafts are off.
    """
    prompt = random_ids(model.config, single.context, seed=1)
    seconds: dict[str, list[float]] = {"engine": [], "bare": []}
    same = True
    for _ in range(repeats):
        same &= _decode(model, prompt, single, seconds)
    return TimeRow(
        name="decode",
        shape=f"1 token at {single.context} tokens of context",
        times={kind: Sample.of(taken) for kind, taken in seconds.items()},
        ratio_of=("engine", "bare"),
        bar=bar,
        extra={"numerics": model.numerics.name, "same_tokens": same},
    )


def _decode(model: Transformer, prompt: Tensor, single: Single, seconds: dict[str, list[float]]) -> bool:
    """One request in both ways; whether the bare loop would have chosen the engine's tokens."""
    tokens = single.context + single.decoded + 1
    engine = Engine(model, slots=1, pages=model.layout.pages(tokens), speculative=False, chunk_tokens=single.chunk)
    name = engine.submit(prompt, SamplingParams(max_tokens=single.decoded + 1, ignore_eos=True))
    said = engine.output(name).token_ids
    while not said:
        engine.step()
    bare = Sequence(model, new_cache(model, tokens))
    chosen = [bare.prefill(Prompt(ids=prompt), mode=engine.prefill, chunk=single.chunk)[-1].logits]

    def append(token: int) -> None:
        chosen.append(bare.append(torch.tensor([token])).logits)

    with undisturbed():
        for first in range(0, single.decoded, TURN):
            count = min(TURN, single.decoded - first)
            engine_s = [elapsed(engine.step) for _ in range(count)]
            bare_s = [elapsed(partial(append, token)) for token in said[first : first + count]]
            # The first of a turn finds the other's data in the caches.
            seconds["engine"] += engine_s[1:] or engine_s
            seconds["bare"] += bare_s[1:] or bare_s
    return said == [int(logits[-1].argmax()) for logits in chosen if logits is not None]


def prefix_row(model: Transformer, single: Single, repeats: int, bar: Bar | None) -> TimeRow:
    """Seconds to the first token of a request with a prefix that nobody has had, and of a second one with it."""
    length = single.shared + single.suffix
    engine = Engine(model, slots=1, pages=2 * model.layout.pages(length), speculative=False, chunk_tokens=single.chunk)
    seconds: dict[str, list[float]] = {"cold": [], "shared": []}
    hits: set[int] = set()
    with undisturbed():
        for repeat in range(-1, repeats):  # the first settles threads and allocators, and does not count
            ids = random_ids(model.config, single.shared + 2 * single.suffix, seed=3 + repeat)
            common, *suffixes = ids.split((single.shared, single.suffix, single.suffix))
            for kind, suffix in zip(seconds, suffixes, strict=True):
                taken, hit = _first_token(engine, torch.cat((common, suffix)))
                if repeat >= 0:
                    seconds[kind].append(taken)
                    hits.add(hit)
    assert hits == {0, single.shared}, hits
    return TimeRow(
        name="prefix",
        shape=f"first token of {single.shared} shared + {single.suffix} tokens, chunk {single.chunk}",
        times={kind: Sample.of(taken) for kind, taken in seconds.items()},
        ratio_of=("shared", "cold"),
        bar=bar,
        extra={"numerics": model.numerics.name, "hit_tokens": single.shared},
    )


def _first_token(engine: Engine, prompt: Tensor) -> tuple[float, int]:
    """(seconds, tokens found in the prefix index)."""
    output = engine.output(engine.submit(prompt, SamplingParams(max_tokens=1)))
    while not output.finished:
        engine.step()
    return first_token(output), output.counts.hit
