"""Attention of a whole piece against attention of each row over its own keys: values, and gradients under autograd."""

from functools import cache

import pytest
import torch
from torch import Tensor

from rorqual.formats.codec import fake_quantize
from rorqual.ops.dispatch import reference_ops
from rorqual.ops.reference.attention import attention_over
from rorqual.training.attend import PLAIN, ROW_TILE, Masks, Softmax, _tiles, attend
from rorqual.training.kv import Choice, LearningKV
from rorqual.training.learner import Phase
from tests.training.models import tiny_config

WINDOW, HEADS, WIDTH, SCALE = 16, 2, 8, 0.6
LONG = 600
SEAMS = {7: 3, LONG: 290}


@cache
def softmaxes() -> dict[str, Softmax]:
    from rorqual.ops.fast import train_attend

    return {"plain": PLAIN, "fast": Softmax(train_attend.joint_softmax, train_attend.joint_softmax_backward)}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaves(n: int, groups: int) -> list[Tensor]:
    """Queries, window keys, groups, sink."""
    shapes = ((n, HEADS, WIDTH), (n, WIDTH), (groups, WIDTH), (HEADS,))
    return [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def chosen_groups(n: int, ratio: int) -> Tensor:
    """Bool [n, G]: about half of those that a row may see; so some rows see none, and some groups are seen by none."""
    group = torch.arange(n // ratio if ratio else 0)
    causal = group < (torch.arange(n)[:, None] + 1) // max(ratio, 1)
    chosen = causal & (random(*causal.shape, seed=10) > 0)
    if chosen.shape[1]:
        chosen[n // 2], chosen[:, 0] = False, False
    return chosen


def masks_of(n: int, ratio: int, chosen_nG: Tensor, seam: int | None) -> Masks:
    """As a decoder layer in training has them."""
    config = tiny_config()
    assert config.sliding_window == WINDOW
    kv = LearningKV(
        config=config,
        ops=reference_ops(),
        fake=fake_quantize,
        softmax=PLAIN,
        phase=Phase(),
        choices=[Choice(index_rows=torch.empty(0, dtype=torch.int64), row_weight=0.0, seam=seam)],
    )
    kv._layer, kv._banned[0] = config.decoder_start, ~chosen_nG
    return kv._masks(0, n, chosen_nG.shape[1], ratio, torch.device("cpu"))


def row_by_row(inputs: list[Tensor], chosen_nG: Tensor, seam: int | None, scale: float) -> Tensor:
    """Every row over every key, with a mask by positions."""
    q, keys, groups, sink = inputs
    row, key = torch.arange(len(q))[:, None], torch.arange(len(q))
    seen = (row - WINDOW < key) & (key <= row)
    if seam is not None:
        seen &= (row < seam) | (key >= seam)
    every = torch.cat((keys, groups)).expand(len(q), -1, -1)
    return attention_over(q, every, torch.cat((seen, chosen_nG), 1), sink, scale, native=False)


def with_gradients(out: Tensor, inputs: list[Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(out, inputs, random(*out.shape, seed=20))
    return dict(zip(("out", "q", "keys", "groups", "sink"), (out.detach(), *grads), strict=True))


def assert_close(found: Tensor, wanted: Tensor, what: str, atol: float, rtol: float) -> None:
    torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("seam", [False, True], ids=["whole", "seam"])
@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("n", [7, LONG])
def test_values_and_gradients_are_those_of_attention_row_by_row(n: int, ratio: int, seam: bool) -> None:
    at = SEAMS[n] if seam else None
    chosen = chosen_groups(n, ratio)
    masks, inputs = masks_of(n, ratio, chosen, at), leaves(n, chosen.shape[1])
    q, keys, groups, sink = inputs
    wanted = with_gradients(row_by_row(inputs, chosen, at, SCALE), inputs)
    assert all(value.any() for name, value in wanted.items() if ratio or name != "groups")
    for name, softmax in softmaxes().items():
        found = with_gradients(attend(q, keys, groups, masks, sink, SCALE, softmax), inputs)
        for what, value in found.items():
            assert_close(value, wanted[what], f"{name} {what}", atol=1e-5 if what == "out" else 1e-4, rtol=1e-4)


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_long_piece_meets_its_groups_in_tiles_that_see_ever_more(ratio: int) -> None:
    """What the cases of 600 rows stand on; and no tile may lack a group that its last row can see."""
    filled = -(-LONG // WINDOW) * WINDOW
    groups = -(-(LONG // ratio) // 64) * 64
    tiles = list(_tiles(filled, WINDOW, groups, ratio))
    assert [rows.start for rows, _ in tiles] == [0, ROW_TILE, 2 * ROW_TILE] and tiles[-1][0].stop == filled
    assert tiles[0][1] < tiles[1][1] < groups == tiles[-1][1]
    assert all(seen >= min(groups, rows.stop // ratio) for rows, seen in tiles)


def test_large_logits_and_sinks_do_not_overflow() -> None:
    n, ratio, scale = 21, 2, 60.0
    chosen = chosen_groups(n, ratio)
    masks = masks_of(n, ratio, chosen, None)
    q, keys, groups, _ = (x.detach() for x in leaves(n, chosen.shape[1]))
    assert (torch.einsum("nhc,kc->nhk", q, keys) * scale).max() > 300  # e^300 is no fp32 number
    for sink in (torch.tensor([0.0, -1e4]), torch.tensor([1e4, 0.0])):
        wanted = row_by_row([q, keys, groups, sink], chosen, None, scale)
        assert wanted[:, 1].any() and wanted[:, 0].any() == (sink[0] == 0)  # a sink of 1e4 takes all
        for name, softmax in softmaxes().items():
            out = attend(q, keys, groups, masks, sink, scale, softmax)
            assert_close(out, wanted, name, atol=1e-3, rtol=0)
