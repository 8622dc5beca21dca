"""A conversation as the release's prompt encoding renders it (V4.1, thinking off), for training.

    bos <｜System｜>text <｜User｜>text <｜Assistant｜></think>text eos <｜User｜>... eos

System turns stand where they were said. User turns in a row are one, joined by an empty line. Every assistant turn
opens with the mark that ends thinking (there is none) and closes with eos. `deepseek-recipe` renders the same, and ends
a prompt by opening one more assistant turn (`reply=True`). Content is plain: a marker spelled inside it is just text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from rorqual.training.data.documents import Turn
from rorqual.training.data.tokens import ASSISTANT, BOS, END_THINK, EOS, SYSTEM, USER, plain_ids, token_id

MARKERS = {"system": (SYSTEM,), "user": (USER,), "assistant": (ASSISTANT, END_THINK)}
"""What opens a turn of each role."""


def chat_ids(tokenizer: Tokenizer, turns: Sequence[Turn], *, reply: bool = False) -> list[int]:
    """Token ids: markers by name, each plain stretch by itself; `reply` opens the assistant's next turn.

    Only an assistant turn closes with eos: a conversation that ends in another turn has none at its end.
    """
    ids: list[int] = []
    for text, special in _parts(turns, reply):
        ids += [token_id(tokenizer, text)] if special else plain_ids(tokenizer, text)
    return ids


def _parts(turns: Sequence[Turn], reply: bool) -> Iterator[tuple[str, bool]]:
    """(text, is it a special token) in order; no two plain stretches meet."""
    yield BOS, True
    for turn in _joined(turns):
        yield from ((marker, True) for marker in MARKERS[turn.role])
        yield turn.content, False
        if turn.role == "assistant":
            yield EOS, True
    if reply:
        yield from ((marker, True) for marker in MARKERS["assistant"])


def _joined(turns: Sequence[Turn]) -> list[Turn]:
    """User turns in a row as one."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role == "user":
            turn = Turn("user", f"{joined.pop().content}\n\n{turn.content}")
        joined.append(turn)
    return joined
