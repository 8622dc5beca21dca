"""Samples of a model in training: held-out beginnings and how it goes on, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rorqual.engine.params import SamplingParams
from rorqual.engine.sampler import Sampler
from rorqual.training.batch import Packed
from rorqual.training.learner import Learner, Phase

SAMPLES = "samples.txt"


class Decoder(Protocol):
    """What turns ids into text; a `tokenizers.Tokenizer` is one."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleParams:
    """count prompts of `prompt` tokens, each continued by up to `tokens`, sampled at `temperature`."""

    count: int = 3
    prompt: int = 24
    tokens: int = 64
    temperature: float = 0.7


def prompts(batch: Sequence[Packed], params: SampleParams) -> list[Tensor]:
    """Beginnings of document pieces, int64 [up to `prompt`] each, spread evenly over the batch; empty without one."""
    pieces = [
        sequence.ids[start : min(end, start + params.prompt)]
        for sequence in batch
        for start, end in sequence.pieces()
        if end - start > params.prompt
    ]
    if not pieces:
        pieces = [sequence.ids[: params.prompt] for sequence in batch]
    count = min(params.count, len(pieces))
    return [pieces[index * len(pieces) // count] for index in range(count)]


def continuation(
    learner: Learner, phase: Phase, prompt: Tensor, stop: int | None, params: SampleParams, seed: int
) -> list[int]:
    """New ids, without the stop id."""
    sampler = Sampler(SamplingParams(temperature=params.temperature, seed=seed))
    ids, new = prompt, []
    for _ in range(params.tokens):
        token = sampler(learner.next_logits(ids, phase).cpu())
        if token == stop:
            break
        new.append(token)
        ids = torch.cat([ids, ids.new_full((1,), token)])
    return new


def texts(
    learner: Learner,
    phase: Phase,
    decoder: Decoder,
    batch: Sequence[Packed],
    stop: int | None,
    params: SampleParams,
    seed: int,
) -> Iterator[str]:
    """`beginning |> continuation`, one a prompt, by the model as it is in `phase`; equal seeds give equal texts."""
    for index, prompt in enumerate(prompts(batch, params)):
        new = continuation(learner, phase, prompt, stop, params, (seed + index) % (1 << 63))
        head = decoder.decode(prompt.tolist(), skip_special_tokens=False)
        yield f"{head} |> {decoder.decode(new, skip_special_tokens=False)}"
