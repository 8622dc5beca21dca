"""A small subject, for examples and tests: the preset "tiny" on a machine of 64 MiB."""

from __future__ import annotations

from fractions import Fraction

from rorqual.config import ModelConfig, presets
from rorqual.layout import KVLayout
from rorqual.planner.deployment import deploy
from rorqual.planner.devices import find_device
from rorqual.planner.mix import one_context
from rorqual.planner.report.subject import Subject
from rorqual.planner.traffic_tables import TrafficCase

PAGE_TOKENS = 16


def example(
    config: ModelConfig | None = None, *, model: str = "tiny", memory: int = 1 << 26, date: str = ""
) -> Subject:
    """Contexts of 64 and 1,024 tokens, one device of `memory` bytes and 80 GB/s, requests of 512 tokens.

    >>> example().deployment.budget
    67108864

    Source: the preset; 2^26 bytes. Raises ConfigError where 16 tokens are no page of the config.
    """
    config = presets.load("tiny") if config is None else config
    return Subject(
        model=model,
        layout=KVLayout(config, page_tokens=PAGE_TOKENS),
        contexts=(64, 1024),
        deployment=deploy(
            config,
            find_device("cpu", memory=memory, bandwidth=80 * 10**9, bf16=10**12),
            page_tokens=PAGE_TOKENS,
            utilisation=Fraction(1),
            chunk_tokens=64,
            sampled_rows=8,
        ),
        mixes=(one_context(64), one_context(1024)),
        case=TrafficCase(prompt=512, output=64),
        date=date,
    )
