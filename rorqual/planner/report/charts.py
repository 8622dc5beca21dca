"""The bar charts of the page: the waterfall, a rank's memory, sessions, and what is handed over."""

from __future__ import annotations

from collections.abc import Sequence

from rorqual.planner.capacity import session_bytes
from rorqual.planner.deployment import Deployment
from rorqual.planner.explain import Step
from rorqual.planner.explain.draw import bar_label
from rorqual.planner.report.axis import linear, logarithmic
from rorqual.planner.report.bars import Bar, Span, bar_chart, stack
from rorqual.planner.report.markup import Markup
from rorqual.planner.report.picture import framed
from rorqual.planner.report.subject import Cut
from rorqual.planner.report.tables import cell
from rorqual.planner.storage import page_bytes
from rorqual.planner.table import Cell, Table
from rorqual.planner.units import Number, count_text, decimal_bytes, number_text

_EXPERTS = ("experts", "draft_experts")
_TABLES = ("engram_tables",)
# What a rank's memory holds, in the order in which it is stacked, and its class.
_MEMORY = {
    "routed experts": "c1",
    "Engram tables": "c4",
    "other weights": "c7",
    "workspace": "c6",
    "slots": "c2",
    "pages": "c3",
    "spare": "saved",
}
_KINDS = ("c1", "c6", "c5", "c2", "c4", "c3", "c7", "c8", "c8")
# Of what may be handed over, the last two are never in one bar.


def waterfall_chart(steps: Sequence[Step]) -> Markup:
    """The figure "waterfall-chart": bytes a token on a logarithmic axis, what a step leaves, saves and adds.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.explain import waterfall
    >>> figure = waterfall_chart(waterfall(presets.load("v4.1-flash")))
    >>> "index keys in FP4 with scales: 890 B  (+ 170 B)" in figure
    True

    Source: `explain.waterfall`. A step to 0 has no bar, only its words.
    """
    sizes = [size for step in steps for size in (step.before, step.after)]
    axis = logarithmic(sizes, decimal_bytes, above=1.2)
    bars = [Bar(label=step.name, told=bar_label(step), spans=_step_spans(step, axis.low)) for step in steps]
    title = "Global KV of a token, step by step, on a logarithmic axis"
    svg = bar_chart("waterfall-drawing", title, bars, axis, "bytes a token")
    return framed("waterfall-chart", svg, f"{title}.", [("c1", "stored"), ("saved", "saved"), ("c2", "added")])


def _step_spans(step: Step, floor: float) -> tuple[Span, ...]:
    first = step.before or step.after
    low, high = min(first, step.after), max(first, step.after)
    spans = []
    if low > 0:
        spans.append(Span(name="stored", start=floor, end=low, kind="c1", told=f"{number_text(low)} B"))
    if high > low:
        kind, name = ("saved", "saved") if step.saved > 0 else ("c2", "added")
        told = f"{number_text(high - low)} B"
        spans.append(Span(name=name, start=max(low, floor), end=high, kind=kind, told=told))
    return tuple(spans)


def memory_chart(deployment: Deployment, found: Sequence[Cut]) -> Markup:
    """The figure "memory-chart": a rank's memory, one bar a mix; bars of what does not fit cross the budget's line.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.deployment import deploy
    >>> from rorqual.planner.devices import find_device
    >>> from rorqual.planner.mix import one_context
    >>> from rorqual.planner.report.subject import cuts
    >>> eight = deploy(presets.load("v4.1-flash"), find_device("h200"), count=8)
    >>> figure = memory_chart(eight, cuts(eight, [one_context(131_072)]))
    >>> "pages 49,344,561,920 B" in figure, "422 slots, 433,151 pages" in figure
    (True, True)

    Unit: bytes. Source: `deployment.plan`: 433,151 pages of 113,920 B.
    """
    bars = [Bar(label=_label(cut), told=_told(cut), spans=stack(_parts(deployment, cut))) for cut in found]
    budget, memory = deployment.budget, deployment.device.memory or 0
    axis = linear(max([memory, *(bar.spans[-1].end for bar in bars if bar.spans)]), decimal_bytes)
    share = f"{float(deployment.utilisation):g} of the device's {decimal_bytes(memory)}"
    title = f"Memory of a rank, {deployment.ranks.count} x {deployment.device.title}"
    svg = bar_chart("memory-drawing", title, bars, axis, "bytes", mark=budget)
    used = {span.name for bar in bars for span in bar.spans}
    legend = [(kind, name) for name, kind in _MEMORY.items() if name in used]
    return framed("memory-chart", svg, f"{title}. The line is the budget, {decimal_bytes(budget)}: {share}.", legend)


