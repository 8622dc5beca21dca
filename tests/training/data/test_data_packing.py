"""Packing: every token in one place, every target the true successor, pieces that look like what inference sees."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rorqual.training.batch import IGNORE, Packed
from rorqual.training.data.packing import Plan, pack, plan_pass

BOS, PAD = 1, 0
HEADERS = {0: [BOS], 1: [BOS, 2, 3]}
"""By parity of the document: as a text's and as a conversation's."""


def header(document: int, start: int) -> list[int]:
    assert start > 0
    return HEADERS[document % 2]


def token(document: int, place: int) -> int:
    return 1000 * (document + 1) + place


def ids_of(lengths: list[int], document: int, start: int, stop: int) -> Tensor:
    return torch.tensor([token(document, at) for at in range(start, min(stop, lengths[document]))], dtype=torch.int64)


def packed(lengths: list[int], order: list[int], n: int) -> tuple[Plan, list[Packed]]:
    plan = plan_pass(order, lengths, n, header)
    read = lambda *where: ids_of(lengths, *where)  # noqa: E731
    return plan, [pack(plan, place, n, place, PAD, header, read) for place in range(plan.sequences)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 24), max_size=7), st.integers(1, 13), st.randoms(use_true_random=False))
def test_every_token_once_and_every_target_its_successor(lengths: list[int], n: int, random: object) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    plan, sequences = packed(lengths, order, n)
    seen: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    for place, sequence in enumerate(sequences):
        assert sequence.ids.shape == (n,)
        rows = plan.pieces[plan.first[place] : plan.first[place + 1]].tolist()
        pieces = list(sequence.pieces())
        assert len(pieces) - len(rows) in (0, 1)
        for (document, start, stop), (first, end) in zip(rows, pieces, strict=False):
            ids, targets = sequence.ids[first:end].tolist(), sequence.targets[first:end].tolist()
            extra = len(ids) - (stop - start)
            assert ids[:extra] == (HEADERS[document % 2][: n - 1] if start else [])
            assert set(targets[:extra]) <= {IGNORE}
            assert ids[extra:] == [token(document, at) for at in range(start, stop)]
            following = [token(document, at) if at < lengths[document] else IGNORE for at in range(start + 1, stop + 1)]
            assert targets[extra:] == following
            seen.update(ids[extra:])
            trained.update(target for target in targets if target != IGNORE)
        for first, end in pieces[len(rows) :]:
            assert place == len(sequences) - 1, "only the last sequence is padded"
            assert set(sequence.ids[first:end].tolist()) == {PAD}
            assert set(sequence.targets[first:end].tolist()) == {IGNORE}
    everything = [token(document, at) for document, length in enumerate(lengths) for at in range(length)]
    assert seen == Counter(everything)
    assert trained == Counter(found for found in everything if found % 1000)


def test_a_worked_example() -> None:
    # 5 tokens, then 7: the second does not fit beside the first, nothing else is near, so it is cut after 3.
    _, (first, second) = packed([5, 7], [0, 1], 8)
    assert first.ids.tolist() == [1000, 1001, 1002, 1003, 1004, 2000, 2001, 2002]
    assert first.targets.tolist() == [1001, 1002, 1003, 1004, IGNORE, 2001, 2002, 2003]
    assert first.starts == (0, 5)
    # It goes on after its header, which trains nothing; one token of the sequence is left.
    assert second.ids.tolist() == [BOS, 2, 3, 2003, 2004, 2005, 2006, PAD]
    assert second.targets.tolist() == [IGNORE, IGNORE, IGNORE, 2004, 2005, 2006, IGNORE, IGNORE]
    assert second.starts == (0, 7)


def test_the_longest_that_fits_fills_a_sequence() -> None:
    plan, sequences = packed([6, 7, 1, 2, 2], [0, 1, 2, 3, 4], 8)
    assert [row[0] for row in plan.pieces.tolist()] == [0, 3, 1, 2, 4]
    assert [sequence.starts for sequence in sequences] == [(0, 6), (0, 7), (0, 2)]


def test_documents_of_no_token_take_no_place() -> None:
    assert packed([0, 0], [0, 1], 4)[1] == []
    assert packed([], [], 4)[1] == []
    _, (only,) = packed([0, 1, 0, 1], [0, 1, 2, 3], 2)
    assert only.ids.tolist() == [2000, 4000]
    assert only.targets.tolist() == [IGNORE, IGNORE]
    assert only.starts == (0, 1)
