"""The dense twin: its size, what a position may see, and that it learns."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rorqual.analysis.dense_twin import DenseTwin, TwinConfig, initial_twin, twin_config
from rorqual.config import presets
from rorqual.inventory.parameters import active_parameters
from rorqual.training.batch import IGNORE, Packed
from rorqual.training.learner import Phase, Totals

SMALL = TwinConfig(vocab_size=50, layers=2, heads=2, head_dim=16, intermediate=48)


def packed(ids: list[int], starts: tuple[int, ...] = (0,)) -> Packed:
    tokens = torch.tensor(ids)
    targets = torch.cat((tokens[1:], torch.tensor([IGNORE])))
    for start in starts[1:]:
        targets[start - 1] = IGNORE
    return Packed(ids=tokens, targets=targets, starts=starts, number=0)


def random_ids(seed: int, n: int) -> list[int]:
    return torch.randint(50, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def twin() -> DenseTwin:
    """What writes to the stream is louder than at the start, so that the logits depend on everything."""
    parameters = initial_twin(SMALL, 3)
    for name, parameter in parameters.items():
        if name.endswith(("head.weight", "wo.weight", "w2.weight")):
            parameter.data *= 5
    return DenseTwin(SMALL, parameters)


@pytest.mark.parametrize("preset", ["tiny", "mid", "demo", "v4.1-flash"])
def test_equal_active_parameters(preset: str) -> None:
    config = presets.load(preset)
    found = twin_config(config)
    target = active_parameters(config).decode_with_head
    assert abs(found.active - target) <= 0.02 * target
    assert found.layers == config.num_hidden_layers
    assert 1.5 < found.intermediate / found.hidden < 4


def test_active_counts_what_is_there() -> None:
    parameters = initial_twin(SMALL, 0)
    held = sum(parameter.numel() for name, parameter in parameters.items() if name != "embed.weight")
    assert SMALL.active == held


def test_a_position_sees_what_stands_before_it_and_nothing_after(twin: DenseTwin) -> None:
    ids = random_ids(0, 24)
    before = twin.token_losses([packed(ids)], Phase())[0]
    for changed in (5, 17):
        other = list(ids)
        other[changed] = (other[changed] + 1) % 50
        after = twin.token_losses([packed(other)], Phase())[0]
        # The loss just before the change has it as its target.
        torch.testing.assert_close(after[: changed - 1], before[: changed - 1])
        for n in range(changed + 1, 25):
            moved = twin.next_logits(torch.tensor(other[:n]), Phase()) - twin.next_logits(
                torch.tensor(ids[:n]), Phase()
            )
            assert moved.abs().max() > 1e-3, f"position {n - 1} does not see {changed}"


def test_a_document_is_alone(twin: DenseTwin) -> None:
    """Packed with others, in whatever batch, a document has the losses that it has alone."""
    documents = [random_ids(seed, n) for seed, n in ((1, 7), (2, 12), (3, 12), (4, 1), (5, 30))]
    alone = [twin.token_losses([packed(ids)], Phase())[0] for ids in documents]
    first = packed([*documents[0], *documents[1], *documents[2]], (0, 7, 19))
    second = packed([*documents[3], *documents[4]], (0, 1))
    together = torch.cat(twin.token_losses([first, second], Phase()))
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert together[[6, 18, 30, 31, 61]].eq(0).all(), "the last token of a document predicts nothing"


def test_next_logits_are_those_of_the_loss(twin: DenseTwin) -> None:
    ids = random_ids(7, 15)
    loss = twin.token_losses([packed(ids)], Phase())[0]
    for n in (1, 8, 14):
        logits = twin.next_logits(torch.tensor(ids[:n]), Phase())
        assert logits.shape == (50,)
        assert abs(float(-logits.log_softmax(0)[ids[n]] - loss[n - 1])) < 1e-4


def test_micro_batches_add_up_to_the_step(twin: DenseTwin) -> None:
    sequences = [packed(random_ids(seed, 16)) for seed in range(3)]
    totals = Totals(tokens=sum(s.trained for s in sequences), sequences=3)
    whole = twin.loss(sequences, Phase(), totals)
    parts = [twin.loss([sequence], Phase(), totals) for sequence in sequences]
    assert whole.parts["loss"] == pytest.approx(sum(part.parts["loss"] for part in parts), rel=1e-5)
    mean = torch.cat(twin.token_losses(sequences, Phase())).sum() / totals.tokens
    assert whole.total.item() == pytest.approx(float(mean), rel=1e-5)


def test_it_learns_by_heart() -> None:
    twin = DenseTwin(SMALL, initial_twin(SMALL, 0))
    batch = [packed(random_ids(9, 40), (0, 20))]
    totals = Totals(tokens=batch[0].trained, sequences=1)
    optimiser = torch.optim.AdamW(twin.parameters.values(), lr=1e-2)
    first = twin.loss(batch, Phase(), totals)
    assert abs(first.parts["loss"] - torch.log(torch.tensor(50.0))) < 0.1
    for _ in range(60):
        optimiser.zero_grad()
        step = twin.loss(batch, dataclasses.replace(Phase(), sparse=False), totals)
        step.total.backward()
        optimiser.step()
        twin.after_step(step.loads)
    assert all(parameter.grad is not None for parameter in twin.parameters.values())
    assert step.parts["loss"] < 0.1
