"""The check of a stored page: 16 bytes over the page and the key that it is stored under.

A cryptographic hash of the whole page takes several times as long as reading it. So most of a page goes through two
passes of plain arithmetic at the speed of memory: seen as rows of `ROW` bytes, the sum of every row's 64-bit words and
the exclusive or down every column. Those few words, what is left behind the last whole row, and the key are hashed.

What it catches: every change within one row or of up to three words, for certain. A change that both passes miss needs
the same bits at four corners of a rectangle, or the like of it; of random ones less than one in 2^64 does. It is no
defence against somebody who writes the disk on purpose.
"""

from __future__ import annotations

import hashlib

import numpy as np

CHECK_BYTES = 16
ROW = 1024
"""Bytes of a row: short enough for sums to stay in cache, long enough that few words are left to hash."""

_WORD = np.dtype("<u8")


def check(key: bytes, page: bytes | bytearray | memoryview) -> bytes:
    """`CHECK_BYTES` of a page under its key; another key, length or content has another.

    >>> check(b"a", bytes(4096)) != check(b"b", bytes(4096)) != check(b"b", bytes(4097))
    True
    """
    data = memoryview(page).cast("B")
    count = len(data) // ROW
    total = hashlib.blake2b(
        len(key).to_bytes(8, "little") + key + len(data).to_bytes(8, "little"), digest_size=CHECK_BYTES
    )
    if count:
        rows = np.frombuffer(data, _WORD, count * ROW // _WORD.itemsize).reshape(count, -1)
        total.update(np.add.reduce(rows, axis=1))
        total.update(np.bitwise_xor.reduce(rows, axis=0))
    total.update(data[count * ROW :])
    return total.digest()
