"""`rorqual plan report`: all of it as one HTML page that needs no network. No torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rorqual.cli.plan import deployment as on
from rorqual.cli.plan import request as of
from rorqual.cli.plan.options import MODEL, Contexts, Model


def command(
    model: Model = MODEL,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
    date: Annotated[str, typer.Option(help="A date to print; without one the page has none.")] = "",
    context: Contexts = None,
    page: on.Page = None,
    device: on.DeviceName = "h200",
    count: on.Count = None,
    hosts: on.Hosts = 1,
    storage: on.Storage = "packed",
    tp: on.TensorParallel = None,
    dp_attention: on.Groups = None,
    ep: on.ExpertParallel = None,
    engram: on.Engram = "device",
    drafts: on.Drafts = True,
    vision: on.Vision = True,
    utilisation: on.Utilisation = 0.9,
    memory: on.Memory = None,
    bandwidth: on.Bandwidth = None,
    flops: on.Flops = None,
    prompt: of.Prompt = None,
    output: of.Output = None,
    rate: of.Rate = 1.0,
    prefill_rate: of.PrefillRate = 20_000.0,
    hit_rate: of.HitRate = 0.5,
    link: of.Link = "50GB/s",
    latency: of.Latency = 0.0,
    target_time: of.TargetTime = 0.1,
    disk: of.Disk = None,
    endurance: of.Endurance = None,
) -> None:
    """Write ledger, layer map, waterfall, capacity, traffic, numbers, techniques and glossary as one HTML page.

    The page is self-contained, and the same for the same options. A model that does not fit is reported, not refused.
    """
    given = locals()
    from rorqual.cli.inspect import read_config
    from rorqual.layout import PAGE_TOKENS, KVLayout
    from rorqual.planner.ledger import default_contexts
    from rorqual.planner.report import Subject, check_path, write
    from rorqual.planner.report import page as made

    check_path(out)
    config = read_config(model)
    layout = KVLayout(config, page_tokens=PAGE_TOKENS if page is None else page)
    mixes = tuple(on.read_mixes(config, context))
    subject = Subject(
        model=model,
        layout=layout,
        contexts=tuple(mix.longest for mix in mixes) if context else default_contexts(layout),
        deployment=on.read_deployment(config, on.DeploymentOptions.among(given)),
        mixes=mixes,
        case=of.read_case(config, of.RequestOptions.among(given)),
        date=date,
    )
    print(f"{out}: {write(made(subject), out):,} B")
