"""Does an engine's own figure agree with the plan? If not, which known mistake does it equal?"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.engine_log import EngineLog
from rorqual.planner.mistakes import KnownFigure, known_figures, spread_fixed
from rorqual.planner.storage import RowFormat, bytes_per_token

OWN_TOLERANCE = Fraction(1, 200)
"""Relative, when the log states the memory too: blocks and alignment."""
PLAN_TOLERANCE = Fraction(1, 20)
"""Relative, when the memory is this plan's: another workspace, another utilisation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogCheck:
    """What a log implies, beside the plan.

    implied: bytes a token, memory / tokens. from_log: whether the log stated the memory. matches: known figures within
    the tolerance, the nearest first. nearest: the nearest of all. planned: bytes a token of the plan's rows.
    request_bytes: what the log's concurrency implies for one request, None without it.
    """

    tokens: int
    memory: Fraction
    from_log: bool
    implied: Fraction
    planned: Fraction
    matches: tuple[KnownFigure, ...]
    nearest: KnownFigure
    request_bytes: Fraction | None

    @property
    def agrees(self) -> bool:
        """The plan's own bytes a token are among the matches."""
        return any(figure.bytes_per_token == self.planned and not figure.wrong for figure in self.matches)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.matches:
            times = float(self.implied / self.nearest.bytes_per_token)
            return f"no known figure; {times:.3g} times '{self.nearest.name}', the nearest"
        told = [
            f"{'a known mistake' if figure.wrong else 'the storage'} '{figure.name}' "
            f"({float(figure.bytes_per_token):,.6g} B: {figure.meaning})"
            for figure in self.matches
        ]
        return " or ".join(told)


def check_log(layout: KVLayout, rows: RowFormat, log: EngineLog, cache_bytes: int) -> LogCheck:
    """Compare a log with a plan of these rows that leaves `cache_bytes` a rank for slots and pages.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.engine_log import read_log
    >>> from rorqual.planner.storage import row_format
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> log = read_log(["Available KV cache memory: 96.15 GiB", "GPU KV cache size: 10,000,000 tokens"])
    >>> found = check_log(layout, row_format(layout, "packed"), log, 0)
    >>> round(float(found.implied)), found.agrees, found.matches[0].name
    (10324, False, 'every layer counted as storing its own global KV')

    Unit: bytes a token. Source: memory / tokens, `mistakes.known_figures`.
    Raises InputError when the log has no number of tokens, or neither log nor plan has any memory for a cache.
    """
    if not log.tokens:
        missing = "it gives blocks but no block_size" if log.blocks is not None else "it gives no size in tokens"
        raise InputError(f"the log does not say how many tokens its cache holds: {missing}")
    from_log = log.memory is not None
    memory = log.memory if log.memory is not None else Fraction(cache_bytes)
    if memory <= 0:
        raise InputError("neither the log nor the plan has memory for a cache; give --memory as the engine sees it")
    implied = memory / log.tokens
    error = log.memory_error / log.tokens + implied * (OWN_TOLERANCE if from_log else PLAN_TOLERANCE)
    known = [figure for figure in known_figures(layout) if figure.bytes_per_token]
    if log.request_tokens:
        known.append(spread_fixed(layout, log.request_tokens))
    known.sort(key=lambda figure: max(figure.bytes_per_token / implied, implied / figure.bytes_per_token))
    return LogCheck(
        tokens=log.tokens,
        memory=memory,
        from_log=from_log,
        implied=implied,
        planned=bytes_per_token(layout, rows),
        matches=tuple(figure for figure in known if abs(figure.bytes_per_token - implied) <= error),
        nearest=known[0],
        request_bytes=memory / log.concurrency if log.concurrency else None,
    )
