"""Small learners and batches for training tests."""

import torch

from rorqual.config import ModelConfig, presets
from rorqual.training.batch import IGNORE, Packed
from rorqual.training.learner_v41 import V41Learner
from rorqual.training.recipe import LossRecipe

VOCAB = 500
SMALL_MODEL = """
[model]
base = "demo"
hidden_size = 96
q_lora_rank = 64
o_lora_rank = 32
moe_intermediate_size = 64
"""
"""A recipe's `demo` at the widths of `tiny`."""


def tiny_config() -> ModelConfig:
    """Every text mechanism of `tiny`: window 16, Top-K 8, a pool of 3 blocks of 4, Engram, three drafts."""
    return presets.load("tiny").without("vision")


def learner(seed: int = 0, *, fast: bool = False, **loss: float) -> V41Learner:
    return V41Learner(tiny_config(), None, LossRecipe(**loss), seed, fast=fast)


def packed(pieces: list[int], number: int = 0, seed: int = 0, vocab: int = VOCAB) -> Packed:
    """A packed sequence of random documents of the given lengths."""
    generator = torch.Generator().manual_seed(seed * 1000 + number)
    documents = [torch.randint(3, vocab, (n,), generator=generator) for n in pieces]
    ids = torch.cat(documents)
    targets = torch.cat([torch.cat((d[1:], torch.tensor([IGNORE]))) if len(d) else d for d in documents])
    starts, at = [], 0
    for n in pieces:
        starts.append(at)
        at += n
    return Packed(ids=ids, targets=targets, starts=tuple(starts), number=number)


def gradients(made: V41Learner) -> dict[str, torch.Tensor]:
    """Name -> dense gradient, zeros where there is none; gradients are cleared."""
    found = {}
    for name, parameter in made.parameters.items():
        grad = parameter.grad
        found[name] = torch.zeros_like(parameter) if grad is None else grad.to_dense() if grad.is_sparse else grad
        parameter.grad = None
    return found
