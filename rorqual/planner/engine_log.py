"""Figures that serving engines print about their cache when they start, read from a log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from rorqual.errors import InputError

GIB = 2**30
KNOWN_LINES = (
    "GPU KV cache size: N tokens",
    "Maximum concurrency for N tokens per request: Xx",
    "# GPU blocks: N",
    "Available KV cache memory: X GiB",
    "KV Cache is allocated. #tokens: N, KV size: X GB",
    "max_total_num_tokens=N",
)
_NUMBER, _DECIMAL = r"(\d+(?:,\d{3})*)", r"\d+(?:\.\d+)?"
_TOKENS = re.compile(rf"GPU KV cache size:\s*{_NUMBER}\s*tokens")
_CONCURRENCY = re.compile(rf"Maximum concurrency for\s*{_NUMBER}\s*tokens per request:\s*([\d,]*{_DECIMAL})\s*x")
_BLOCKS = re.compile(rf"# GPU blocks:\s*{_NUMBER}")
_BLOCK_SIZE = re.compile(r"\bblock_size['\"]?\s*[=:]\s*(\d+)")
_MEMORY = re.compile(rf"Available KV cache memory:\s*({_DECIMAL})\s*GiB")
_SIZES = rf"((?:,\s*(?:KV|K|V) size:\s*{_DECIMAL}\s*GB)*)"
_ALLOCATED = re.compile(rf"KV Cache is allocated\..*?#tokens:\s*{_NUMBER}{_SIZES}")
_SIZE = re.compile(rf"size:\s*({_DECIMAL})\s*GB")
_MAX_TOTAL = re.compile(r"max_total_num_tokens=(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLog:
    """What a log says; None for what it does not.

    tokens: of the cache of one rank. memory: bytes of that cache, known to +- memory_error. blocks, block_size: pages
    and tokens a page. request_tokens, concurrency: requests of that length that fit at once. lines: the lines found.
    """

    engine: str = ""
    tokens: int | None = None
    memory: Fraction | None = None
    memory_error: Fraction = Fraction(0)
    blocks: int | None = None
    block_size: int | None = None
    request_tokens: int | None = None
    concurrency: Fraction | None = None
    lines: int = 0


def read_log(lines: Iterable[str]) -> EngineLog:
    """Read a log; of a figure printed twice (several ranks, a restart) the last counts.

    >>> log = read_log(["INFO GPU KV cache size: 1,234,560 tokens",
    ...                 "INFO Maximum concurrency for 131,072 tokens per request: 9.42x"])
    >>> log.engine, log.tokens, log.request_tokens, log.concurrency
    ('vLLM', 1234560, 131072, Fraction(471, 50))
    >>> read_log(["KV Cache is allocated. #tokens: 1000, K size: 0.50 GB, V size: 0.25 GB"]).memory == 3 * 2**28
    True

    Unit: tokens, bytes. Source: the start-up lines of vLLM and SGLang as of 2026. vLLM says GiB; SGLang writes GB for
    2^30 bytes. Raises InputError for a log without any known line.
    """
    log = EngineLog()
    for line in lines:
        log = _read_line(log, line)
    if not log.lines:
        raise InputError(f"the log holds no line that is known; known are {'; '.join(KNOWN_LINES)}")
    if log.tokens is None and log.blocks is not None and log.block_size is not None:
        log = replace(log, tokens=log.blocks * log.block_size)
    return log


def _read_line(log: EngineLog, line: str) -> EngineLog:
    if found := _BLOCK_SIZE.search(line):
        log = replace(log, block_size=int(found[1]))
    if found := _TOKENS.search(line):
        return replace(log, engine="vLLM", tokens=_count(found[1]), lines=log.lines + 1)
    if found := _CONCURRENCY.search(line):
        times = Fraction(found[2].replace(",", ""))
        return replace(log, engine="vLLM", request_tokens=_count(found[1]), concurrency=times, lines=log.lines + 1)
    if found := _BLOCKS.search(line):
        return replace(log, engine="vLLM", blocks=_count(found[1]), lines=log.lines + 1)
    if found := _MEMORY.search(line):
        return _with_memory(replace(log, engine="vLLM"), [found[1]])
    if found := _ALLOCATED.search(line):
        sizes = _SIZE.findall(found[2])
        log = replace(log, engine="SGLang", tokens=_count(found[1]))
        return _with_memory(log, sizes) if sizes else replace(log, lines=log.lines + 1)
    if found := _MAX_TOTAL.search(line):
        return replace(log, engine="SGLang", tokens=int(found[1]), lines=log.lines + 1)
    return log


def _with_memory(log: EngineLog, sizes: list[str]) -> EngineLog:
    """Sizes in GiB, added; each is known to half of its last digit."""
    error = sum((Fraction(GIB, 2 * 10 ** len(size.partition(".")[2])) for size in sizes), Fraction(0))
    memory = sum((Fraction(size) for size in sizes), Fraction(0)) * GIB
    return replace(log, memory=memory, memory_error=error, lines=log.lines + 1)


def _count(text: str) -> int:
    return int(text.replace(",", ""))
