"""What a client was told, over any number of runs that end anywhere."""

from __future__ import annotations

import random

import pytest

from rorqual.disagg.cluster.told import Diverged, Told
from rorqual.engine.output import Completion, Counts, Delta, RequestOutput, Times, TokenLogprob, compact

TEXT = "The whale, the whale! Up helm, up helm!"


def told(completions: int = 1) -> Told:
    return Told(
        RequestOutput(
            request="r",
            prompt_ids=compact([1]),
            completions=[Completion(index=at) for at in range(completions)],
            counts=Counts(),
            times=Times(arrived=0.0),
        )
    )


def run(draw: random.Random, text: str = TEXT, index: int = 0) -> list[Delta]:
    """One run: a token a character, cut into deltas anywhere, the text a little behind the tokens."""
    found, at, shown = [], 0, 0
    while at < len(text):
        end = min(len(text), at + draw.randrange(1, 6))
        show = end if end == len(text) else max(shown, end - draw.randrange(3))
        ids = tuple(ord(letter) for letter in text[at:end])
        found.append(
            Delta(
                request=f"r~{draw.random()}",
                index=index,
                text=text[shown:show],
                token_ids=ids,
                logprobs=tuple(TokenLogprob(token=token, logprob=-1.0) for token in ids),
                finish_reason="length" if end == len(text) else None,
            )
        )
        at, shown = end, show
    return found


@pytest.mark.parametrize("seed", range(40))
def test_runs_that_are_cut_anywhere_make_one_text(seed: int) -> None:
    draw, own, heard = random.Random(seed), told(), list[Delta]()
    for _ in range(draw.randrange(4)):
        own.again()
        deltas = run(draw)
        heard += [found for delta in deltas[: draw.randrange(len(deltas))] if (found := own.take(delta))]
    own.again()
    heard += [found for delta in run(draw) if (found := own.take(delta))]
    assert "".join(delta.text for delta in heard) == TEXT == own.output.text
    assert [token for delta in heard for token in delta.token_ids] == [ord(letter) for letter in TEXT]
    assert [one.token for delta in heard for one in delta.logprobs or ()] == own.output.token_ids
    assert [delta.finish_reason for delta in heard if delta.finish_reason] == ["length"]
    assert {delta.request for delta in heard} == {"r"}
    assert own.output.finished and own.end("abort") == []


@pytest.mark.parametrize("other", [TEXT.replace("w", "W"), TEXT[:12], TEXT[:20] + "?" + TEXT[21:]])
def test_a_run_that_says_something_else_is_noticed(other: str) -> None:
    own = told()
    heard = [own.take(delta) for delta in run(random.Random(1), TEXT + "!")[:-1]]
    assert len(own.output.text) > 30 and any(heard)
    own.again()
    with pytest.raises(Diverged):
        for delta in run(random.Random(2), other):
            own.take(delta)
    assert TEXT.startswith(own.output.text) or own.output.text == TEXT


def test_completions_are_apart() -> None:
    own, draw = told(2), random.Random(3)
    for delta in run(draw, "first", 0):
        own.take(delta)
    for delta in run(draw, "second", 1)[:1]:
        own.take(delta)
    own.again()
    assert not any(own.take(delta) for delta in run(draw, "first", 0))
    for delta in run(draw, "second", 1):
        own.take(delta)
    assert [done.text for done in own.output.completions] == ["first", "second"]


def test_the_end_from_outside_is_told_once() -> None:
    own = told(2)
    for delta in run(random.Random(5), "first", 0):
        own.take(delta)
    (left,) = own.end("error", "why")
    assert (left.index, left.finish_reason, left.stopped_by) == (1, "error", "why")
    assert own.output.finished
    assert own.take(run(random.Random(5), "late", 1)[0]) is None
