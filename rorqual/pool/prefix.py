"""Keys of a sequence's full pages: a hash chain, so that one key stands for everything up to the end of its page.

    root       model fingerprint, page size, tenant salt
    key[i]     key[i - 1], the token ids of page i, and the images that reach into it: where, and what is in them

Two prompts share a page when everything before and in it is the same: ids, image content, model, tenant. A key is a
sha256, because a collision would show one tenant another's text.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rorqual.errors import InputError

ID_TYPE = "q"
"""Ids are hashed as 64-bit integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Positions [start, end) whose features come from an image; digest: of its content."""

    start: int
    end: int
    digest: bytes


def root_key(fingerprint: str, page_tokens: int, salt: str = "") -> bytes:
    """What the chains of one model, page size and tenant begin with.

    >>> root_key("a", 128) != root_key("a", 128, "tenant") != root_key("b", 128, "tenant")
    True
    """
    fields = fingerprint, str(page_tokens), salt
    # Lengths first, so that no two triples have one text.
    text = "".join(f"{len(field.encode())}:{field}" for field in fields)
    return hashlib.sha256(text.encode()).digest()


class PrefixChain:
    """The keys of one sequence, page by page as ids come.

    Args:
        root: of `root_key`.
        page_tokens: tokens of a page.
        images: of the prompt, in order and apart.

    >>> one, other = (PrefixChain(root_key("m", 4), 4) for _ in range(2))
    >>> one.extend(range(11)); other.extend([0, 1, 2, 3, 4, 9, 6, 7])
    >>> len(one.keys), one.keys[0] == other.keys[0], one.keys[1] == other.keys[1]
    (2, True, False)
    """

    def __init__(self, root: bytes, page_tokens: int, images: Sequence[ImageSpan] = ()) -> None:
        for before, after in itertools.pairwise(images):
            if before.end > after.start:
                raise InputError(f"images: [{after.start}, {after.end}) begins before the one in front of it ends")
        self.page_tokens = page_tokens
        self._root, self._images = root, tuple(images)
        self._ids = array(ID_TYPE)
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def keys(self) -> list[bytes]:
        """One for every full page."""
        return self._keys

    def extend(self, ids: Iterable[int]) -> None:
        self._ids.extend(ids)
        while (len(self._keys) + 1) * self.page_tokens <= len(self._ids):
            self._keys.append(self._key(len(self._keys)))

    def truncate(self, length: int) -> None:
        """Forget positions >= `length`: rejected drafts, or a rewind."""
        assert 0 <= length <= len(self._ids), f"{length} is outside [0, {len(self._ids)}]"
        del self._ids[length:]
        del self._keys[length // self.page_tokens :]
        # What is left of an image that is cut is still in front of what follows.
        self._images = tuple(
            replace(image, end=min(image.end, length)) for image in self._images if image.start < length
        )

    def fork(self) -> PrefixChain:
        """The same so far; they go on apart."""
        twin = PrefixChain(self._root, self.page_tokens, self._images)
        twin._ids, twin._keys = self._ids[:], self._keys[:]
        return twin

    def _key(self, page: int) -> bytes:
        start, end = page * self.page_tokens, (page + 1) * self.page_tokens
        total = hashlib.sha256(self._keys[-1] if self._keys else self._root)
        total.update(self._ids[start:end].tobytes())
        for image in self._images:
            if image.start < end and image.end > start:
                # Relative to the page, with sign: an image that began before it has another part here.
                total.update(array(ID_TYPE, (image.start - start, image.end - start)).tobytes() + image.digest)
        return total.digest()
