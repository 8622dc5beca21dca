"""`rorqual plan capacity`: what devices hold of a model, and how many sessions. No torch in here."""

from __future__ import annotations

from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.config import ModelConfig
    from rorqual.planner.capacity import MemoryPlan
    from rorqual.planner.deployment import Deployment
    from rorqual.planner.mix import Mix
    from rorqual.planner.table import Table

CONTEXTS = (4096, 32_768, 131_072, 1_048_576)
"""Shown when none are asked for, as far as the model has positions."""


def command(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A preset, a config.json or a folder.")
    ] = "v4.1-flash",
    device: Annotated[str, typer.Option(help="A device of --devices.")] = "h200",
    count: Annotated[int, typer.Option(help="Devices of one replica.")] = 8,
    hosts: Annotated[int, typer.Option(help="Hosts that share the devices.")] = 1,
    context: Annotated[str | None, typer.Option(help="Tokens a session, or several: 4Ki,128Ki,1Mi.")] = None,
    mix: Annotated[str | None, typer.Option(help="Contexts with shares: 4Ki:70,128Ki:25,1Mi:5.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Sessions of the replica that must fit.")] = None,
    storage: Annotated[str, typer.Option(help="Cache rows: packed, fp8-uniform, v4-rows, bf16.")] = "packed",
    page: Annotated[int | None, typer.Option(help="Tokens a page.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that split the heads of a sequence.")] = None,
    dp_attention: Annotated[int | None, typer.Option(help="Groups with sequences of their own.")] = None,
    ep: Annotated[int | None, typer.Option(help="Shards of the routed experts.")] = None,
    engram: Annotated[str, typer.Option(help="Where the tables live: device, host, disk, off.")] = "device",
    drafts: Annotated[bool, typer.Option("--drafts/--no-drafts", help="Load the draft layers.")] = True,
    vision: Annotated[bool, typer.Option("--vision/--no-vision", help="Load the image tower.")] = True,
    utilisation: Annotated[float, typer.Option(help="Share of the memory that may be used.")] = 0.9,
    chunk: Annotated[int | None, typer.Option(help="Tokens of the largest step.")] = None,
    sampled_rows: Annotated[int | None, typer.Option(help="Rows that need logits at once.")] = None,
    memory: Annotated[str | None, typer.Option(help="Bytes of a device, in place of the published: 64GiB.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Its bytes a second: 80GB/s.")] = None,
    flops: Annotated[float | None, typer.Option(help="Its dense BF16 FLOP/s: 2e12.")] = None,
    pool_host: Annotated[str, typer.Option(help="Host memory of a KV pool, a host.")] = "0",
    pool_disk: Annotated[str, typer.Option(help="Disk of a KV pool, a host.")] = "0",
    split: Annotated[bool, typer.Option("--split", help="Prefill and decode on different devices.")] = False,
    check: Annotated[Path | None, typer.Option(help="Compare with the figures in an engine's log.")] = None,
    devices: Annotated[bool, typer.Option("--devices", help="Show the device table and nothing else.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the tables as CSV.")] = False,
) -> None:
    """Show weights, a rank's memory, sessions at contexts, page waste, what lies beside, and a decode-step roofline.

    Refuses what cannot fit, and says by how much. With --check, exits with 1 when a log does not agree with the plan.
    """
    from rorqual.cli.inspect import read_config
    from rorqual.cli.plan.printing import emit
    from rorqual.layout import PAGE_TOKENS
    from rorqual.planner.deployment import deploy
    from rorqual.planner.devices import device_table, find_device
    from rorqual.planner.placement import Placement
    from rorqual.planner.units import parse_bytes
    from rorqual.planner.workspace import CHUNK_TOKENS, SAMPLED_ROWS

    if devices:
        emit([device_table()], as_json=as_json, as_csv=as_csv)
        return
    config = read_config(model)
    deployment = deploy(
        config,
        find_device(
            device,
            memory=None if memory is None else parse_bytes(memory, "--memory"),
            bandwidth=None if bandwidth is None else parse_bytes(bandwidth.removesuffix("/s"), "--bandwidth"),
            bf16=None if flops is None else int(_finite("--flops", flops)),
        ),
        count=count,
        tp=tp,
        dp_attention=dp_attention,
        ep=ep,
        placement=Placement(engram=engram, drafts=drafts, vision=vision),
        storage=storage,
        page_tokens=PAGE_TOKENS if page is None else page,
        utilisation=_finite("--utilisation", utilisation),
        chunk_tokens=CHUNK_TOKENS if chunk is None else chunk,
        sampled_rows=SAMPLED_ROWS if sampled_rows is None else sampled_rows,
        hosts=hosts,
        pool_host=parse_bytes(pool_host, "--pool-host"),
        pool_disk=parse_bytes(pool_disk, "--pool-disk"),
        split=split,
    )
    mixes = read_mixes(config, context, mix)
    tables, cut = plan_tables(deployment, mixes, sessions, asked=context is not None)
    if check is None:
        emit(tables, as_json=as_json, as_csv=as_csv)
        return
    table, agrees = check_tables(deployment, cut, check)
    emit([table], as_json=as_json, as_csv=as_csv)
    if not agrees:
        raise typer.Exit(1)


def read_mixes(config: ModelConfig, context: str | None, mix: str | None) -> list[Mix]:
    """The contexts to plan for: several apart, or one mix of them. InputError when both are given."""
    from rorqual.planner.mix import one_context, parse_mix
    from rorqual.planner.units import parse_tokens

    if context is not None and mix is not None:
        raise InputError("--context and --mix exclude each other; give one of them")
    if mix is not None:
        return [parse_mix(mix)]
    if context is not None:
        return [one_context(parse_tokens(item, "--context")) for item in context.split(",")]
    positions = config.max_position_embeddings
    return [one_context(tokens) for tokens in CONTEXTS if tokens <= positions] or [one_context(positions)]


def plan_tables(
    deployment: Deployment, mixes: list[Mix], sessions: int | None, asked: bool
) -> tuple[list[Table], MemoryPlan]:
    """All tables, and the memory plan for the first mix. asked: the contexts are the user's, so each must fit."""
    from rorqual.planner import capacity_tables as tables
    from rorqual.planner.deployment import plan

    if asked:
        tables.must_fit(deployment, mixes)
    first = mixes[0]
    cut = plan(deployment, first, sessions)
    shown = [
        tables.weights_table(deployment),
        tables.memory_table(deployment, cut, first),
        tables.outside_table(deployment),
        tables.sessions_table(deployment, mixes),
        tables.storage_table(deployment, first),
        tables.padding_table(deployment, first),
    ]
    if deployment.device.has_bandwidth:
        contexts = sorted({tokens for one in mixes for tokens, _ in one.parts})
        shown.append(tables.roofline_table(deployment, contexts))
    return shown, cut


def check_tables(deployment: Deployment, cut: MemoryPlan, path: Path) -> tuple[Table, bool]:
    """A log's figures beside the plan, and whether they agree."""
    from rorqual.planner.capacity_tables import check_table
    from rorqual.planner.check_log import check_log
    from rorqual.planner.engine_log import read_log

    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            log = read_log(lines)
    except OSError as error:
        raise InputError(f"--check {path}: {error.strerror}") from None
    found = check_log(deployment.layout, deployment.rows, log, cut.budget - cut.weights - cut.workspace)
    return check_table(log, found, deployment, cut), found.agrees


def _finite(name: str, value: float) -> Fraction:
    """A number as it was typed: 0.9 is nine tenths."""
    if not isfinite(value):
        raise InputError(f"{name} must be a finite number; got {value}")
    return Fraction(str(value))
