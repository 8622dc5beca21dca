"""The check of a stored page: 20 bytes over the page and the key that it is stored under.

A cryptographic hash takes several times as long as reading a page, crc32 twice as long. So a page is hashed in two
steps of plain 64-bit arithmetic (all of it modulo 2^64), the first at the speed of memory:

    rows      the page's words in rows of `COLUMNS`; of each row the sum of its words, and the sum of their products
              lo(w + k) * hi(w + k), where lo and hi are a word's halves of 32 bits and k is the column's own number:
              the NH of UMAC (Black et al. 1999), with one addition for both halves
    whole     these sums, and what is left behind the last whole row, as 32-bit halves h_i: sum of a_i h_i and sum of
              b_i h_i with odd numbers a, b: multilinear hashing

and the crc32 of the key beside them. Of changes within one word fewer than one in 2^60 would pass, of any others (a
stale or torn page, zeros, words that have changed places) about one in 2^32. It is no defence against somebody who
writes to the disk on purpose: all numbers are constants.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = 160
"""Words of a row: the release's page of 113,920 bytes is 89 rows, and nothing is left over."""
CHECK_BYTES = 20

Words = NDArray[np.uint64]
Hash = Callable[[Words, int, Words, Words, Words], object]
"""Called with a page's words, the number that its last bytes make, the numbers of `rows` [COLUMNS] and of `whole`
[2, M], and room for two words; see `PageCheck`."""

_WORD = np.dtype("<u8")
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


class PageCheck:
    """The check of pages of one size.

    Args:
        page_bytes: of every page.
        hash_page: `plain_hash` or `compiled_hash()`, which agree; None for the quickest of this process.

    >>> check = PageCheck(4096)
    >>> check(b"a", bytes(4096)) != check(b"b", bytes(4096)), len(check(b"a", bytes(4096)))
    (True, 20)
    """

    def __init__(self, page_bytes: int, hash_page: Hash | None = None) -> None:
        self._hash = hash_page or quickest_hash()
        self._words, self._rest = divmod(page_bytes, _WORD.itemsize)
        rows, behind = divmod(self._words, COLUMNS)
        halves = 2 * (2 * rows + behind + 1)
        numbers = _numbers(COLUMNS + 2 * halves)
        self._columns = numbers[:COLUMNS]
        self._whole = numbers[COLUMNS:].reshape(2, halves) | np.uint64(1)

    def __call__(self, key: bytes, page: bytes | bytearray | memoryview) -> bytes:
        words = np.frombuffer(page, _WORD, self._words)
        if not isinstance(page, bytes):
            words.flags.writeable = False  # as those of bytes are: one type for the compiled function
        last = int.from_bytes(memoryview(page).cast("B")[-self._rest :], "little") if self._rest else 0
        out = np.empty(2, _WORD)
        self._hash(words, last, self._columns, self._whole, out)
        return out.tobytes() + zlib.crc32(key).to_bytes(4, "little")


def plain_hash(words: Words, last: int, columns: Words, whole: Words, out: Words) -> None:
    """The twin of `compiled_hash`."""
    count = len(words) // COLUMNS
    rows = words[: count * COLUMNS].reshape(count, COLUMNS)
    keyed = rows + columns
    products = (keyed >> _HALF) * (keyed & _LOW)
    sums = np.stack((rows.sum(axis=1, dtype=_WORD), products.sum(axis=1, dtype=_WORD)), axis=1)
    left = np.concatenate((sums.ravel(), words[count * COLUMNS :], np.array([last], _WORD)))
    halves = np.stack((left & _LOW, left >> _HALF), axis=1).ravel()
    out[:] = (whole * halves).sum(axis=1, dtype=_WORD)


@cache
def compiled_hash() -> Hash:
    """`plain_hash` as one loop over the page, compiled by Numba: a tenth of the time. Compiling takes seconds, once."""
    import numba
    from numba import types

    jit: Any = numba.njit

    def page_hash(words, last, columns, whole, out):  # type: ignore[no-untyped-def]
        half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
        count = words.shape[0] // COLUMNS
        first, second, at = np.uint64(0), np.uint64(0), 0
        for i in range(count):
            start, total, products = i * COLUMNS, np.uint64(0), np.uint64(0)
            for j in range(COLUMNS):
                word = words[start + j]
                keyed = word + columns[j]
                total += word
                products += (keyed >> half) * (keyed & low)
            for part in (total & low, total >> half, products & low, products >> half):
                first += whole[0, at] * part
                second += whole[1, at] * part
                at += 1
        for i in range(count * COLUMNS, words.shape[0] + 1):
            word = words[i] if i < words.shape[0] else last
            for part in (word & low, word >> half):
                first += whole[0, at] * part
                second += whole[1, at] * part
                at += 1
        out[0], out[1] = first, second

    fixed, row = types.Array(types.uint64, 1, "C", readonly=True), types.Array(types.uint64, 1, "C")
    signature = types.void(fixed, types.uint64, row, types.Array(types.uint64, 2, "C"), row)
    try:
        return jit(signature, nogil=True, cache=True)(page_hash)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder of this machine can be written
        return jit(signature, nogil=True)(page_hash)  # type: ignore[no-any-return]


def quickest_hash() -> Hash:
    """Of this process: Numba's where it is loaded anyway, as beside every engine; else numpy's."""
    return compiled_hash() if "numba" in sys.modules and _WORD.isnative else plain_hash


def _numbers(count: int) -> Words:
    """The same on every machine, for ever: stored checks depend on them."""
    return np.frombuffer(hashlib.shake_128(b"rorqual.store").digest(count * _WORD.itemsize), _WORD).astype(np.uint64)
