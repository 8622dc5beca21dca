"""The check of a stored page: 128 bits of XXH3 over the key that it is stored under and the page.

A page is read as fast as it is checked: XXH3 goes through memory at its own speed, where crc32 takes ten times as long
and a cryptographic hash more. It tells a torn, stale, moved or flipped page; it is no defence against somebody who
writes to the disk on purpose.
"""

from __future__ import annotations

from xxhash import xxh3_128

from rorqual.store.interface import PageBytes

CHECK_BYTES = 16


def page_check(key: bytes, page: PageBytes) -> bytes:
    """`CHECK_BYTES` bytes, the same on every machine.

    >>> page_check(b"a", bytes(4096)) != page_check(b"b", bytes(4096)), len(page_check(b"a", bytes(4096)))
    (True, 16)
    """
    # The length first, so that no byte of the key can be one of the page.
    total = xxh3_128(len(key).to_bytes(4, "little") + key)
    total.update(page)
    return total.digest()
