"""The tokens of a request: any cut is that of all of them in a row."""

from __future__ import annotations

import itertools

import torch

from rorqual.engine.sequence import Prompt
from rorqual.engine.tokens import Tokens


def test_a_cut_is_that_of_prompt_generated_and_drafts() -> None:
    tokens, drafts = Tokens(Prompt(ids=torch.arange(5))), [20, 21, 22]
    tokens.extend([10, 11, 12, 13])
    whole = [0, 1, 2, 3, 4, 10, 11, 12, 13, 20, 21, 22]
    for start, end in itertools.combinations(range(len(whole) + 1), 2):
        assert tokens.cut(start, end, drafts).ids.tolist() == whole[start:end], (start, end)


def test_an_image_ends_with_the_prompt() -> None:
    image = torch.tensor([False, True, True, False])
    tokens = Tokens(Prompt(ids=torch.arange(4), image=image, embeds=torch.arange(6.0).view(2, 3)))
    tokens.extend([7, 8])
    found = tokens.cut(2, 6, [])
    assert found.ids.tolist() == [2, 3, 7, 8] and found.image is not None and found.embeds is not None
    assert found.image.tolist() == [True, False, False, False] and found.embeds.tolist() == [[3.0, 4.0, 5.0]]
    assert tokens.cut(4, 6).image is None


def test_what_is_forgotten_and_what_goes_on_apart() -> None:
    tokens = Tokens(Prompt(ids=torch.arange(3)))
    tokens.extend([7, 8])
    twin = tokens.fork()
    tokens.truncate(4)
    twin.extend([9])
    assert (len(tokens), len(twin)) == (4, 6)
    assert tokens.cut(0, 4).ids.tolist() == [0, 1, 2, 7] and twin.cut(2, 6).ids.tolist() == [2, 7, 8, 9]
