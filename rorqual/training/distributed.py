"""Data parallelism: several processes, each with its share of every step's batch, all with the same parameters.

Losses arrive divided by the totals of the whole step, so gradients are summed, not averaged. The sums are taken once a
step, after the last micro-batch: dense gradients in flat buckets, the sparse ones of Engram's tables as rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rorqual.errors import InputError, RorqualError

BUCKET_BYTES = 1 << 25
"""Dense gradients travel in buckets of about this size: few messages, little extra memory."""

PATIENCE = timedelta(hours=12)
"""What processes wait for each other: the first may read and tokenise a large corpus alone. One that dies is noticed at
once all the same, by its closed connection."""

_NONE, _DENSE, _SPARSE = 0, 1, 2

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """This process among those that train together; without `torchrun` it is alone and nothing is sent."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def gather(self, item: Item) -> list[Item]:
        """Everybody's item in order of rank, the same list everywhere. Small plain objects only."""
        if self.world == 1:
            return [item]
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item)
        return items

    def first_does(self, work: Callable[[], Item]) -> Item | None:
        """Run `work` in the first process only; None in the others.

        Raises:
            RorqualError: in every process what `work` raised in the first one, so that nobody waits for it.
        """
        result, error = None, None
        if self.first:
            try:
                result = work()
            except RorqualError as refused:
                error = refused
        if error := self.gather(error)[0]:
            raise error
        return result

    def barrier(self) -> None:
        """Wait until all are here."""
        if self.world > 1:
            dist.barrier()

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Give every process the first one's values."""
        if self.world > 1:
            for parameter in parameters:
                dist.broadcast(parameter.data, 0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over the processes, in place; afterwards every process holds the same bits.

        Where one process has no gradient it adds zero; where none has, there is still none: an optimiser must be able
        to tell an expert that nobody was routed to from one whose gradient is zero.
        """
        if self.world == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        kinds = torch.tensor([_kind(parameter) for parameter in trained], device=_device(trained))
        dist.all_reduce(kinds, dist.ReduceOp.MAX)
        stated = list(zip(trained, kinds.tolist(), strict=True))
        for bucket in _buckets([parameter for parameter, kind in stated if kind == _DENSE]):
            _sum_dense(bucket)
        for parameter in (parameter for parameter, kind in stated if kind == _SPARSE):
            parameter.grad = _sum_sparse(parameter, self.world)


@contextmanager
def joined(device: str = "cpu") -> Iterator[Processes]:
    """Among the processes that `torchrun` started, or alone; the group is left at the end.

    Raises:
        InputError: the environment names a group that cannot be joined.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes()
        return
    try:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"WORLD_SIZE is {world}, but there is no group to join ({error}); use torchrun") from None
    try:
        yield Processes(rank=dist.get_rank(), world=dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _kind(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return _NONE
    return _SPARSE if parameter.grad.is_sparse else _DENSE


def _device(parameters: Sequence[nn.Parameter]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """In order, one dtype a bucket, at least one parameter each."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size + parameter.nbytes > BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket


def _sum_dense(bucket: Sequence[nn.Parameter]) -> None:
    parts = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in bucket]
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    sums = flat.split([parameter.numel() for parameter in bucket])
    for parameter, total in zip(bucket, sums, strict=True):
        # A copy, not a view: gradients are freed one by one.
        parameter.grad = total.view_as(parameter).clone()


def _sum_sparse(parameter: nn.Parameter, world: int) -> Tensor:
    """Rows of all processes, joined in order of rank: the sum is then taken in the same order everywhere."""
    grad = parameter.grad
    if grad is None:
        device = parameter.device
        rows = torch.zeros(0, dtype=torch.int64, device=device)
        values = torch.zeros(0, *parameter.shape[1:], dtype=parameter.dtype, device=device)
    else:
        grad = grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
    rows, values = rows.to(parameter.device), values.to(parameter.device)
    counts = [torch.zeros(1, dtype=torch.int64, device=parameter.device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([rows.shape[0]], device=parameter.device))
    lengths = [int(count) for count in counts]
    rows_of_all = _gather_rows(rows, lengths)
    values_of_all = _gather_rows(values, lengths)
    joined = torch.sparse_coo_tensor(rows_of_all[None], values_of_all, parameter.shape, check_invariants=False)
    return joined.coalesce()


def _gather_rows(mine: Tensor, lengths: Sequence[int]) -> Tensor:
    """Concatenation of everybody's rows; each is padded to the longest for the journey."""
    padded = mine.new_zeros(max(lengths), *mine.shape[1:])
    padded[: mine.shape[0]] = mine
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded)
    return torch.cat([part[:length] for part, length in zip(found, lengths, strict=True)])
