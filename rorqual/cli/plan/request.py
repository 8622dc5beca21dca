"""The options that describe one kind of request and what serves it, for `traffic` and `report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rorqual.cli.plan.options import read_number
from rorqual.cli.plan.rates import parse_rate
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.config import ModelConfig
    from rorqual.planner.traffic_tables import TrafficCase

PROMPT, OUTPUT = 32_768, 1024

Prompt = Annotated[str | None, typer.Option(help="Tokens of a prompt; 32Ki, or what the model has room for.")]
Output = Annotated[str | None, typer.Option(help="Tokens of an answer; 1Ki, or half of a smaller model's positions.")]
Rate = Annotated[float, typer.Option(help="Requests a second.")]
PrefillRate = Annotated[float, typer.Option(help="Tokens a second that a prefill node computes.")]
HitRate = Annotated[float, typer.Option(help="Share of the prompt that the pool holds, 0..1.")]
Link = Annotated[str, typer.Option(help="Link between nodes and to the pool: 50GB/s, 400Gbit/s.")]
Latency = Annotated[float, typer.Option(help="Seconds before the first byte of a transfer arrives.")]
TargetTime = Annotated[float, typer.Option(help="Seconds that a hand-over may take.")]
Disk = Annotated[str | None, typer.Option(help="Capacity of the pool's disks together: 30.72TB.")]
Endurance = Annotated[str | None, typer.Option(help="What they may be written (TBW), together: 14PB.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """The options above as they were typed, and their defaults."""

    prompt: str | None = None
    output: str | None = None
    rate: float = 1.0
    prefill_rate: float = 20_000.0
    hit_rate: float = 0.5
    link: str = "50GB/s"
    latency: float = 0.0
    target_time: float = 0.1
    disk: str | None = None
    endurance: str | None = None

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> RequestOptions:
        """Those among a verb's parameters, which are named alike."""
        return cls(**{field.name: given[field.name] for field in fields(cls)})


def read_case(config: ModelConfig, asked: RequestOptions) -> TrafficCase:
    """The request that was asked for. Raises InputError naming the option that cannot be honoured."""
    from rorqual.planner.traffic_tables import TrafficCase
    from rorqual.planner.units import parse_bytes

    if asked.endurance is not None and asked.disk is None:
        raise InputError("--endurance needs --disk, the capacity that it belongs to")
    prompt, output = read_lengths(config.max_position_embeddings, asked)
    return TrafficCase(
        prompt=prompt,
        output=output,
        rate=read_number("--rate", asked.rate),
        prefill_rate=read_number("--prefill-rate", asked.prefill_rate),
        hit_rate=read_number("--hit-rate", asked.hit_rate),
        link=parse_rate(asked.link, "--link"),
        latency_s=read_number("--latency", asked.latency),
        target_s=read_number("--target-time", asked.target_time),
        disk=None if asked.disk is None else parse_bytes(asked.disk, "--disk"),
        endurance=None if asked.endurance is None else parse_bytes(asked.endurance, "--endurance"),
    )


def read_lengths(positions: int, asked: RequestOptions) -> tuple[int, int]:
    """Tokens of prompt and answer, which a model of so many positions must hold together."""
    from rorqual.planner.units import parse_tokens

    prompt = None if asked.prompt is None else parse_tokens(asked.prompt, "--prompt")
    if prompt == 0:
        raise InputError("--prompt must be 1 token or more")
    if asked.output is None:
        output = min(OUTPUT, positions // 2 if prompt is None else max(0, positions - prompt))
    else:
        output = parse_tokens(asked.output, "--output")
    if prompt is None:
        prompt = max(1, min(PROMPT, positions - output))
    if prompt + output > positions:
        limit = f"{positions:,} tokens (max_position_embeddings)"
        raise InputError(f"--prompt and --output must be at most {limit} together; got {prompt:,} and {output:,}")
    return prompt, output
