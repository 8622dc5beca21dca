"""The tokens of one request, as they become known: its prompt, what was accepted since, and drafts behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rorqual.engine.sequence import Prompt


class Tokens:
    """prompt: with its images' features. Positions behind it are text.

    >>> tokens = Tokens(Prompt(ids=torch.tensor([5, 6, 7])))
    >>> tokens.extend([8])
    >>> len(tokens), tokens.cut(2, 6, drafts=[1, 2]).ids.tolist()
    (4, [7, 8, 1, 2])
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self._size = prompt, len(prompt)
        self.generated: list[int] = []

    def __len__(self) -> int:
        return self._size + len(self.generated)

    def extend(self, ids: Sequence[int]) -> None:
        self.generated += ids

    def fork(self) -> Tokens:
        """The same so far; they go on apart."""
        twin = Tokens(self.prompt)
        twin.generated = self.generated[:]
        return twin

    def truncate(self, length: int) -> None:
        """Forget generated tokens at positions >= `length`."""
        assert length >= self._size, "a prompt is not cut"
        del self.generated[length - self._size :]

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
        ids, image, embeds = self.prompt.cut(start, min(end, size))
        if image is not None:
            image = torch.cat((image, image.new_zeros(len(rest))))
        return Prompt(ids=torch.cat((ids, rest)), image=image, embeds=embeds)
