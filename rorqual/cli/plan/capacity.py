"""`rorqual plan capacity`: what devices hold of a model, and how many sessions. No torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.cli.plan import deployment as on
from rorqual.cli.plan.options import MODEL, AsCsv, AsJson, Contexts, Model
from rorqual.cli.plan.printing import check_output, emit
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.planner.capacity import MemoryPlan
    from rorqual.planner.deployment import Deployment
    from rorqual.planner.mix import Mix
    from rorqual.planner.table import Table


def command(
    model: Model = MODEL,
    device: on.DeviceName = "h200",
    count: on.Count = None,
    hosts: on.Hosts = 1,
    context: Contexts = None,
    mix: Annotated[str | None, typer.Option(help="Contexts with shares: 4Ki:70,128Ki:25,1Mi:5.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Sessions of the replica that must fit.")] = None,
    storage: on.Storage = "packed",
    page: on.Page = None,
    tp: on.TensorParallel = None,
    dp_attention: on.Groups = None,
    ep: on.ExpertParallel = None,
    engram: on.Engram = "device",
    drafts: on.Drafts = True,
    vision: on.Vision = True,
    utilisation: on.Utilisation = 0.9,
    chunk: on.Chunk = None,
    sampled_rows: on.SampledRows = None,
    memory: on.Memory = None,
    bandwidth: on.Bandwidth = None,
    flops: on.Flops = None,
    pool_host: on.PoolHost = "0",
    pool_disk: on.PoolDisk = "0",
    split: on.Split = False,
    check: Annotated[Path | None, typer.Option(help="Compare with the figures in an engine's log.")] = None,
    devices: Annotated[bool, typer.Option("--devices", help="Show the device table and nothing else.")] = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Show weights, a rank's memory, sessions at contexts, page waste, what lies beside, and a decode-step roofline.

    Refuses what cannot fit, and says by how much. With --check, exits with 1 when a log does not agree with the plan.
    """
    asked = on.DeploymentOptions.among(locals())
    from rorqual.cli.inspect import read_config
    from rorqual.planner.devices import device_table

    check_output(as_json, as_csv)
    if devices:
        emit([device_table()], as_json=as_json, as_csv=as_csv)
        return
    config = read_config(model)
    deployment = on.read_deployment(config, asked)
    mixes = on.read_mixes(config, context, mix)
    tables, cut = plan_tables(deployment, mixes, sessions, asked=bool(context))
    if check is None:
        emit(tables, as_json=as_json, as_csv=as_csv)
        return
    table, agrees = check_tables(deployment, cut, check)
    emit([table], as_json=as_json, as_csv=as_csv)
    if not agrees:
        raise typer.Exit(1)


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