def _parts(deployment: Deployment, cut: Cut) -> list[tuple[str, str, Number, str]]:
    weights = deployment.weights
    experts = sum(weights.get(part, 0) for part in _EXPERTS)
    tables = sum(weights.get(part, 0) for part in _TABLES)
    sizes = {
        "routed experts": experts,
        "Engram tables": tables,
        "other weights": sum(weights.values()) - experts - tables,
        "workspace": deployment.workspace,
    }
    if cut.plan is not None:
        sizes |= {"slots": cut.plan.slots_bytes, "pages": cut.plan.pages_bytes, "spare": cut.plan.spare}
    else:
        one = session_bytes(deployment.layout, cut.mix, 1, deployment.rows)
        slot = one - deployment.layout.pages(cut.mix.longest) * page_bytes(deployment.layout, deployment.rows)
        sizes |= {"slots": slot, "pages": one - slot}
    return [(name, _MEMORY[name], size, f"{size:,} B") for name, size in sizes.items()]


def _label(cut: Cut) -> str:
    return f"sessions of {cut.mix.label} tokens"


def _told(cut: Cut) -> str:
    if cut.plan is None:
        return f"one is short by {decimal_bytes(cut.shortage)}"
    return f"{cut.plan.slots:,} slots, {cut.plan.pages:,} pages"


def sessions_chart(sessions: Table) -> Markup:
    """The figure "sessions-chart": sessions of a replica by context, on a logarithmic axis.

    sessions: `capacity_tables.sessions_table`. A context of which none fits has no bar, and the words say what lacks.

    >>> table = Table(name="s", title="", columns=("context [tokens]", "sessions a replica", "short by [B]"),
    ...               rows=((4096, 1200, None), (131_072, 0, 5000)))
    >>> figure = sessions_chart(table)
    >>> "4,096 tokens: 1,200 sessions." in figure, "131,072 tokens: none, short by 5 kB." in figure
    (True, True)

    Unit: sessions. Source: the table.
    """
    rows = sessions.records()
    counts = [int(row["sessions a replica"] or 0) for row in rows]
    axis = logarithmic(counts, count_text, below=2)
    bars = [
        Bar(
            label=f"{cell(row['context [tokens]'])} tokens",
            told=_sessions_told(row, count),
            spans=_filled(axis.low, count),
        )
        for row, count in zip(rows, counts, strict=True)
    ]
    title = "Sessions of a replica by context, on a logarithmic axis"
    return framed("sessions-chart", bar_chart("sessions-drawing", title, bars, axis, "sessions"), f"{title}.")


def _sessions_told(row: dict[str, Cell], count: int) -> str:
    if count:
        return f"{count:,} session{'' if count == 1 else 's'}"
    return f"none, short by {decimal_bytes(int(row['short by [B]'] or 0))}"


def _filled(low: float, count: int) -> tuple[Span, ...]:
    return (Span(name="", start=low, end=count, kind="c3", told=f"{count:,}"),) if count else ()


def handover_chart(handover: Table) -> Markup:
    """The figure "handover-chart": bytes of each hand-over by what they are.

    handover: the first of `traffic_tables.traffic_tables`.

    >>> table = Table(name="h", title="a prompt", columns=("hand-over", "pages [B]", "rings [B]", "total [B]"),
    ...               rows=(("rings", 100, 20, 120),))
    >>> "rings: 120 B (pages 100 B; rings 20 B)." in handover_chart(table)
    True

    Source: the table.
    """
    names = [column.removesuffix(" [B]") for column in handover.columns[1:-1]]
    kinds = dict(zip(names, _KINDS, strict=False))
    bars = []
    for mode, *sizes, total in handover.rows:
        parts = [(name, kinds[name], int(size or 0), f"{size:,} B") for name, size in zip(names, sizes, strict=True)]
        bars.append(Bar(label=str(mode), told=f"{total:,} B", spans=stack(parts)))
    axis = linear(max(int(row[-1] or 0) for row in handover.rows), decimal_bytes)
    used = {span.name for bar in bars for span in bar.spans}
    legend = [(kind, name) for name, kind in kinds.items() if name in used]
    svg = bar_chart("handover-drawing", handover.title, bars, axis, "bytes")
    return framed("handover-chart", svg, f"{handover.title}, by what it holds.", legend)
