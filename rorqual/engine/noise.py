"""The random numbers of one sequence: each is found by its place, whenever and however often it is drawn.

A token's draws are keyed by the seed and the token's place in the output. So a preempted request goes on with what it
would have drawn, what runs beside it changes nothing, and a draft can be proposed with the very draws that the token
will be chosen with (`rorqual.engine.speculation`).
"""

from __future__ import annotations

import secrets

import numpy as np
import torch
from torch import Tensor

TOKEN, DRAFT, ACCEPT = range(3)
"""What a draw is for; the draws of two purposes are independent."""


class Noise:
    """seed: None takes one from the operating system. index: of the completion, for n of them with one seed.

    >>> a, b = Noise(1), Noise(1)
    >>> a.uniform(ACCEPT, 7) == b.uniform(ACCEPT, 7) != b.uniform(ACCEPT, 8) != Noise(1, 1).uniform(ACCEPT, 8)
    True
    """

    def __init__(self, seed: int | None = None, index: int = 0) -> None:
        drawn = secrets.randbits(63) if seed is None else seed
        self._key = int(np.random.SeedSequence([drawn, index]).generate_state(1, np.uint64)[0])

    def exponential(self, purpose: int, place: int, count: int) -> Tensor:
        """fp64 [count] of the exponential distribution: argmax(p / these) is a draw from p."""
        return torch.from_numpy(self._generator(purpose, place).standard_exponential(count))

    def uniform(self, purpose: int, place: int) -> float:
        """In [0, 1)."""
        return float(self._generator(purpose, place).random())

    def _generator(self, purpose: int, place: int) -> np.random.Generator:
        key = np.array([self._key, place], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, purpose]))


def draw(weights_V: Tensor, noise_V: Tensor) -> int:
    """An index drawn from weights fp64 [V] (not all 0, of any sum) with exponential noise of the same shape.

    Two distributions drawn with one noise agree often: with probability at least (1 - d) / (1 + d) at a total variation
    of d.
    """
    return int((weights_V / noise_V).argmax())
