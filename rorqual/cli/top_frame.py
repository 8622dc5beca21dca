"""One frame of `rorqual top`: an engine's published document as tables of a given width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rorqual.cli.output import bytes_text, cell_text

WIDE = 100
"""Columns from which tables stand side by side."""
STEPS = 8
REQUESTS = 8
BETWEEN = 3
"""Columns between two cells of a table."""
LEAST = 8
Document = dict[str, Any]


def frame(document: Document, now: float, width: int) -> RenderableType:
    """All of it. now: seconds of the epoch. width: columns of the terminal."""
    stats = document["stats"]
    facts = _facts(document, stats, bar=30 if width >= WIDE else 20)
    groups = _table(("bytes allocated", ""), [(name, bytes_text(n)) for name, n in stats["bytes_by_group"].items()])
    parts: list[RenderableType] = [_heading(document, now)]
    if width >= WIDE:
        beside = Table.grid(padding=(0, 4), expand=False)
        beside.add_row(facts, groups)
        parts.append(beside)
    else:
        parts.append(facts)
    if document["requests"]:
        parts.append(_requests(document["requests"], width))
    if stats["recent"]:
        parts.append(_steps(stats["recent"], width))
    if width < WIDE:  # what a small terminal has no room for is what never changes
        parts += [Text(), groups]
    return Group(*parts)


def _heading(document: Document, now: float) -> Text:
    runs, model = document["runs"], document["model"]
    age = max(0.0, now - document["written"])
    up = int(max(0.0, now - document["started"]))
    lines = (
        f"process {document['pid']}  {model['name'] or 'a model'}, {model['max_model_len']:,} tokens a request",
        f"{runs['kernels']} kernels, {runs['numerics']}, {runs['device']}, {runs['prefill']} prefill, "
        f"{runs['replay']} replay, drafts {'on' if runs['speculative'] else 'off'}",
        f"up {up // 3600}:{up // 60 % 60:02}:{up % 60:02}, as of {age:.0f} s ago\n",
    )
    return Text("\n".join(lines))


def _facts(document: Document, stats: Document, bar: int) -> Table:
    counts = stats["counts"]
    taken = stats["slots"] - stats["slots_free"]
    pages = ((stats["pages_used"], "█"), (stats["pages_cached"], "▒"), (stats["pages_free"], "·"))
    slots = ((taken, "█"), (stats["slots_free"], "·"))
    grid = Table.grid(padding=(0, 2))
    rows = [
        ("pages", f"{bar_text(pages, bar)}\n{_pages(stats)}"),
        ("slots", f"{bar_text(slots, bar)}\n{taken} of {stats['slots']} used"),
        (
            "requests",
            f"{stats['running']} running, {stats['waiting']} waiting, {stats['finished']:,} finished, "
            f"{stats['aborted']:,} aborted",
        ),
        ("speed", speed_text(stats["recent"])),
        ("a step", step_text(stats["recent"])),
        ("tokens", f"{counts['prompt']:,} of prompts, {counts['new']:,} new"),
        (
            "rows",
            f"{counts['computed']:,} computed, {counts['hit']:,} hit, {counts['replayed']:,} of these replayed",
        ),
        *([] if stats.get("store") is None else [("store", store_text(stats["store"], counts["restored"]))]),
        ("layer-tokens", layers_text(counts, document["model"]["layers"])),
        ("drafts", acceptance_text(counts)),
        ("lost", f"{stats['preemptions']:,} preemptions, {stats['evictions']:,} evictions"),
    ]
    for name, value in rows:
        grid.add_row(Text(name, style="bold"), Text(value))
    return grid


def _pages(stats: Document) -> str:
    return (
        f"{stats['pages_used']:,} used, {stats['pages_cached']:,} cached, {stats['pages_free']:,} free of "
        f"{stats['pages']:,}, {stats['page_tokens']} tokens and {bytes_text(stats['page_bytes'])} each"
    )


def bar_text(parts: Sequence[tuple[int, str]], cells: int) -> str:
    """Counts as a bar of that many cells: rounded down, at least one cell for what is there, the rest to the largest.

    >>> bar_text(((1, "#"), (0, "="), (99, ".")), 10)
    '#.........'
    """
    total = sum(count for count, _ in parts)
    if not total:
        return ""
    sizes = [max(int(count > 0), count * cells // total) for count, _ in parts]
    sizes[max(range(len(parts)), key=lambda at: sizes[at])] += cells - sum(sizes)
    return "".join(mark * size for (_, mark), size in zip(parts, sizes, strict=True))


def speed_text(recent: Sequence[Document]) -> str:
    """Tokens a second of the time that steps took; pauses between them do not count."""
    seconds, tokens = sum(map(_seconds, recent)), sum(step["tokens"] for step in recent)
    if not seconds:
        return "-"
    return f"{tokens / seconds:,.1f} tokens/s in the last {len(recent)} steps, {tokens / len(recent):.2f} a step"


def step_text(recent: Sequence[Document]) -> str:
    """Milliseconds of a step, and the shares of its parts."""
    seconds = sum(map(_seconds, recent))
    if not seconds:
        return "-"
    parts = (("model", "model"), ("drafts", "draft"), ("plan", "plan"), ("rest", "other"))
    shares = (f"{name} {sum(step[f'{key}_seconds'] for step in recent) / seconds:.0%}" for name, key in parts)
    return f"{seconds / len(recent) * 1e3:,.1f} ms: {', '.join(shares)}"


def store_text(store: Document, restored: int) -> str:
    """Pages that are kept beyond the cache, and what they have saved.

    >>> store_text({"pages": 1234, "bytes": 2_000_000, "dropped": 5, "damaged": 6}, 128)
    '1,234 pages, 2.0 MB; 128 tokens restored, 5 pages dropped, 6 damaged'
    """
    kept = f"{store['pages']:,} pages, {bytes_text(store['bytes'])}"
    return f"{kept}; {restored:,} tokens restored, {store['dropped']:,} pages dropped, {store['damaged']:,} damaged"


def layers_text(counts: Document, layers: int) -> str:
    """Rows x layers that ran, of those that every layer on every computed row would be."""
    full = counts["computed"] * layers
    return f"{counts['layer_tokens']:,} of {full:,}, {counts['layer_tokens'] / full:.1%}" if full else "-"


def acceptance_text(counts: Document) -> str:
    """By draft position: how many verifications it stood in.

    >>> acceptance_text({"verifications": 10, "accepted": [8, 5]})
    '80% 50% by position, 2.30 tokens a verification'
    """
    tries = counts["verifications"]
    if not tries:
        return "-"
    shares = " ".join(f"{count / tries:.0%}" for count in counts["accepted"])
    return f"{shares} by position, {1 + sum(counts['accepted']) / tries:.2f} tokens a verification"


def _requests(requests: Sequence[Document], width: int) -> Table:
    columns = ["request", "state", "prompt", "hit", "new", "ms/token"]
    keys = ["id", "state", "prompt", "hit", "new"]
    if width >= WIDE:
        columns += ["queue s", "prefill s"]
    rows = []
    for own in requests[:REQUESTS]:
        seconds = own["token_seconds"]
        rows.append([own[key] for key in keys] + [None if seconds is None else seconds * 1e3])
        if width >= WIDE:
            rows[-1] += [own["queue_seconds"], own["prefill_seconds"]]
    title = f"{len(requests)} live requests" + (f", the first {REQUESTS}" if len(requests) > REQUESTS else "")
    return _table(columns, rows, title, width=width)


def _steps(recent: Sequence[Document], width: int) -> Table:
    """Newest first, so that a small terminal cuts the oldest.

    Of a sequence: its rows as `[start, end)`, drafts among them after a plus.
    """
    rows, longest = [], 32 if width >= WIDE else 12
    for step in reversed(recent[-STEPS:]):
        planned = ", ".join(
            f"{_cut(key, longest)} [{start}, {end})" + (f" +{drafts}" if drafts else "")
            for key, start, end, drafts in step["sequences"]
        )
        count = sum(end - start for _, start, end, _ in step["sequences"])
        rows.append([planned, step["number"], f"{_seconds(step) * 1e3:.1f}", count, step["tokens"]])
    return _table(("plan", "step", "ms", "rows", "tokens"), rows, "last steps", width=width)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", width: int | None = None) -> Table:
    """The first column is cut to what the others leave of the width; a frame keeps its height."""
    cells = [[cell_text(value) for value in row] for row in rows]
    if width is not None:
        others = sum(BETWEEN + max(len(row[at]) for row in [columns, *cells]) for at in range(1, len(columns)))
        for row in cells:
            row[0] = _cut(row[0], max(LEAST, width - others))
    heading = Text(f"\n{title}") if title else None
    table = Table(title=heading, title_justify="left", box=SIMPLE, pad_edge=False, show_edge=False)
    for at, name in enumerate(columns):
        table.add_column(Text(name), justify="right" if at else "left", no_wrap=True, overflow="ellipsis")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _seconds(step: Document) -> float:
    return float(sum(step[f"{part}_seconds"] for part in ("plan", "model", "draft", "other")))
