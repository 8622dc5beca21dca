"""Two processes: the same parameters in both, and those of one process on the whole batch."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch
from fake_training import FakeData, FakeLearner, recipe, trainer
from torch import nn

from rorqual.errors import InputError
from rorqual.training.distributed import Processes, _buckets, joined
from rorqual.training.metrics import METRICS, read_metrics
from rorqual.training.state import checkpoints, read
from rorqual.training.trainer import CHECKPOINTS


class LopsidedData(FakeData):
    """Rank 0 alone sees a 'z', so that rank 1 has no gradient for the last expert; the last step has one sequence."""

    def batch(self, step: int, rank: int, world: int):  # type: ignore[no-untyped-def]  # as the base's
        batch = super().batch(step, 0, 1)
        batch[0].ids[3] = ord("z")
        return (batch[:1] if step == 3 else batch)[rank::world]


def rank_main(rank: int, port: int, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    learner = FakeLearner(seed=rank)  # the first one's values are shared
    plan = recipe(steps=4)
    with joined() as processes:
        trainer(plan, out, learner, data=LopsidedData(plan), processes=processes).run()
    torch.save({name: value.detach() for name, value in learner.parameters.items()}, out / f"rank{rank}.pt")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_processes_are_one(tmp_path: Path) -> None:
    context, port, out = multiprocessing.get_context("fork"), free_port(), tmp_path / "two"
    out.mkdir()
    ranks = [context.Process(target=rank_main, args=(rank, port, out)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
    assert [process.exitcode for process in ranks] == [0, 0]
    first, second = (torch.load(out / f"rank{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)

    plan = recipe(steps=4)
    alone = FakeLearner(seed=0)
    trainer(plan, tmp_path / "one", alone, data=LopsidedData(plan)).run()
    for name, value in alone.parameters.items():
        torch.testing.assert_close(first[name], value.detach(), rtol=0, atol=1e-6)
    for one, two in zip(read_metrics(tmp_path / "one" / METRICS), read_metrics(out / METRICS), strict=True):
        assert one.keys() == two.keys()
        for key in ("step", "tokens", "loss", "total", "imbalance", "grad_norm", "bits_per_character", "eval_tokens"):
            assert abs(one.get(key, 0) - two.get(key, 0)) < 1e-5, key
    assert read(checkpoints(out / CHECKPOINTS)[-1]).processes == 2


def test_alone_nothing_is_sent() -> None:
    alone = Processes()
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    alone.sum_gradients([parameter])
    alone.share([parameter])
    alone.barrier()
    assert alone.gather(5) == [5]
    assert parameter.grad.tolist() == [2, 2, 2]


def test_buckets_hold_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rorqual.training.distributed.BUCKET_BYTES", 40)
    dtypes = (torch.float32,) * 4 + (torch.bfloat16,)
    parameters = [nn.Parameter(torch.zeros(size, dtype=d)) for size, d in zip((4, 5, 20, 3, 3), dtypes, strict=True)]
    buckets = list(_buckets(parameters))
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[4, 5], [20], [3], [3]]
    assert list(_buckets([])) == []


def test_a_group_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="WORLD_SIZE is 2, but there is no group"), joined():
        raise AssertionError("joined")
