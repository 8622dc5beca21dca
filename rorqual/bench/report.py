"""Rows, bars, and the JSON document that holds them.

    {what, command, date, commit, machine, roofline, rows, notes}

A row of times has one `NAME_s` {median, min, max, runs} for each contestant, their ratio, and the share of the roofline
that the measured one reached: work counted / rate / median. A share may exceed 1: data may lie in a cache and not in
memory, and integer products are faster than the fp32 GEMM that the roofline knows. Where the baseline's share is known
it stands beside (`baseline_roofline`): a ratio over a baseline that wastes the machine says little.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rorqual.bench.machine import OtherLoad, commit, machine
from rorqual.bench.roofline import Roofline, Work
from rorqual.bench.timing import Sample
from rorqual.errors import InputError

JsonRow = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """What a figure is to reach: exactly one of the two is set."""

    at_least: float | None = None
    at_most: float | None = None

    def reached(self, value: float) -> bool:
        if self.at_least is not None:
            return value >= self.at_least
        assert self.at_most is not None
        return value <= self.at_most

    def as_json(self, value: float) -> JsonRow:
        limit = {key: limit for key, limit in asdict(self).items() if limit is not None}
        return {**limit, "reached": self.reached(value)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRow:
    """Two contestants on the same work.

    Args:
        times: by contestant, empty when there is nothing to measure (`unavailable` says why).
        ratio_of: the ratio is median of the first / median of the second.
        measured: the contestant whose share of the roofline is given.
        work: None where no roofline applies.
        baseline_work: that of `ratio_of[0]`; None where its share says nothing.
        bar: of the ratio.
        share_bar: of the measured one's share of the roofline.
        baseline_bar: of the baseline's share; below it the baseline is not a fair one.
        difference: worst difference of the two results, relative to the largest magnitude; 0 is bit for bit.
        extra: further columns of the row.
    """

    name: str
    shape: str
    times: Mapping[str, Sample]
    ratio_of: tuple[str, str] = ("plain", "fast")
    measured: str = "fast"
    work: Work | None = None
    baseline_work: Work | None = None
    bar: Bar | None = None
    share_bar: Bar | None = None
    baseline_bar: Bar | None = None
    difference: float | None = None
    unavailable: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict)

    def as_json(self, roofline: Roofline, judged: bool = True) -> JsonRow:
        """The row for a document; without its bars where nothing is judged."""
        row: JsonRow = {"name": self.name, "shape": self.shape, **self.extra}
        for name in dict.fromkeys((*self.ratio_of, *self.times)):
            row[f"{name}_s"] = asdict(self.times[name]) if name in self.times else None
        above, below = self.ratio_of
        if self.unavailable is not None:
            return {**row, "ratio": None, "unavailable": self.unavailable}
        ratio = self.times[above].median / self.times[below].median
        row |= {"ratio": ratio, "ratio_of": f"{above}_s / {below}_s"}
        if self.work is not None:
            row["roofline"] = self._share(self.measured, self.work, roofline, self.share_bar if judged else None)
        if self.baseline_work is not None:
            bar = self.baseline_bar if judged else None
            row["baseline_roofline"] = self._share(above, self.baseline_work, roofline, bar)
        if self.difference is not None:
            row["difference"] = self.difference
        if self.bar is not None and judged:
            row["bar"] = self.bar.as_json(ratio)
        return row

    def _share(self, contestant: str, work: Work, roofline: Roofline, bar: Bar | None) -> JsonRow:
        share = work.floor_s(roofline) / self.times[contestant].median
        found: JsonRow = {"share": share, "bound": work.bound(roofline), **asdict(work)}
        return found if bar is None else {**found, "bar": bar.as_json(share)}


class Report:
    """One run of one benchmark; made before anything is measured, so that it sees how busy the machine is.

    The roofline is measured before and after: the better of the two counts.
    """

    def __init__(self, what: str, command: str, quick: bool) -> None:
        self.what, self.command, self.quick = what, command, quick
        self._load = OtherLoad()
        self._roofline = Roofline.measure(quick)

    def document(self, rows: Sequence[TimeRow | JsonRow], notes: Sequence[str]) -> JsonRow:
        """Everything measured, ready for JSON. A quick run has no bars: nothing can be read off its tiny shapes."""
        others = self._load.share()
        roofline = self._roofline.or_better(Roofline.measure(self.quick))
        found = [row.as_json(roofline, not self.quick) if isinstance(row, TimeRow) else row for row in rows]
        if self.quick:
            found = [{key: value for key, value in row.items() if key != "bar"} for row in found]
        return {
            "what": self.what,
            "command": self.command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "quick": self.quick,
            "machine": machine() | {"others_cpu_share": others},
            "roofline": asdict(roofline),
            "rows": found,
            "notes": list(notes),
        }


def check_out(out: Path) -> None:
    """Refuse, before anything is measured, a file that could not be written. Raises InputError."""
    if out.is_dir():
        raise InputError(f"out: {out} is a folder; legal: a file to write")
    if not out.parent.is_dir():
        raise InputError(f"out: the folder {out.parent} does not exist")


def write_document(document: JsonRow, out: Path) -> None:
    """The document as JSON; the file appears whole or not at all."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
