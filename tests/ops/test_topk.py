from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.ops.fast import topk as fast
from rorqual.ops.fast.topk import topk_lowest as fast_topk_lowest
from rorqual.ops.reference import topk as plain
from rorqual.ops.reference.topk import topk_lowest

INF = float("inf")
TopK = Callable[[Tensor, int], Tensor]
BOTH = pytest.mark.parametrize("topk", [topk_lowest, fast_topk_lowest], ids=["plain", "fast"])


def by_sorting(scores: Tensor, k: int) -> Tensor:
    """The rule, spelled out."""
    rows = []
    for row in scores.tolist():
        order = sorted((g for g in range(len(row)) if row[g] > -INF), key=lambda g: (-row[g], g))
        chosen = sorted(order[:k])
        rows.append(chosen + [-1] * (k - len(chosen)))
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), k)


@BOTH
def test_worked_example(topk: TopK) -> None:
    scores = torch.tensor([[2.0, 5.0, 5.0, -INF, 5.0]])
    assert topk(scores, 2).tolist() == [[1, 2]]
    assert topk(scores, 5).tolist() == [[0, 1, 2, 4, -1]]
    assert topk(scores, 7).tolist() == [[0, 1, 2, 4, -1, -1, -1]]


@BOTH
@pytest.mark.parametrize("score", [0.0, 1.5, -3.0, INF])
def test_of_equal_scores_the_lowest_indices_win_alone_or_in_a_batch_of_32(topk: TopK, score: float) -> None:
    expected = list(range(12))
    assert topk(torch.full((1, 500), score), 12).tolist() == [expected]
    assert topk(torch.full((32, 500), score), 12).tolist() == [expected] * 32


@BOTH
def test_a_row_is_the_same_alone_and_in_a_batch(topk: TopK) -> None:
    scores = torch.randn(32, 700, generator=torch.Generator().manual_seed(0)).mul(4).round()
    batch = topk(scores, 40)
    assert all(torch.equal(topk(scores[r : r + 1], 40)[0], batch[r]) for r in range(32))


@BOTH
def test_zeros_of_both_signs_tie(topk: TopK) -> None:
    assert topk(torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]]), 2).tolist() == [[0, 1]]
    assert topk(torch.tensor([[0.0, -0.0, 0.0, 1e-45]]), 2).tolist() == [[0, 3]]


@BOTH
@pytest.mark.parametrize("k", [1, 3, 9])
def test_hidden_scores_are_never_selected(topk: TopK, k: int) -> None:
    assert topk(torch.full((2, 9), -INF), k).tolist() == [[-1] * k] * 2
    mostly = torch.full((1, 9), -INF)
    mostly[0, 6] = -3e38
    assert topk(mostly, k).tolist() == [[6] + [-1] * (k - 1)]


@BOTH
def test_infinite_scores_are_best(topk: TopK) -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    scores[:, [7, 33]] = INF
    assert ((topk(scores, 5) == 7).any(1) & (topk(scores, 5) == 33).any(1)).all()


@BOTH
def test_nan_is_an_error_that_names_its_place(topk: TopK) -> None:
    for nan in (float("nan"), -float("nan")):
        scores = torch.zeros(3, 40)
        scores[2, 11] = torch.tensor(nan)
        with pytest.raises(FormatError, match=r"\(2, 11\)"):
            topk(scores, 4)


@BOTH
def test_shapes_of_nothing(topk: TopK) -> None:
    assert topk(torch.zeros(3, 0), 2).tolist() == [[-1, -1]] * 3
    assert topk(torch.zeros(0, 5), 2).shape == (0, 2)
    assert topk(torch.zeros(2, 5), 0).shape == (2, 0)


@BOTH
def test_large_k_and_views(topk: TopK) -> None:
    scores = torch.randn(6000, 4, generator=torch.Generator().manual_seed(0)).T
    assert torch.equal(topk(scores, 512), by_sorting(scores, 512))


def test_tiles_of_rows_join(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(7, 30, generator=torch.Generator().manual_seed(0)).mul(2).round()
    monkeypatch.setattr(plain, "TILE_SCORES", 64)
    assert torch.equal(topk_lowest(scores, 5), by_sorting(scores, 5))


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_parts_of_a_row_join(threads: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties at every edge, hidden scores, a part of nothing but hidden ones, and a part that is not whole."""
    monkeypatch.setattr(fast, "workers", lambda: threads)
    monkeypatch.setattr(fast, "SCORES_A_TASK", 16)
    split = []
    kernel = fast._topk_split
    monkeypatch.setattr(fast, "_topk_split", lambda *args, tasks: (split.append(args[3]), kernel(*args, tasks=tasks)))
    scores = torch.randn(rows, 1001, generator=torch.Generator().manual_seed(1)).mul(3).round()
    scores[:, 100:600] = -INF
    scores[0, [7, 990]] = INF
    for k in (1, 5, 17):
        assert torch.equal(fast.topk_lowest(scores, k), by_sorting(scores, k))
    assert split == [-(-threads // rows)] * 3 if threads > rows else not split
    hidden = torch.full((rows, 1001), -INF)
    hidden[:, 640] = -3e38
    assert fast.topk_lowest(hidden, 3).tolist() == [[640, -1, -1]] * rows
    scores[rows - 1, 700] = float("nan")
    with pytest.raises(FormatError, match=rf"\({rows - 1}, 700\)"):
        fast.topk_lowest(scores, 5)


def test_bf16_scores_go_to_the_plain_op() -> None:
    scores = torch.randn(2, 60, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert torch.equal(fast_topk_lowest(scores, 9), by_sorting(scores.float(), 9))


scores_values = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, 3e38, -3e38, 1e-45, -1e-45]),
    st.floats(allow_nan=False, width=32),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(scores_values, min_size=6, max_size=6), min_size=1, max_size=3), k=st.integers(1, 8))
def test_any_scores(rows: list[list[float]], k: int) -> None:
    scores = torch.tensor(rows, dtype=torch.float32)
    assert torch.equal(topk_lowest(scores, k), by_sorting(scores, k))
    assert torch.equal(fast_topk_lowest(scores, k), by_sorting(scores, k))


def long_rows() -> dict[str, Tensor]:
    """Rows of 6,000 scores: long beside k = 12, so that their first parts tell what to look at."""
    generator = torch.Generator().manual_seed(8)
    mixed = torch.randn(6000, generator=generator)
    hidden = mixed.clone()
    hidden[:3000] = -INF
    tied = (mixed * 2).round()
    few = torch.full((6000,), -INF)
    few[5000:5009] = mixed[:9]
    return {
        "mixed": mixed,
        "negative": mixed - 50,
        "best last": mixed.sort().values,
        "best first": mixed.sort(descending=True).values,
        "first part hidden": hidden,
        "tied": tied,
        "all equal": torch.full((6000,), -0.0),
        "few finite": few,
        "infinite": mixed.masked_fill(mixed > 1, INF),
    }


@pytest.mark.parametrize("name", long_rows())
def test_long_rows(name: str) -> None:
    for width in (6000, 5999, 3000):
        scores = long_rows()[name][None, -width:]
        assert torch.equal(fast_topk_lowest(scores, 12), by_sorting(scores, 12))


@pytest.mark.parametrize("at", [5, 740, 4321, 5999])
def test_nan_of_a_long_row_is_found_wherever_it_stands(at: int) -> None:
    scores = torch.randn(1, 6000, generator=torch.Generator().manual_seed(9))
    scores[0, at] = float("nan")
    with pytest.raises(FormatError, match=rf"\(0, {at}\) is NaN"):
        fast_topk_lowest(scores, 12)
