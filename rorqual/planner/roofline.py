"""The least time of a decode step: bytes that must be read, products that must be made, against a device's rates.

One step makes one token of each of `batch` sequences, spread evenly over the attention groups. A rank reads

    weights   its share of every part of the backbone once; embedding rows, one a sequence; the head once; of E routed
              experts those that b tokens touch, E (1 - (1 - k/E)^b) if each token chooses k of them at random
    cache     for each of its sequences the windows, the Top-K entries of every layer, and the index keys scored
    Engram    the rows of its sequences, when the tables are on the device

and computes what `work.decode_flops` counts. The slower of the two is the bound. Left out: communication, launches,
sampling, drafts, and reads from host or disk. So a real step is slower; none of these figures is a promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.formats.spec import FORMATS
from rorqual.layout import KVLayout
from rorqual.planner.devices import Device, rate
from rorqual.planner.parallel import Ranks, rank_share
from rorqual.planner.placement import Placement, home, tensor_kinds
from rorqual.planner.storage import RowFormat, row_format
from rorqual.planner.work import (
    Precision,
    attention_flops,
    engram_read_bytes,
    index_flops,
    index_groups,
    selected_groups,
)

_NOT_EACH_STEP = ("embed", "experts", "engram_tables", "vision", "draft", "draft_experts")
_QUANTISED = ("F8_E4M3", "I8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One decode step on the busiest rank. Bytes and FLOPs exact or expected; seconds at the device's published rates.

    compute_s is None where the device publishes no rates; the bound is then memory for want of another.
    """

    batch: int
    context: int
    weight_bytes: Fraction
    cache_bytes: int
    engram_bytes: Fraction
    flops: Precision
    memory_s: float
    compute_s: float | None

    @property
    def bound(self) -> str:
        """What takes longer: "memory" or "compute"."""
        return "compute" if self.compute_s is not None and self.compute_s > self.memory_s else "memory"

    @property
    def seconds(self) -> float:
        """The larger of the two times."""
        return max(self.memory_s, self.compute_s or 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences of the replica together."""
        return self.batch / self.seconds


def experts_touched(experts: int, chosen: int, tokens: int) -> Fraction:
    """Distinct experts of a layer that `tokens` tokens touch, expected, each choosing `chosen` at random.

    >>> experts_touched(384, 6, 1), round(float(experts_touched(384, 6, 64)), 1)
    (Fraction(6, 1), 243.8)

    Unit: experts. Source: E (1 - (1 - k/E)^b). Trained routers are less even: fewer are touched.
    """
    if not experts:
        return Fraction(0)
    return experts * (1 - (1 - Fraction(min(chosen, experts), experts)) ** tokens)


def weight_read_bytes(config: ModelConfig, ranks: Ranks, batch: int) -> Fraction:
    """Bytes of weights that the busiest rank reads in a step of `batch` sequences, expected.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.parallel import arrange
    >>> release = presets.load("v4.1-flash")
    >>> int(weight_read_bytes(release, arrange(release), 1))
    13035085248

    Source: `placement.tensor_kinds`. For one sequence on one rank: 8,522,921,408 that every step reads, the head
    among them, 10,240 of an embedding row, and 6 / 384 of the experts' 288,777,830,400.
    """
    every_step = sum(
        rank_share(kind, ranks).nbytes for kind in tensor_kinds(config) if kind.spec.part not in _NOT_EACH_STEP
    )
    experts = sum(kind.nbytes for kind in tensor_kinds(config) if kind.spec.part == "experts")
    embedding = next(kind.spec for kind in tensor_kinds(config) if kind.spec.part == "embed")
    rows = _own(batch, ranks) * (embedding.nbytes // config.vocab_size)
    touched = experts_touched(config.n_routed_experts, config.num_experts_per_tok, batch)
    share = touched / config.n_routed_experts if config.n_routed_experts else Fraction(0)
    return every_step + rows + experts * share / ranks.count


def cache_read_bytes(layout: KVLayout, tokens: int, rows: RowFormat | None = None) -> int:
    """Bytes of main KV, windows and index keys that one sequence reads for a token, in the rows of a storage.

    >>> from rorqual.config import presets
    >>> cache_read_bytes(KVLayout(presets.load("v4.1-flash")), 2**20)
    191021056

    Source: `work.selected_groups` and `work.index_groups`; packed, 8,306,688 + 182,714,368.
    """
    rows = row_format(layout, "packed") if rows is None else rows
    config = layout.config
    selected = sum(selected_groups(config, role, tokens) for role in config.backbone_roles)
    window = config.num_hidden_layers * min(config.sliding_window, tokens) * rows.window
    return selected * rows.main + index_groups(config, tokens) * rows.index + window


def rank_flops(config: ModelConfig, ranks: Ranks, batch: int, tokens: int) -> Precision:
    """FLOPs of a step on the busiest rank. For one sequence on one rank it is `work.decode_flops`.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.parallel import arrange
    >>> from rorqual.planner.work import decode_flops
    >>> release = presets.load("v4.1-flash")
    >>> rank_flops(release, arrange(release), 1, 4096) == decode_flops(release, 4096)
    True

    Source: 2 x parameters of the rank's share x its sequences, attention over the group's ranks, index scores whole;
    routed experts 2 x k x parameters of one, evenly over all ranks.
    """
    own = _own(batch, ranks)
    index, index_bits = index_flops(config, tokens), FORMATS[config.cache.index_key].bits
    fp8 = bf16 = 0
    for kind in tensor_kinds(config):
        if kind.spec.part in _NOT_EACH_STEP:
            continue
        parameters = rank_share(kind, ranks).parameters
        # Wo_a is stored FP8 and used as bf16 (SPEC 3).
        if kind.spec.dtypes[0] in _QUANTISED and kind.spec.name != "wo_a.weight":
            fp8 += parameters
        else:
            bf16 += parameters
    experts = _expert_flops(config, batch, ranks)
    attention = -(-attention_flops(config, tokens) // ranks.tp)
    wide = config.weights.experts not in ("fp4", "fp8")
    return Precision(
        fp4=own * index if index_bits == 4 else 0,
        fp8=own * (2 * fp8 + (index if index_bits == 8 else 0)) + (0 if wide else experts),
        bf16=own * (2 * bf16 + attention + (index if index_bits > 8 else 0)) + (experts if wide else 0),
    )


def decode_step(
    layout: KVLayout,
    device: Device,
    batch: int,
    context: int,
    *,
    ranks: Ranks,
    placement: Placement | None = None,
    rows: RowFormat | None = None,
) -> Step:
    """The least time of one step of `batch` sequences of `context` tokens each.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.devices import DEVICES
    >>> from rorqual.planner.parallel import arrange
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> step = decode_step(layout, DEVICES["h200"], 64, 131_072, ranks=arrange(layout.config, 8))
    >>> step.bound, step.cache_bytes
    ('memory', 280363008)

    Unit: bytes, FLOPs, seconds. Source: the module's text, the device's data sheet. Raises InputError for a batch or
    context below 1, or a device whose memory bandwidth is not known.
    """
    if batch < 1 or context < 1:
        raise InputError(f"a step has a batch and a context of 1 or more; got {batch} and {context}")
    if device.bandwidth is None:
        raise InputError(
            f"--device {device.name} has no published bandwidth; give --bandwidth, such as 80GB (a second)"
        )
    config, placement = layout.config, placement or Placement()
    weights = weight_read_bytes(config, ranks, batch)
    cache = _own(batch, ranks) * cache_read_bytes(layout, context, rows)
    resident = home("engram_tables", placement) == "device"
    engram = Fraction(batch * engram_read_bytes(config), ranks.count) if resident else Fraction(0)
    flops = rank_flops(config, ranks, batch, context)
    return Step(
        batch=batch,
        context=context,
        weight_bytes=weights,
        cache_bytes=cache,
        engram_bytes=engram,
        flops=flops,
        memory_s=float((weights + cache + engram) / device.bandwidth),
        compute_s=_compute_seconds(device, flops),
    )


def decode_steps(
    layout: KVLayout,
    device: Device,
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    ranks: Ranks,
    placement: Placement | None = None,
    rows: RowFormat | None = None,
) -> tuple[Step, ...]:
    """Every context with every batch.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.devices import DEVICES
    >>> from rorqual.planner.parallel import arrange
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> steps = decode_steps(layout, DEVICES["b200"], (1, 8), (4096, 131_072), ranks=arrange(layout.config, 8))
    >>> [(step.context, step.batch) for step in steps]
    [(4096, 1), (4096, 8), (131072, 1), (131072, 8)]

    Unit and source: as `decode_step`.
    """
    return tuple(
        decode_step(layout, device, batch, context, ranks=ranks, placement=placement, rows=rows)
        for context in contexts
        for batch in batches
    )


def _own(batch: int, ranks: Ranks) -> int:
    """Sequences of the busiest group."""
    return -(-batch // ranks.dp_attention)


def _expert_flops(config: ModelConfig, batch: int, ranks: Ranks) -> int:
    if not config.n_routed_experts:
        return 0
    parameters = sum(kind.parameters for kind in tensor_kinds(config) if kind.spec.part == "experts")
    chosen = min(config.num_experts_per_tok, config.n_routed_experts)
    return -(-2 * batch * chosen * parameters // (config.n_routed_experts * ranks.count))


def _compute_seconds(device: Device, flops: Precision) -> float | None:
    seconds = 0.0
    for name, count in (("fp4", flops.fp4), ("fp8", flops.fp8), ("bf16", flops.bf16)):
        speed = rate(device, name)
        if speed is None:
            return None
        seconds += count / speed
    return seconds
