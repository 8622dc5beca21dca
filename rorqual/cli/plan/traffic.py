"""`rorqual plan traffic`: what a prefill/decode split and a pool of pages put on the wire. No torch in here."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated

import typer

from rorqual.errors import InputError

BITS = {"kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12}


def command(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A preset, a config.json or a folder.")
    ] = "v4.1-flash",
    prompt: Annotated[str, typer.Option(help="Tokens of a prompt: 4096, 32Ki, 1M.")] = "32Ki",
    output: Annotated[str, typer.Option(help="Tokens of an answer.")] = "1Ki",
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 1.0,
    prefill_rate: Annotated[float, typer.Option(help="Tokens a second that a prefill node computes.")] = 20_000.0,
    hit_rate: Annotated[float, typer.Option(help="Share of the prompt that the pool holds, 0..1.")] = 0.5,
    link: Annotated[str, typer.Option(help="Link between nodes and to the pool: 50GB/s, 400Gbit/s.")] = "50GB/s",
    latency: Annotated[float, typer.Option(help="Seconds before the first byte of a transfer arrives.")] = 0.0,
    target_time: Annotated[float, typer.Option(help="Seconds that a hand-over may take.")] = 0.1,
    handover: Annotated[str, typer.Option(help="all, replay, streams or rings.")] = "all",
    disk: Annotated[str | None, typer.Option(help="Capacity of the pool's disks together: 30.72TB.")] = None,
    endurance: Annotated[str | None, typer.Option(help="What they may be written (TBW), together: 14PB.")] = None,
    page_tokens: Annotated[int | None, typer.Option(help="Tokens a page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the tables as CSV.")] = False,
) -> None:
    """Show bytes of each hand-over, rates on links, pool traffic, break-even of fetching, and wear of disks.

    Rates and times are examples until you give yours.
    """
    from rorqual.cli.inspect import read_config
    from rorqual.cli.plan.printing import emit
    from rorqual.layout import KVLayout
    from rorqual.planner.traffic import HANDOVERS
    from rorqual.planner.traffic_tables import TrafficCase, traffic_tables
    from rorqual.planner.units import parse_bytes, parse_tokens

    if handover != "all" and handover not in HANDOVERS:
        raise InputError(f"--handover must be one of all, {', '.join(HANDOVERS)}; got {handover!r}")
    if endurance is not None and disk is None:
        raise InputError("--endurance needs --disk, the capacity that it belongs to")
    case = TrafficCase(
        prompt=_above_zero("--prompt", parse_tokens(prompt, "--prompt")),
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
    config = read_config(model)
    layout = KVLayout(config) if page_tokens is None else KVLayout(config, page_tokens=page_tokens)
    emit(traffic_tables(layout, case, HANDOVERS if handover == "all" else (handover,)), as_json=as_json, as_csv=as_csv)


def parse_rate(text: str, name: str) -> Fraction:
    """Bytes a second from "50GB/s" or "400Gbit/s". A unit must be given: a bare 50 would be read in two ways.

    Raises:
        InputError: no number above 0, no unit or an unknown one.

    >>> parse_rate("400Gbit/s", "--link") == parse_rate("50 GB/s", "--link") == 50 * 10**9
    True
    """
    from rorqual.planner.units import parse_bytes

    stripped = text.strip()
    unit = stripped.lstrip("0123456789.+-eE_ ")
    try:
        if unit in BITS:
            value = Fraction(stripped.removesuffix(unit).strip()) * BITS[unit] / 8
        else:
            value = Fraction(parse_bytes(stripped.removesuffix("/s"), name)) if unit.endswith("B/s") else Fraction(0)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise InputError(
            f"{name} must be above 0 with a unit of bytes or bits a second: 50GB/s, 400Gbit/s; got {text!r}"
        )
    return value


def _exact(name: str, value: float) -> Fraction:
    """The decimal that was typed, as a fraction: 0.1 is a tenth."""
    try:
        return Fraction(str(value))
    except ValueError:
        raise InputError(f"{name} must be a finite number; got {value}") from None


def _above_zero(name: str, value: int) -> int:
    if not value:
        raise InputError(f"{name} must be 1 token or more")
    return value
