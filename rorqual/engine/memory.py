"""What an engine allocates, by the planner's plan, before it takes its first request.

    budget = weights + workspace + slots x slot bytes + pages x page bytes + less than a page

Weights are the checkpoint's bytes. The workspace is the planner's estimate for the largest step, doubled where
activations are fp32. What is left after slots becomes pages; no request is admitted that they do not hold.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rorqual.engine import backlog
from rorqual.errors import CapacityError, InputError
from rorqual.inventory.names import expected_tensors
from rorqual.layout import KVLayout
from rorqual.model.transformer import Transformer, of_encoder
from rorqual.planner.capacity import MemoryPlan, plan_memory
from rorqual.planner.placement import weight_bytes
from rorqual.planner.units import decimal_bytes, parse_bytes
from rorqual.planner.workspace import workspace_bytes

DEFAULT_SHARE = 0.25
"""Of what is free: the most that pages take when nobody says how much."""


def free_bytes(device: torch.device) -> int:
    """Memory that a device has left: what the operating system calls available, on a GPU what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise CapacityError("memory: what is free is not known on this system; give an amount in bytes")


def asked_bytes(memory: int | float | str, base: int, free: int) -> int:
    """The budget that a user's words mean, in bytes.

    memory: bytes in all, weights included (`2GiB`, 2147483648), or a share of what is free beside them (`50%`, 0.5).
    base: bytes of the weights. free: beside them.

    >>> asked_bytes("1KiB", 100, 1000), asked_bytes("50%", 100, 1000), asked_bytes(0.5, 100, 1000)
    (1024, 600, 600)

    Raises:
        InputError: neither.
    """
    text = memory.strip() if isinstance(memory, str) else ""
    if text.endswith("%"):
        try:
            memory = float(text[:-1]) / 100
        except ValueError:
            raise InputError(f"memory: {text!r} is no share; legal: such as 50%") from None
        if not 0 < memory <= 1:
            raise InputError(f"memory: {text} is not legal; legal: a share of what is free, above 0%, at most 100%")
    if isinstance(memory, float) and 0 < memory <= 1:
        return base + int(free * memory)
    return parse_bytes(str(memory), "memory")


def loaded_bytes(model: Transformer) -> int:
    """Bytes of the weights that a model has: of the whole checkpoint, or of its encoder."""
    if model.has_decoder:
        return sum(weight_bytes(model.config).values())
    specs = expected_tensors(model.config).values()
    return sum(spec.nbytes for spec in specs if of_encoder(model.config, spec.name))


def plan_engine(
    model: Transformer,
    *,
    memory: int | float | str | None,
    slots: int,
    chunk_tokens: int,
    step_tokens: int,
    pages: int | None = None,
) -> MemoryPlan:
    """The plan of an engine.

    Args:
        model: loaded.
        memory: as of `asked_bytes`. None gives every slot the model's positions, or a quarter of what is free if that
            is less.
        slots: sequences that run at once.
        chunk_tokens: rows of a long chunk.
        step_tokens: rows beside it.
        pages: exactly so many, whatever is free; not together with `memory`.

    Raises:
        CapacityError: what does not fit, and by how much.
        InputError: an unreadable amount.
    """
    layout, weights = model.layout, loaded_bytes(model)
    rows = chunk_tokens + step_tokens
    wide = 1 if model.numerics.act_dtype == torch.bfloat16 else 2
    workspace = wide * workspace_bytes(model.config, rows, sampled_rows=step_tokens)
    if pages is not None and memory is not None:
        raise InputError("pages: not together with memory; give one of the two")
    workspace += slots * backlog_bytes(model)
    fixed = weights + workspace + slots * layout.sequence_bytes_allocated
    if pages is not None:
        budget = fixed + pages * layout.page_bytes
    elif memory is not None:
        budget = asked_bytes(memory, weights, free_bytes(model.device))
    else:
        budget = fixed + _default_pages(layout, slots, free_bytes(model.device)) * layout.page_bytes
    return plan_memory(layout, budget=budget, weights=weights, workspace=workspace, sessions=slots)


def backlog_bytes(model: Transformer) -> int:
    """What the rows of a slot that wait for its draft windows come to (`rorqual.engine.backlog`)."""
    config, width = model.config, model.numerics.act_dtype.itemsize
    return backlog.ROWS * len(config.dspark_target_layer_ids) * config.hidden_size * width


def spelled(plan: MemoryPlan) -> str:
    """The plan in one line.

    >>> spelled(MemoryPlan(budget=1000, weights=500, workspace=100, slots=2, slot_bytes=50, pages=5, page_bytes=48,
    ...                    page_tokens=128))
    '940 B: weights 500 B, workspace 100 B, 2 slots x 50 B, 5 pages x 48 B for 640 tokens'
    """
    slots, pages = (f"{n:,} {name}{'s' if n > 1 else ''}" for n, name in ((plan.slots, "slot"), (plan.pages, "page")))
    return (
        f"{decimal_bytes(plan.total)}: weights {decimal_bytes(plan.weights)}, workspace "
        f"{decimal_bytes(plan.workspace)}, {slots} x {decimal_bytes(plan.slot_bytes)}, {pages} "
        f"x {decimal_bytes(plan.page_bytes)} for {plan.pool_tokens:,} tokens"
    )


def _default_pages(layout: KVLayout, slots: int, free: int) -> int:
    wanted = slots * layout.pages(layout.config.max_position_embeddings)
    return max(1, min(wanted, int(free * DEFAULT_SHARE) // max(1, layout.page_bytes)))
