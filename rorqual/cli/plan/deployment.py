"""The options that put a model on devices, for the verbs that do: `capacity` and `report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rorqual.cli.plan.options import read_number
from rorqual.cli.plan.rates import parse_rate
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.config import ModelConfig
    from rorqual.planner.deployment import Deployment
    from rorqual.planner.devices import Device
    from rorqual.planner.mix import Mix

COUNT = 8
CONTEXTS = (4096, 32_768, 131_072, 1_048_576)
"""Shown when none are asked for, as far as the model has positions."""

DeviceName = Annotated[str, typer.Option("--device", help="A device of `rorqual plan capacity --devices`.")]
Count = Annotated[
    int | None, typer.Option(help="Devices of one replica; 8, or 1 where a model cannot be spread over 8.")
]
Hosts = Annotated[int, typer.Option(help="Hosts that share the devices.")]
Storage = Annotated[str, typer.Option(help="Cache rows: packed, fp8-uniform, v4-rows, bf16.")]
Page = Annotated[int | None, typer.Option("--page", "--page-tokens", help="Tokens a page.")]
TensorParallel = Annotated[int | None, typer.Option("--tp", help="Ranks that split the heads of a sequence.")]
Groups = Annotated[int | None, typer.Option("--dp-attention", help="Groups with sequences of their own.")]
ExpertParallel = Annotated[int | None, typer.Option("--ep", help="Shards of the routed experts.")]
Engram = Annotated[str, typer.Option(help="Where the tables live: device, host, disk, off.")]
Drafts = Annotated[bool, typer.Option("--drafts/--no-drafts", help="Load the draft layers.")]
Vision = Annotated[bool, typer.Option("--vision/--no-vision", help="Load the image tower.")]
Utilisation = Annotated[float, typer.Option(help="Share of the memory that may be used.")]
Chunk = Annotated[int | None, typer.Option(help="Tokens of the largest step.")]
SampledRows = Annotated[int | None, typer.Option(help="Rows that need logits at once.")]
Memory = Annotated[str | None, typer.Option(help="Bytes of a device, in place of the published: 64GiB.")]
Bandwidth = Annotated[str | None, typer.Option(help="What its memory moves, in place of the published: 80GB/s.")]
Flops = Annotated[float | None, typer.Option(help="Its dense BF16 FLOP/s, in place of the published: 2e12.")]
PoolHost = Annotated[str, typer.Option(help="Host memory of a KV pool, a host.")]
PoolDisk = Annotated[str, typer.Option(help="Disk of a KV pool, a host.")]
Split = Annotated[bool, typer.Option("--split", help="Prefill and decode on different devices.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentOptions:
    """The options above as they were typed. Their defaults live here; a verb that has not all of them takes those."""

    device: str = "h200"
    count: int | None = None
    hosts: int = 1
    storage: str = "packed"
    page: int | None = None
    tp: int | None = None
    dp_attention: int | None = None
    ep: int | None = None
    engram: str = "device"
    drafts: bool = True
    vision: bool = True
    utilisation: float = 0.9
    chunk: int | None = None
    sampled_rows: int | None = None
    memory: str | None = None
    bandwidth: str | None = None
    flops: float | None = None
    pool_host: str = "0"
    pool_disk: str = "0"
    split: bool = False

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> DeploymentOptions:
        """Those among a verb's parameters, which are named alike."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})


def read_deployment(config: ModelConfig, asked: DeploymentOptions) -> Deployment:
    """The deployment that was asked for. Raises InputError or ConfigError naming the option that cannot be honoured."""
    from rorqual.layout import PAGE_TOKENS
    from rorqual.planner.deployment import deploy
    from rorqual.planner.placement import Placement
    from rorqual.planner.units import parse_bytes
    from rorqual.planner.workspace import CHUNK_TOKENS, SAMPLED_ROWS

    return deploy(
        config,
        read_device(asked),
        count=default_count(config, asked) if asked.count is None else asked.count,
        tp=asked.tp,
        dp_attention=asked.dp_attention,
        ep=asked.ep,
        placement=Placement(engram=asked.engram, drafts=asked.drafts, vision=asked.vision),
        storage=asked.storage,
        page_tokens=PAGE_TOKENS if asked.page is None else asked.page,
        utilisation=read_number("--utilisation", asked.utilisation),
        chunk_tokens=CHUNK_TOKENS if asked.chunk is None else asked.chunk,
        sampled_rows=SAMPLED_ROWS if asked.sampled_rows is None else asked.sampled_rows,
        hosts=asked.hosts,
        pool_host=parse_bytes(asked.pool_host, "--pool-host"),
        pool_disk=parse_bytes(asked.pool_disk, "--pool-disk"),
        split=asked.split,
    )


def read_device(asked: DeploymentOptions) -> Device:
    """The device, with the user's own figures in place of the published ones."""
    from rorqual.planner.devices import find_device
    from rorqual.planner.units import parse_bytes

    return find_device(
        asked.device,
        memory=None if asked.memory is None else parse_bytes(asked.memory, "--memory"),
        bandwidth=None if asked.bandwidth is None else int(parse_rate(asked.bandwidth, "--bandwidth")),
        bf16=None if asked.flops is None else int(read_number("--flops", asked.flops)),
    )


def default_count(config: ModelConfig, asked: DeploymentOptions) -> int:
    """Devices where none are asked for. Only a model too small for eight changes it; another option never does."""
    from rorqual.planner.parallel import arrange

    if (asked.tp, asked.dp_attention, asked.ep) != (None, None, None):
        return COUNT
    try:
        return arrange(config, COUNT).count
    except InputError:
        return 1


def read_mixes(config: ModelConfig, contexts: Sequence[str] | None, mix: str | None = None) -> list[Mix]:
    """The contexts to plan for: several apart, or one mix of them. InputError when both are given."""
    from rorqual.planner.mix import one_context, parse_mix
    from rorqual.planner.units import parse_token_list

    if contexts and mix is not None:
        raise InputError("--context and --mix exclude each other; give one of them")
    if mix is not None:
        return [parse_mix(mix)]
    if contexts:
        return [one_context(tokens) for tokens in parse_token_list(contexts, "--context")]
    positions = config.max_position_embeddings
    return [one_context(tokens) for tokens in CONTEXTS if tokens <= positions] or [one_context(positions)]
