"""The tokens of one request, as they become known: its prompt, what was accepted since, and drafts behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rorqual.engine.sequence import Prompt


class Tokens:
    """prompt: with its images' features, or without. Positions behind it are text.

    features: gives them [image positions, D] when they are first needed: a prompt that was computed elsewhere needs
    them only if it has to be computed again.

    >>> tokens = Tokens(Prompt(ids=torch.tensor([5, 6, 7])))
    >>> tokens.extend([8])
    >>> len(tokens), tokens.cut(2, 6, drafts=[1, 2]).ids.tolist()
    (4, [7, 8, 1, 2])
    """

    def __init__(self, prompt: Prompt, features: Callable[[], Tensor] | None = None) -> None:
        self.prompt, self._size = prompt, len(prompt)
        self._features = features
        self.generated: list[int] = []

    def __len__(self) -> int:
        return self._size + len(self.generated)

    def extend(self, ids: Sequence[int]) -> None:
        self.generated += ids

    def fork(self) -> Tokens:
        """The same so far; they go on apart."""
        twin = Tokens(self.prompt, self._features)
        twin.generated = self.generated[:]
        return twin

    def truncate(self, length: int) -> None:
        """Forget generated tokens at positions >= `length`."""
        assert length >= self._size, "a prompt is not cut"
        del self.generated[length - self._size :]

    def known(self, end: int) -> Prompt:
        """Positions [0, end), and which of them are images, without features."""
        prompt, rest = self.prompt, torch.tensor(self.generated[: max(0, end - self._size)], dtype=torch.int64)
        image = None if prompt.image is None else torch.cat((prompt.image[:end], prompt.image.new_zeros(len(rest))))
        return Prompt(ids=torch.cat((prompt.ids[:end], rest)), image=image)

    def cut(self, start: int, end: int, drafts: Sequence[int] = ()) -> Prompt:
        """Positions [start, end); those behind the known ones are `drafts`, in order."""
        size, known = self._size, len(self)
        # Only what is asked for: a step takes a row or a few, whatever has been generated so far.
        after = [
            *self.generated[max(0, start - size) : max(0, end - size)],
            *drafts[max(0, start - known) : max(0, end - known)],
        ]
        rest = torch.tensor(after, dtype=torch.int64)
        if start >= size:
            return Prompt(ids=rest)
        ids, image, embeds = self._with_features().cut(start, min(end, size))
        if image is not None:
            image = torch.cat((image, image.new_zeros(len(rest))))
        return Prompt(ids=torch.cat((ids, rest)), image=image, embeds=embeds)

    def _with_features(self) -> Prompt:
        if self._features is not None:
            self.prompt, self._features = replace(self.prompt, embeds=self._features()), None
        return self.prompt
