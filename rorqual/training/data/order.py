"""Which sequence comes when: a function of the seed and the place alone, so that resuming is asking for the next one.

A pool is documents that are drawn from together. It is gone through in passes; a pass shuffles the documents, packs
them, and shuffles the sequences, so that a batch is not one book. Another sequence length begins another pass: what was
left of the old one is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rorqual.training.data.packing import Header, Plan, plan_pass

_KEPT = 2
"""Plans kept: the present pass and its neighbour."""


def permutation(size: int, key: str) -> NDArray[np.int64]:
    """0..size-1 shuffled by a hash of the key: the same on every machine and under every version of numpy."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        mixed = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable")


class Pool:
    """documents: indices into `lengths`. key: seed and name, for the shuffling."""

    def __init__(self, documents: Sequence[int], lengths: Sequence[int], header: Header, key: str) -> None:
        self.documents = np.asarray(documents, dtype=np.int64)
        self.lengths, self.header, self.key = lengths, header, key
        self._plans: dict[tuple[int, int], tuple[Plan, NDArray[np.int64]]] = {}
        self._ends: dict[int, list[int]] = {}

    def find(self, index: int, n: int) -> tuple[Plan, int]:
        """The plan that holds the pool's sequence number `index` of length n, and its place there."""
        ends = self._ends.setdefault(n, [])
        while not ends or index >= ends[-1]:
            plan, _ = self._pass(len(ends), n)
            ends.append((ends[-1] if ends else 0) + plan.sequences)
        number = int(np.searchsorted(ends, index, side="right"))
        plan, order = self._pass(number, n)
        return plan, int(order[index - (ends[number - 1] if number else 0)])

    def _pass(self, number: int, n: int) -> tuple[Plan, NDArray[np.int64]]:
        found = self._plans.get((n, number))
        if found is None:
            key = f"{self.key}/{n}/{number}"
            documents = self.documents[permutation(len(self.documents), f"{key}/documents")]
            plan = plan_pass(documents.tolist(), self.lengths, n, self.header)
            found = plan, permutation(plan.sequences, f"{key}/sequences")
            while len(self._plans) >= _KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[n, number] = found
        return found
