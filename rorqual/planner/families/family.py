"""What another model's cache is made of: groups of layers that cache alike, in one or more ways of storing them.

Counted, for every family alike: what the mathematics of the backbone needs. Left out, for every family alike: rows of
unfinished groups, draft layers and n-gram history, an engine's padding and rows that it keeps beyond a window.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rorqual.errors import InputError

BF16 = "bf16"
"""The one storage that every family has: two bytes an element, no scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Layers that cache alike.

    name: what is stored. layers: how many store it. entry_bytes: bytes of one entry in one layer.
    entry: how that number comes about; without its words it evaluates to `entry_bytes`, `x` a product.
    entry_tokens: tokens that one entry stands for; an entry exists once all of them do.
    window: the last tokens that are kept, None for all of them.

    >>> windows = Group(name="sliding window", layers=40, entry_bytes=528, entry="512 + 16 scales", window=128)
    >>> windows.formula
    '40 layers x (512 + 16 scales) B for each of the last 128 tokens'
    """

    name: str
    layers: int
    entry_bytes: int
    entry: str
    entry_tokens: int = 1
    window: int | None = None

    @property
    def token_bytes(self) -> Fraction:
        """Bytes that every further token adds in the long run; 0 for a window.

        >>> Group(name="HCA", layers=20, entry_bytes=584, entry="584", entry_tokens=128).token_bytes
        Fraction(365, 4)
        """
        return Fraction(0) if self.window is not None else Fraction(self.layers * self.entry_bytes, self.entry_tokens)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of full windows, 0 for a group that grows.

        >>> Group(name="sliding window", layers=40, entry_bytes=528, entry="528", window=128).fixed_bytes
        2703360
        """
        return 0 if self.window is None else self.bytes_at(self.window)

    def bytes_at(self, tokens: int) -> int:
        """Bytes at a context: entries of complete groups only, and no more than the window.

        >>> group = Group(name="CSA", layers=21, entry_bytes=652, entry="652", entry_tokens=4)
        >>> group.bytes_at(3), group.bytes_at(4), group.bytes_at(11)
        (0, 13692, 27384)

        Raises:
            InputError: `tokens` is no integer of 0 or more.
        """
        if type(tokens) is not int or tokens < 0:
            raise InputError(f"tokens must be an integer of 0 or more; got {tokens!r}")
        kept = tokens if self.window is None else min(tokens, self.window)
        return self.layers * self.entry_bytes * (kept // self.entry_tokens)

    @property
    def formula(self) -> str:
        """All layers' bytes in words."""
        layers = f"{self.layers} layer{'s' if self.layers != 1 else ''}"
        is_sum = " + " in re.sub(r"\([^()]*\)", "", self.entry)
        entry = f"({self.entry})" if is_sum else self.entry
        if self.window is not None:
            return f"{layers} x {entry} B for each of the last {self.window:,} tokens"
        each = "a token" if self.entry_tokens == 1 else f"for every {self.entry_tokens} tokens"
        return f"{layers} x {entry} B {each}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """One way of storing a family's cache. source: who stores it so, or where it is described."""

    name: str
    groups: tuple[Group, ...]
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model's cache.

    name: as the caller knows it. model_type: as the config states it. attention: the field's name of the technique.
    max_tokens: its `max_position_embeddings`, None where the config states none.
    storages: the ways it is stored, the model's own ("native") first, `bf16` always among them.
    source: where the config's values come from, empty for a config of the caller's own.

    Everywhere below, `storage` None means native.
    """

    name: str
    model_type: str
    attention: str
    max_tokens: int | None
    storages: tuple[Storage, ...]
    source: str = ""

    def __post_init__(self) -> None:
        names = [storage.name for storage in self.storages]
        assert BF16 in names and len(set(names)) == len(names), names

    @property
    def native(self) -> str:
        """The name of the storage that the model's own makers use."""
        return self.storages[0].name

    def storage(self, name: str | None = None) -> Storage:
        """A storage by name.

        Raises:
            InputError: this family is not stored so; the message names the ways it is.
        """
        for storage in self.storages:
            if name is None or storage.name == name:
                return storage
        legal = ", ".join(storage.name for storage in self.storages)
        raise InputError(f"storage of {self.name} must be one of {legal}; got {name!r}")

    def groups(self, storage: str | None = None) -> tuple[Group, ...]:
        """The groups of one storage."""
        return self.storage(storage).groups

    def token_bytes(self, storage: str | None = None) -> Fraction:
        """Bytes a token of the part that grows; InputError for an unknown storage.

        >>> from rorqual.planner.families import load
        >>> load("deepseek-v4-flash").token_bytes(), load("deepseek-v4-flash").token_bytes("bf16")
        (Fraction(14057, 4), Fraction(6880, 1))
        """
        return sum((group.token_bytes for group in self.groups(storage)), Fraction(0))

    def fixed_bytes(self, storage: str | None = None) -> int:
        """Bytes a sequence of full windows; InputError for an unknown storage.

        >>> from rorqual.planner.families import load
        >>> load("deepseek-v4-flash").fixed_bytes(), load("deepseek-v3").fixed_bytes()
        (3214336, 0)
        """
        return sum(group.fixed_bytes for group in self.groups(storage))

    def bytes_at(self, tokens: int, storage: str | None = None) -> int:
        """Bytes of one sequence of `tokens` tokens, windows included, which grow until they are full.

        >>> from rorqual.planner.families import load
        >>> mistral = load("mistral-7b-v0.1")
        >>> mistral.bytes_at(1000), mistral.bytes_at(4096), mistral.bytes_at(8192)
        (131072000, 536870912, 536870912)

        Raises:
            InputError: an unknown storage, or `tokens` is no integer of 0 or more.
        """
        return sum(group.bytes_at(tokens) for group in self.groups(storage))
