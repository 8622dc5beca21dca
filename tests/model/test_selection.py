"""Field cases 21-24 on the indexer as the model uses it: visibility, density, ties, the candidate pool."""

from dataclasses import dataclass, field

import pytest
import torch

from rorqual.config import ModelConfig, presets
from rorqual.model.indexer import Query, Running, margin
from rorqual.model.kv_dense import DenseKV
from rorqual.model.numerics import Numerics
from rorqual.model.rows import Segment
from rorqual.model.run import Run
from rorqual.model.tap import Tap
from rorqual.ops.dispatch import fast_ops, reference_ops

HEADS, DIM = 16, 32


@dataclass
class FakeIndexer:
    """The settings of an indexer, without weights."""

    topk: int
    block: int
    keep_blocks: int
    ratio: int = 1
    role: object = field(init=False)
    last_source: int = 0

    def __post_init__(self) -> None:
        config = presets.load("tiny")
        self.config: ModelConfig = config
        source = next(r for r in config.kv_sources if r.ratio == self.ratio)
        self.role = source


def query(indexer: FakeIndexer, keys: torch.Tensor, positions: torch.Tensor, q: torch.Tensor, fast: bool) -> Query:
    """A query of given rows against given keys [G, D]."""
    ops = fast_ops() if fast else reference_ops()
    kv = DenseKV(indexer.config, native=False)
    run = Run(ops=ops, numerics=Numerics(name="fp32"), kv=kv, tap=Tap())
    seg = Segment(
        row_start=0,
        row_end=len(positions),
        start=int(positions[0]),
        end=int(positions[-1]) + 1,
        slot=0,
        block_table=None,
        write_floor=0,
        window_floor=0,
    )
    kv.put_groups(indexer.role.layer_id, seg, 0, torch.zeros(len(keys), indexer.config.head_dim), keys, Tap())
    weights = torch.full((len(positions), HEADS), 0.1)
    return Query(indexer, seg, q, weights, positions, run)  # type: ignore[arg-type]


def random_query(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fast", [False, True])
def test_future_groups_are_never_selected(fast: bool) -> None:
    """Case 21: the future holds the largest scores."""
    q = random_query(8)
    keys = torch.randn(64, DIM, generator=torch.Generator().manual_seed(1))
    keys[40:] = q[0, 0] * 10
    for ratio in (1, 2):
        indexer = FakeIndexer(topk=8, block=4, keep_blocks=3, ratio=ratio)
        positions = torch.arange(30, 38)
        chosen, _ = query(indexer, keys, positions, q, fast).from_all(False)
        visible = (positions + 1) // ratio
        assert (chosen < visible[:, None]).all() and (chosen >= 0).all()


@pytest.mark.parametrize("fast", [False, True])
def test_up_to_topk_groups_all_are_selected(fast: bool) -> None:
    """Case 22: L <= index_topk is dense; L = top-k + 1 drops exactly one."""
    indexer = FakeIndexer(topk=8, block=4, keep_blocks=3)
    keys = torch.randn(9, DIM, generator=torch.Generator().manual_seed(2))
    for length in (1, 7, 8):
        chosen, _ = query(indexer, keys[:length], torch.tensor([length - 1]), random_query(1), fast).from_all(False)
        assert chosen[0, :length].tolist() == list(range(length))
        assert (chosen[0, length:] == -1).all()
    chosen, _ = query(indexer, keys, torch.tensor([8]), random_query(1), fast).from_all(False)
    assert len(set(chosen[0].tolist())) == 8 and -1 not in chosen[0]


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("fast", [False, True])
def test_equal_scores_go_to_the_lowest_indices(rows: int, fast: bool) -> None:
    """Case 23, across several score tiles, alone or in a batch of 32."""
    import rorqual.model.indexer as module

    indexer = FakeIndexer(topk=8, block=4, keep_blocks=3)
    keys = torch.ones(100, DIM)
    tiles = module.GROUP_TILE, module.ROW_TILE
    module.GROUP_TILE, module.ROW_TILE = 16, rows
    try:
        found = query(indexer, keys, torch.arange(99 - rows + 1, 100), random_query(1).expand(rows, -1, -1), fast)
        chosen, blocks = found.from_all(True)
    finally:
        module.GROUP_TILE, module.ROW_TILE = tiles
    assert (chosen == torch.arange(8)).all()
    newest = torch.div(torch.arange(99 - rows + 1, 100), 4, rounding_mode="floor")
    assert all(set(b.tolist()) == {0, 1, int(n)} for b, n in zip(blocks, newest, strict=True))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16_385])
def test_candidate_blocks(length: int) -> None:
    """Case 24: the newest block pinned, no duplicates, unreachable -1, and selection stays inside the pool."""
    indexer = FakeIndexer(topk=8, block=8, keep_blocks=3)
    keys = torch.randn(length, DIM, generator=torch.Generator().manual_seed(3))
    found = query(indexer, keys, torch.tensor([length - 1]), random_query(1), True)
    _, blocks = found.from_all(True)
    kept = [b for b in blocks[0].tolist() if b >= 0]
    reachable = -(-length // 8)
    assert len(kept) == len(set(kept)) == min(3, reachable)
    assert (length - 1) // 8 in kept
    assert all(b < reachable for b in kept) and (blocks[0, len(kept) :] == -1).all()
    chosen = [g for g in found.from_pool(blocks)[0].tolist() if g >= 0]
    assert len(chosen) == min(8, sum(min(8, length - 8 * b) for b in kept))
    assert all(g // 8 in kept and g < length for g in chosen) and chosen == sorted(chosen)


def test_a_pool_smaller_than_topk_lets_nothing_leak() -> None:
    """SPEC 5: a position outside the pool is never selected, even when the pool holds fewer than top-k."""
    indexer = FakeIndexer(topk=8, block=4, keep_blocks=1)
    keys = torch.randn(40, DIM, generator=torch.Generator().manual_seed(4))
    found = query(indexer, keys, torch.tensor([37]), random_query(1), False)
    _, blocks = found.from_all(True)
    assert blocks.tolist() == [[9]]
    assert found.from_pool(blocks).tolist() == [[36, 37, -1, -1, -1, -1, -1, -1]]


@pytest.mark.parametrize("wide", [0, 2, 100])
@pytest.mark.parametrize("tile", [1, 3, 8, 20, 64])
def test_running_topk_does_not_depend_on_the_tiles(tile: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rorqual.model.indexer.WIDE", wide)
    indexer = FakeIndexer(topk=8, block=4, keep_blocks=3)
    run = query(indexer, torch.zeros(1, DIM), torch.tensor([0]), random_query(1), False).run
    scores = torch.randint(0, 9, (5, 64), generator=torch.Generator().manual_seed(5)).float()
    scores[0, 3:40], scores[1] = float("-inf"), float("-inf")
    best = Running(5, 8, run)
    for first in range(0, 64, tile):
        best.add(scores[:, first : first + tile], first)
    assert torch.equal(best.index(), run.ops.topk_lowest(scores, 8))


def test_margins() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.5, float("-inf")], [1.0, float("-inf"), float("-inf"), float("-inf")]])
    assert margin(scores, 2).tolist() == [1.5, float("inf")]
    assert margin(scores, 4).tolist() == [float("inf")] * 2
