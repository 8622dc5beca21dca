"""Which documents are held out: by name, then a share of the rest; whole groups either way."""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import math
from collections.abc import Iterable, Sequence

from rorqual.errors import ConfigError
from rorqual.training.data.documents import Document


def heldout_groups(documents: Iterable[Document], patterns: Sequence[str], fraction: float) -> set[str]:
    """Groups (`Document.family`) that are never trained on.

    A group is held out when a pattern matches the name of one of its documents. Of the other groups, `fraction`
    (rounded up, but never all) are held out: those whose names hash lowest, the same for every seed.

    Raises:
        ConfigError: there are documents, and a pattern matches none of them, or nothing is left to train on.
    """
    named: set[str] = set()
    names: list[str] = []
    families: dict[str, None] = {}
    unmet = dict.fromkeys(patterns)
    for document in documents:
        names.append(document.name)
        families[document.family] = None
        matching = [pattern for pattern in patterns if fnmatch.fnmatchcase(document.name, pattern)]
        if matching:
            named.add(document.family)
        for pattern in matching:
            unmet.pop(pattern, None)
    if unmet and names:
        pattern = next(iter(unmet))
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0)
        raise ConfigError(f"data.heldout: {pattern!r} matches no document; the closest names: {', '.join(close)}")
    rest = sorted((family for family in families if family not in named), key=_rank)
    if families and not rest:
        raise ConfigError("data.heldout: every document is held out, nothing is left to train on")
    drawn = min(math.ceil(fraction * len(rest)), max(len(rest) - 1, 0))
    return named | set(rest[:drawn])


def _rank(family: str) -> bytes:
    return hashlib.sha256(family.encode()).digest()
