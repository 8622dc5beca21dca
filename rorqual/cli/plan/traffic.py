"""`rorqual plan traffic`: what a prefill/decode split and a pool of pages put on the wire. No torch in here."""

from __future__ import annotations

from typing import Annotated

import typer

from rorqual.cli.plan import request as of
from rorqual.cli.plan.options import MODEL, AsCsv, AsJson, Model, PageTokens
from rorqual.cli.plan.printing import check_output, emit
from rorqual.errors import InputError


def command(
    model: Model = MODEL,
    prompt: of.Prompt = None,
    output: of.Output = None,
    rate: of.Rate = 1.0,
    prefill_rate: of.PrefillRate = 20_000.0,
    hit_rate: of.HitRate = 0.5,
    link: of.Link = "50GB/s",
    latency: of.Latency = 0.0,
    target_time: of.TargetTime = 0.1,
    handover: Annotated[str, typer.Option(help="all, replay, streams or rings.")] = "all",
    disk: of.Disk = None,
    endurance: of.Endurance = None,
    page_tokens: PageTokens = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Show bytes of each hand-over, rates on links, pool traffic, break-even of fetching, and wear of disks.

    Rates and times are examples until you give yours.
    """
    asked = of.RequestOptions.among(locals())
    from rorqual.cli.inspect import read_config
    from rorqual.layout import KVLayout
    from rorqual.planner.traffic import HANDOVERS
    from rorqual.planner.traffic_tables import traffic_tables

    check_output(as_json, as_csv)
    if handover != "all" and handover not in HANDOVERS:
        raise InputError(f"--handover must be one of all, {', '.join(HANDOVERS)}; got {handover!r}")
    config = read_config(model)
    case = of.read_case(config, asked)
    layout = KVLayout(config) if page_tokens is None else KVLayout(config, page_tokens=page_tokens)
    emit(traffic_tables(layout, case, HANDOVERS if handover == "all" else (handover,)), as_json=as_json, as_csv=as_csv)
