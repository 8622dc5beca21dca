"""The special tokens: spellings of the release's chat encoding, and their ids in a tokenizer.

The spellings are those that `deepseek-recipe` renders for V4.1. A tokenizer trained here gives them the lowest ids in
this order, so begin, end and padding are 0, 1, 2 as in the release.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from rorqual.errors import InputError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
"""Stands in every tag of a tool call."""
IMAGE = "<｜image｜>"
NOISE = "<｜draft▁noise｜>"
"""Stands in a draft block for a token that is not known yet; never in a text. The release uses a nameless id."""

_PLACES = (
    *("<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>"),
    *("<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>"),
)
IN_TEXTS = frozenset(_PLACES)
"""What an answer may say: they mark places in images. The others are of the conversation around it."""
SPECIAL_TOKENS = (
    *(BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, THINK, END_THINK, "<｜latest_reminder｜>", DSML, IMAGE, NOISE),
    *_PLACES,
)

BYTES = 256
LEAST_VOCAB = len(SPECIAL_TOKENS) + BYTES
"""What a byte-level tokenizer holds before its first merge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialIds:
    """Ids of the tokens that the model itself must know."""

    bos: int
    eos: int
    pad: int
    image: int
    noise: int


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Ids by spelling.

    Raises:
        InputError: the tokenizer lacks one.
    """
    return SpecialIds(
        bos=token_id(tokenizer, BOS),
        eos=token_id(tokenizer, EOS),
        pad=token_id(tokenizer, PAD),
        image=token_id(tokenizer, IMAGE),
        noise=token_id(tokenizer, NOISE),
    )


def token_id(tokenizer: Tokenizer, spelling: str) -> int:
    """InputError when the tokenizer has no such token."""
    found = tokenizer.token_to_id(spelling)
    if found is None:
        raise InputError(f"tokenizer: has no token {spelling!r}; needed: {' '.join(SPECIAL_TOKENS)}")
    return int(found)


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text in which nothing is special: a spelling of a special token becomes ordinary tokens."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    finally:
        tokenizer.encode_special_tokens = before
