"""The Engram table rows of adjacent positions in one kernel: the twin of `model.ngram.NgramHash.rows`, of
`model.ngram.compress_ids` before it, and of the history of compressed ids beside them.

Integers only.

T tokens, V vocabulary, N max_ngram, H heads, L Engram layers, E = (N - 1) H columns, R rows of a history.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rorqual.ops.cpu import Path
from rorqual.ops.fast.kernel import Kernel, kernel
from rorqual.ops.fast.linear import has_vectors
from rorqual.ops.fast.row_vectors import Array

_ROWS = (
    "void(int64[::1], uint8[::1], int64[::1], Tuple((int64[:, ::1], int64[:, :, ::1], int64[:, ::1])), int64[::1], "
    "int64, int64, int64, int64, int64[::1], int64[:, :, ::1])"
)


@kernel(_ROWS)
def _rows(ids_T, image_T, map_V, hash_, history_R, start, held, pad, image, seen_S, out_TLE):
    """hash_: multipliers [L, N], primes [L, N - 1, H], offsets [L, E]. held: ids of positions before `start` that the
    history has. image: the compressed id of image positions. seen_S: room for N - 1 + T ids."""
    (multipliers, primes, offsets), before = hash_, hash_[0].shape[1] - 1
    for t in range(-before, ids_T.shape[0]):
        if t >= 0:
            seen_S[before + t] = image if image_T.shape[0] and image_T[t] else map_V[ids_T[t]]
        else:
            # Any negative id ends the n-gram.
            seen_S[before + t] = history_R[(start + t) % history_R.shape[0]] if -t <= held else -1
    for t in range(ids_T.shape[0]):
        for layer in range(multipliers.shape[0]):
            running, broken = np.int64(0), False
            for k in range(before + 1):
                token = seen_S[before + t - k]
                broken = broken or token < 0
                running ^= (pad if broken else token) * multipliers[layer, k]
                if k:
                    for h in range(primes.shape[2]):
                        at = (k - 1) * primes.shape[2] + h
                        out_TLE[t, layer, at] = running % primes[layer, k - 1, h] + offsets[layer, at]
    for t in range(max(0, ids_T.shape[0] - history_R.shape[0]), ids_T.shape[0]):
        history_R[(start + t) % history_R.shape[0]] = seen_S[before + t]


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """What `rows` runs on `path`."""
    return (_rows,) if has_vectors(path) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramRows:
    """The constants of the hash as the kernel takes them."""

    token_map: Array
    hash: tuple[Array, Array, Array]
    pad: int
    image: int

    @classmethod
    def of(cls, token_map_V: Tensor, hash_: tuple[Tensor, Tensor, Tensor], *, pad: int, image: int) -> NgramRows:
        """Args:
        token_map_V: int64, compressed ids.
        hash_: multipliers [L, N], primes [L, N - 1, H], offsets [L, E]; int64.
        pad: what an id becomes that is negative, or older than one that is.
        image: the compressed id of image positions, negative.
        """
        multipliers, primes, offsets = (part.contiguous().numpy() for part in hash_)
        found = multipliers, primes, offsets
        return cls(token_map=token_map_V.contiguous().numpy(), hash=found, pad=pad, image=image)


_NO_IMAGE = np.empty(0, np.uint8)


def rows(ids_T: Tensor, image_T: Tensor | None, layer: NgramRows, history_R: Tensor, start: int, held: int) -> Tensor:
    """Table rows int64 [T, L, E]; the history then has the ids of these positions.

    Args:
        ids_T: int64, inside the vocabulary; at least one.
        image_T: bool, positions of image spans; None for none.
        layer: from `NgramRows.of`.
        history_R: int64, compressed ids addressed by position; at least N - 1 of them. Written.
        start: position of the first id.
        held: positions before `start` that the history has.
    """
    (count,), (layers, before), columns = ids_T.shape, layer.hash[0].shape, layer.hash[2].shape[1]
    image = _NO_IMAGE if image_T is None else image_T.to(torch.uint8).contiguous().numpy()
    found, seen = np.empty((count, layers, columns), np.int64), np.empty(before - 1 + count, np.int64)
    ids, history = ids_T.contiguous().numpy(), history_R.numpy()
    _rows(ids, image, layer.token_map, layer.hash, history, start, held, layer.pad, layer.image, seen, found)
    return torch.from_numpy(found)
