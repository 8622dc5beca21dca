"""`rorqual plan report`: all of it as one HTML page that needs no network. No torch in here."""

from __future__ import annotations

from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.config import ModelConfig

COUNT = 8
PROMPT = 32_768


def command(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A preset, a config.json or a folder.")
    ] = "v4.1-flash",
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
    date: Annotated[str, typer.Option(help="A date to print; without one the page has none.")] = "",
    context: Annotated[list[str] | None, typer.Option(help="Tokens of a session, or several: 4Ki,128Ki,1Mi.")] = None,
    page: Annotated[int | None, typer.Option(help="Tokens a page.")] = None,
    device: Annotated[str, typer.Option(help="A device of `rorqual plan capacity --devices`.")] = "h200",
    count: Annotated[
        int | None, typer.Option(help="Devices of one replica; 8, or 1 where a model cannot be spread over 8.")
    ] = None,
    hosts: Annotated[int, typer.Option(help="Hosts that share the devices.")] = 1,
    storage: Annotated[str, typer.Option(help="Cache rows: packed, fp8-uniform, v4-rows, bf16.")] = "packed",
    tp: Annotated[int | None, typer.Option(help="Ranks that split the heads of a sequence.")] = None,
    dp_attention: Annotated[int | None, typer.Option(help="Groups with sequences of their own.")] = None,
    ep: Annotated[int | None, typer.Option(help="Shards of the routed experts.")] = None,
    engram: Annotated[str, typer.Option(help="Where the tables live: device, host, disk, off.")] = "device",
    drafts: Annotated[bool, typer.Option("--drafts/--no-drafts", help="Load the draft layers.")] = True,
    vision: Annotated[bool, typer.Option("--vision/--no-vision", help="Load the image tower.")] = True,
    utilisation: Annotated[float, typer.Option(help="Share of the memory that may be used.")] = 0.9,
    memory: Annotated[str | None, typer.Option(help="Bytes of a device, in place of the published: 64GiB.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Its bytes a second: 80GB/s.")] = None,
    flops: Annotated[float | None, typer.Option(help="Its dense BF16 FLOP/s: 2e12.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Tokens of a prompt; 32Ki, or all that the model takes.")] = None,
    output: Annotated[str, typer.Option(help="Tokens of an answer.")] = "1Ki",
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 1.0,
    prefill_rate: Annotated[float, typer.Option(help="Tokens a second that a prefill node computes.")] = 20_000.0,
    hit_rate: Annotated[float, typer.Option(help="Share of the prompt that the pool holds, 0..1.")] = 0.5,
    link: Annotated[str, typer.Option(help="Link between nodes and to the pool: 50GB/s, 400Gbit/s.")] = "50GB/s",
    latency: Annotated[float, typer.Option(help="Seconds before the first byte of a transfer arrives.")] = 0.0,
    target_time: Annotated[float, typer.Option(help="Seconds that a hand-over may take.")] = 0.1,
    disk: Annotated[str | None, typer.Option(help="Capacity of the pool's disks together: 30.72TB.")] = None,
    endurance: Annotated[str | None, typer.Option(help="What they may be written (TBW), together: 14PB.")] = None,
) -> None:
    """Write ledger, layer map, waterfall, capacity, traffic, numbers, techniques and glossary as one HTML page.

    The page is self-contained, and the same for the same options. A model that does not fit is reported, not refused.
    """
    from rorqual.cli.inspect import read_config
    from rorqual.cli.plan.capacity import read_mixes
    from rorqual.cli.plan.traffic import parse_rate
    from rorqual.layout import PAGE_TOKENS, KVLayout
    from rorqual.planner.deployment import deploy
    from rorqual.planner.devices import find_device
    from rorqual.planner.ledger import default_contexts
    from rorqual.planner.placement import Placement
    from rorqual.planner.report import Subject, check_path, write
    from rorqual.planner.report import page as made
    from rorqual.planner.traffic_tables import TrafficCase
    from rorqual.planner.units import parse_bytes, parse_tokens

    if endurance is not None and disk is None:
        raise InputError("--endurance needs --disk, the capacity that it belongs to")
    check_path(out)
    config = read_config(model)
    layout = KVLayout(config, page_tokens=PAGE_TOKENS if page is None else page)
    asked = ",".join(context) if context else None
    mixes = read_mixes(config, asked, None)
    deployment = deploy(
        config,
        find_device(
            device,
            memory=None if memory is None else parse_bytes(memory, "--memory"),
            bandwidth=None if bandwidth is None else parse_bytes(bandwidth.removesuffix("/s"), "--bandwidth"),
            bf16=None if flops is None else int(_exact("--flops", flops)),
        ),
        count=_count(config, tp, dp_attention, ep) if count is None else count,
        tp=tp,
        dp_attention=dp_attention,
        ep=ep,
        placement=Placement(engram=engram, drafts=drafts, vision=vision),
        storage=storage,
        page_tokens=layout.page_tokens,
        utilisation=_exact("--utilisation", utilisation),
        hosts=hosts,
    )
    case = TrafficCase(
        prompt=min(PROMPT, config.max_position_embeddings) if prompt is None else _tokens("--prompt", prompt),
        output=parse_tokens(output, "--output"),
        rate=_exact("--rate", rate),
        prefill_rate=_exact("--prefill-rate", prefill_rate),
        hit_rate=_exact("--hit-rate", hit_rate),
        link=parse_rate(link, "--link"),
        latency_s=_exact("--latency", latency),
        target_s=_exact("--target-time", target_time),
        disk=None if disk is None else parse_bytes(disk, "--disk"),
        endurance=None if endurance is None else parse_bytes(endurance, "--endurance"),
    )
    contexts = tuple(mix.longest for mix in mixes) if asked else default_contexts(layout)
    subject = Subject(
        model=model,
        layout=layout,
        contexts=contexts,
        deployment=deployment,
        mixes=tuple(mixes),
        case=case,
        date=date,
    )
    print(f"{out}: {write(made(subject), out):,} B")


def _count(config: ModelConfig, tp: int | None, dp_attention: int | None, ep: int | None) -> int:
    """Devices where none are asked for. Only a model too small for eight changes it; an option never does."""
    from rorqual.planner.parallel import arrange

    if (tp, dp_attention, ep) != (None, None, None):
        return COUNT
    try:
        return arrange(config, COUNT).count
    except InputError:
        return 1


def _tokens(name: str, given: str) -> int:
    from rorqual.planner.units import parse_tokens

    tokens = parse_tokens(given, name)
    if not tokens:
        raise InputError(f"{name} must be 1 token or more")
    return tokens


def _exact(name: str, value: float) -> Fraction:
    """A number as it was typed: 0.9 is nine tenths."""
    if not isfinite(value):
        raise InputError(f"{name} must be a finite number; got {value}")
    return Fraction(str(value))
