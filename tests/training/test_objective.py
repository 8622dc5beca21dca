"""Losses beside the draft's, and what is drawn for them, against sums that are written out."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from rorqual.training.kv import Routed
from rorqual.training.learner import Phase, Totals
from rorqual.training.objective import balance_loss, draw, expert_loads, noised
from rorqual.training.recipe import LossRecipe
from tests.training.models import learner, packed

WINDOW = 16


def routed(name: str, rows: int, experts: int, slots: int, seed: int) -> Routed:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, experts, generator=generator) + 0.1
    # Not the scores' own best: f and P are to be told apart.
    index = torch.rand(rows, experts, generator=generator).argsort(1)[:, :slots]
    return Routed(name, scores.requires_grad_(), index)


def written_out(routing: list[Routed], lengths: list[int], sequences: int) -> Tensor:
    total = torch.zeros(())
    for layer in routing:
        experts, slots = layer.scores_TE.shape[1], layer.index_Tk.shape[1]
        first = 0
        for n in lengths:
            rows = range(first, first + n)
            for e in range(experts):
                chosen = sum(layer.index_Tk[t].tolist().count(e) for t in rows)
                f = chosen / (slots * n) * experts
                p = torch.stack([layer.scores_TE[t, e] / layer.scores_TE[t].sum() for t in rows]).sum() / n
                total = total + f * p
            first += n
    return total / len(routing) / sequences


def test_balance_loss_of_unequal_sequences_is_the_written_out_sum() -> None:
    lengths, sequences = [2, 7], 5  # three more sequences in other micro-batches
    routing = [routed("layers.0", 9, 4, 2, 1), routed("layers.1", 9, 4, 2, 2)]
    scores = [layer.scores_TE for layer in routing]
    found = balance_loss(routing, lengths, Totals(tokens=1, sequences=sequences))
    wanted = written_out(routing, lengths, sequences)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    pairs = zip(torch.autograd.grad(found, scores), torch.autograd.grad(wanted, scores), strict=True)
    for grad, expected in pairs:
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-4)


def test_balance_loss_is_1_when_even_and_the_number_of_experts_when_all_go_to_one() -> None:
    totals = Totals(tokens=1, sequences=1)
    even = Routed("layers.0", torch.full((4, 4), 0.7), torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]]))
    assert balance_loss([even], [4], totals).item() == pytest.approx(1.0)
    one = Routed("layers.0", torch.tensor([[0.0, 0.3, 0.0]] * 5), torch.ones(5, 1, dtype=torch.int64))
    assert balance_loss([one], [5], totals).item() == pytest.approx(3.0)
    assert balance_loss([], [5], totals).item() == 0.0


def test_expert_loads_count_rows_of_each_layer() -> None:
    first = Routed("layers.0", torch.ones(3, 4), torch.tensor([[0, 2], [2, 0], [2, 1]]))
    second = Routed("mtp.0", torch.ones(2, 3), torch.tensor([[1], [1]]))
    found = expert_loads([first, second])
    assert {name: load.tolist() for name, load in found.items()} == {"layers.0": [2, 1, 3, 0], "mtp.0": [0, 2, 0]}
    assert all(load.dtype == torch.int64 for load in found.values())


def test_drawn_rows_are_as_many_as_the_share_ascending_and_inside() -> None:
    loss = LossRecipe(indexer_rows=0.3)
    for choice, n in zip(draw(packed([40, 1, 9], 3), loss, 0.0, WINDOW, seed=1), (40, 1, 9), strict=True):
        rows, count = choice.index_rows.tolist(), max(1, round(0.3 * n))
        assert rows == sorted(set(rows)) and len(rows) == count and rows[0] >= 0 and rows[-1] < n
        assert choice.row_weight == pytest.approx(n / count) and choice.seam is None
    every = draw(packed([6]), LossRecipe(indexer_rows=1.0), 0.0, WINDOW, seed=1)[0]
    assert every.index_rows.tolist() == list(range(6)) and every.row_weight == 1.0
    for off in (LossRecipe(indexer=0.0), LossRecipe(indexer_rows=0.0)):
        assert not len(draw(packed([40]), off, 0.0, WINDOW, seed=1)[0].index_rows)


def test_weighted_sums_over_drawn_rows_are_unbiased() -> None:
    n, loss, draws = 11, LossRecipe(indexer_rows=0.3), 200  # 3 of 11 rows, which is not the recipe's share
    values = torch.arange(n) + 10.0
    sequence = packed([n])
    sums = []
    for seed in range(draws):
        choice = draw(sequence, loss, 0.0, WINDOW, seed)[0]
        sums.append(choice.row_weight * values[choice.index_rows].sum().item())
    found, wanted = torch.tensor(sums), values.sum().item()
    error = found.std().item() / math.sqrt(draws)
    # A weight of 1 / 0.3 in place of 11 / 3 would be 9 % off, rows from one end more.
    assert abs(found.mean().item() - wanted) < 4 * error < 0.04 * wanted, (found.mean(), wanted, error)


def test_seams_of_a_sequence_come_together_and_leave_a_window_behind() -> None:
    for number in range(30):
        long, short, longer = draw(packed([17, 16, 30], number), LossRecipe(), 1.0, WINDOW, seed=2)
        assert long.seam == 1 and short.seam is None
        assert longer.seam is not None and 1 <= longer.seam <= 30 - WINDOW
    assert all(
        (a.seam is None) == (b.seam is None)
        for a, b in (draw(packed([40, 40], number), LossRecipe(), 0.5, WINDOW, seed=2) for number in range(30))
    )


def test_what_is_drawn_hangs_on_number_and_seed_alone() -> None:
    def drawn(number: int, seed: int, content: int = 0) -> list[tuple[list[int], int | None]]:
        found = draw(packed([60, 40], number, seed=content), LossRecipe(), 1.0, WINDOW, seed)
        return [(choice.index_rows.tolist(), choice.seam) for choice in found]

    assert drawn(4, 5) == drawn(4, 5) == drawn(4, 5, content=1)
    assert len({str(drawn(number, seed)) for number in range(5) for seed in range(5)}) == 25


def test_noise_replaces_a_share_of_the_inputs_and_no_target() -> None:
    whole = packed([400, 200], number=3)
    found = noised(whole, 0.25, 499, seed=1)
    hit = found.ids == 499
    assert 0.2 < hit.float().mean() < 0.3
    assert torch.equal(found.ids[~hit], whole.ids[~hit]) and torch.equal(found.targets, whole.targets)
    assert (found.starts, found.number) == (whole.starts, whole.number)
    assert torch.equal(noised(whole, 0.25, 499, seed=1).ids, found.ids), "decided by seed and number"
    for other in (noised(whole, 0.25, 499, seed=2), noised(dataclasses.replace(whole, number=4), 0.25, 499, seed=1)):
        assert not torch.equal(other.ids == 499, hit)
    assert noised(whole, 0.0, 499, seed=1) is whole


def test_the_learner_trains_on_noise_and_is_judged_without() -> None:
    loud, quiet = learner(3, noise=0.5, draft_ce=0.0), learner(3, draft_ce=0.0)
    batch = [packed([70, 20], number=1)]
    totals = Totals(tokens=batch[0].trained, sequences=1)
    clean, noisy = (made.loss(batch, Phase(draft=False), totals).parts["loss"] for made in (quiet, loud))
    assert noisy != clean and noisy == pytest.approx(clean, abs=0.5)
    assert torch.equal(loud.token_losses(batch, Phase())[0], quiet.token_losses(batch, Phase())[0])
