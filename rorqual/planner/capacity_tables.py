"""The capacity plan as tables. Bytes are exact; columns that say "shown" round them in decimal units."""

from __future__ import annotations

from collections.abc import Sequence

from rorqual.planner.capacity import MemoryPlan, session_bytes, sessions_that_fit
from rorqual.planner.check_log import LogCheck
from rorqual.planner.deployment import Deployment, outside, plan
from rorqual.planner.engine_log import EngineLog
from rorqual.planner.mix import Mix, mean_pages, one_context
from rorqual.planner.padding import paddings
from rorqual.planner.parallel import sharing
from rorqual.planner.placement import FORMATS, format_bytes, home, weight_bytes
from rorqual.planner.roofline import decode_steps
from rorqual.planner.storage import (
    USERS,
    bytes_per_token,
    global_bytes_logical,
    row_formats,
    slot_bytes,
    slot_bytes_logical,
)
from rorqual.planner.table import Cell, Table
from rorqual.planner.units import decimal_bytes, plain_number

BATCHES = (1, 8, 64, 256, 1024)


def weights_table(deployment: Deployment) -> Table:
    """Weights by part and format, where each lives, and what the fullest rank holds.

    >>> weights_table(_example()).rows[-1][-1]
    73875128208

    Unit: bytes. Source: `placement.format_bytes`, `parallel.rank_bytes`.
    """
    config, ranks = deployment.layout.config, deployment.ranks
    by_format, by_part, shares = format_bytes(config), weight_bytes(config), deployment.weights
    rows: list[tuple[Cell, ...]] = []
    for part, total in by_part.items():
        where = home(part, deployment.placement)
        spread = sharing(part, ranks) if where == "device" else "-"
        formats = [by_format[part].get(name) for name in FORMATS.values()]
        rows.append((part, *formats, total, where, spread, shares.get(part, 0)))
    sums = [sum(row.get(name, 0) for row in by_format.values()) for name in FORMATS.values()]
    rows.append(("total", *sums, sum(by_part.values()), "", "", sum(shares.values())))
    return Table(
        name="weights",
        title=f"weights on {ranks.count} x {deployment.device.title}",
        columns=(
            "part",
            *(f"{name} [B]" for name in FORMATS.values()),
            "all [B]",
            "lives on",
            "spread",
            "a rank [B]",
        ),
        rows=tuple(rows),
    )


def memory_table(deployment: Deployment, cut: MemoryPlan, mix: Mix | None) -> Table:
    """A rank's memory as it is cut, and all ranks of the replica together.

    >>> from rorqual.planner.mix import one_context
    >>> example = _example()
    >>> table = memory_table(example, plan(example, one_context(4096)), one_context(4096))
    >>> [row[0] for row in table.rows]
    ['device memory', 'budget', 'weights', 'workspace', 'slots', 'pages', 'spare']

    Unit: bytes. Source: `capacity.plan_memory`.
    """
    ranks, device = deployment.ranks, deployment.device
    memory = device.memory or 0
    tokens = f"{cut.pool_tokens:,} tokens a rank"
    items = (
        ("device memory", memory, device.source),
        ("budget", cut.budget, f"{float(deployment.utilisation):g} x device memory"),
        ("weights", cut.weights, "the fullest rank's"),
        ("workspace", cut.workspace, f"a step of {deployment.chunk_tokens:,} tokens; estimate"),
        ("slots", cut.slots_bytes, f"{cut.slots:,} x {cut.slot_bytes:,} B: windows, tails, draft windows, history"),
        ("pages", cut.pages_bytes, f"{cut.pages:,} x {cut.page_bytes:,} B ({cut.page_tokens} tokens): {tokens}"),
        ("spare", cut.spare, "less than a page" if cut.page_bytes else ""),
    )
    rows = tuple((name, count, decimal_bytes(count), count * ranks.count, how) for name, count, how in items)
    groups = f"--tp {ranks.tp} --dp-attention {ranks.dp_attention} --ep {ranks.ep}"
    note = "Ranks of a tensor-parallel group store the same cache: there is one KV head." if ranks.tp > 1 else ""
    return Table(
        name="memory",
        title=f"a rank's memory, {groups}" + (f", slots for sessions of {mix.label} tokens" if mix else ""),
        columns=("item", "a rank [B]", "shown", "a replica [B]", "how"),
        rows=rows,
        note=note,
    )


def sessions_table(deployment: Deployment, mixes: Sequence[Mix]) -> Table:
    """Sessions at each context or mix: logical and allocated bytes, and how many fit; 0 with the shortage.

    >>> from rorqual.planner.mix import one_context
    >>> sessions_table(_example(), [one_context(131_072)]).rows[0][1:6]
    (119572504, 3085504, 116654080, 119739584, 890)

    Unit: bytes a session, sessions, tokens. Source: `capacity.sessions_that_fit`: 2,918,424 + 131,072 x 890 logical.
    """
    layout, rows, groups = deployment.layout, deployment.rows, deployment.ranks.dp_attention
    available = deployment.budget - sum(deployment.weights.values()) - deployment.workspace
    lines: list[tuple[Cell, ...]] = []
    for mix in mixes:
        stored = sum(share * global_bytes_logical(layout, rows, tokens) for tokens, share in mix.parts)
        fixed, pages = slot_bytes(layout, rows), mean_pages(layout, mix)
        paged = pages * layout.page_tokens * bytes_per_token(layout, rows)
        fit = sessions_that_fit(layout, mix, available, rows)
        short = None if fit else session_bytes(layout, mix, 1, rows) - available
        lines.append(
            (
                mix.cell,
                plain_number(stored + slot_bytes_logical(layout, rows)),
                fixed,
                plain_number(paged),
                plain_number(fixed + paged),
                plain_number(bytes_per_token(layout, rows)),
                fit,
                fit * groups,
                int(fit * groups * mix.mean_tokens),
                int(fit * groups * pages * layout.page_tokens),
                short,
            )
        )
    return Table(
        name="sessions",
        title=f"sessions, rows stored as {rows.storage}",
        columns=(
            "context [tokens]",
            "logical [B/session]",
            "fixed [B/session]",
            "pages [B/session]",
            "allocated [B/session]",
            "global [B/token]",
            "sessions a rank",
            "sessions a replica",
            "tokens held",
            "page-rounded",
            "short by [B]",
        ),
        rows=tuple(lines),
        note="A mix counts its average: in whole pages, with room for its longest context. Bytes a token do not depend "
        "on the length planned for; fixed bytes a session are beside them, never in them.",
    )


def storage_table(deployment: Deployment, mix: Mix) -> Table:
    """The same memory under each storage of rows.

    >>> from rorqual.planner.mix import one_context
    >>> [row[2] for row in storage_table(_example(), one_context(131_072)).rows]
    [890, 1490, 1650, 1630, 1790, 3200]

    Unit: bytes. Source: `storage.row_formats`; who stores so is hearsay where it says so.
    """
    layout, groups = deployment.layout, deployment.ranks.dp_attention
    available = deployment.budget - sum(deployment.weights.values()) - deployment.workspace
    lines: list[tuple[Cell, ...]] = []
    for rows in row_formats(layout):
        per_token = bytes_per_token(layout, rows)
        fit = sessions_that_fit(layout, mix, available, rows)
        fixed = slot_bytes(layout, rows)
        lines.append(
            (
                rows.storage,
                rows.arithmetic,
                plain_number(per_token),
                rows.window,
                fixed,
                fit * groups,
                USERS[rows.storage],
            )
        )
    return Table(
        name="storage",
        title=f"the same memory by storage, sessions of {mix.label} tokens",
        columns=(
            "storage",
            "main row, index key [B]",
            "global [B/token]",
            "window row [B]",
            "fixed [B/session]",
            "sessions a replica",
            "who stores so",
        ),
        rows=tuple(lines),
    )


def padding_table(deployment: Deployment, mix: Mix) -> Table:
    """Unused bytes of a session's last page, by page size.

    >>> from rorqual.planner.mix import one_context
    >>> padding_table(_example(), one_context(1000)).rows[3]
    (128, 113920, 113030, 56515, 21360, 2.34375, 'yes')

    Unit: bytes a session. Source: `padding.padding`.
    """
    rows = tuple(
        (
            one.page_tokens,
            one.page_bytes,
            plain_number(one.worst),
            plain_number(one.expected),
            plain_number(one.mix),
            float(100 * one.share),
            one.illegal or "yes",
        )
        for one in paddings(deployment.layout, mix, deployment.rows)
    )
    return Table(
        name="padding",
        title=f"waste of the last page, at {mix.label} tokens",
        columns=(
            "page [tokens]",
            "page [B]",
            "worst [B/session]",
            "expected [B/session]",
            "at these contexts [B/session]",
            "of allocated [%]",
            "legal",
        ),
        rows=rows,
        note="Expected: lengths that end anywhere in a page with equal chance.",
    )


def outside_table(deployment: Deployment) -> Table:
    """Host memory and disk beside the devices.

    >>> outside_table(_example()).rows
    (('checkpoint', 'disk', 510286023000, '510.29 GB', 'the parts loaded'),)

    Unit: bytes a host; disk counts one copy. Source: `deployment.outside`.
    """
    return Table(
        name="beside",
        title=f"beside the devices, a host ({deployment.hosts} in all)",
        columns=("item", "on", "bytes [B]", "shown", "how"),
        rows=tuple(
            (item.name, item.home, item.nbytes, decimal_bytes(item.nbytes), item.meaning)
            for item in outside(deployment)
        ),
        note="A pool, a prefill/decode split and offloading take none of the device's memory.",
    )


def roofline_table(deployment: Deployment, contexts: Sequence[int], batches: Sequence[int] = BATCHES) -> Table:
    """The least time of a decode step, by context and batch; a batch beyond the sessions that fit is marked.

    >>> table = roofline_table(_example(), [131_072], [1024])
    >>> table.rows[0][:4], table.rows[0][-1]
    ((131072, 1024, True, 44621457347), 'memory')

    Unit: bytes and milliseconds on the busiest rank, tokens a second of the replica. Source: `roofline.decode_step`.
    """
    layout, ranks, rows = deployment.layout, deployment.ranks, deployment.rows
    available = deployment.budget - sum(deployment.weights.values()) - deployment.workspace
    fits = {
        context: ranks.dp_attention * sessions_that_fit(layout, one_context(context), available, rows)
        for context in contexts
    }
    steps = decode_steps(
        layout, deployment.device, batches, contexts, ranks=ranks, placement=deployment.placement, rows=rows
    )
    return Table(
        name="roofline",
        title=f"a decode step at best, {ranks.count} x {deployment.device.title}",
        columns=(
            "context [tokens]",
            "batch",
            "fits",
            "weights read [B/rank]",
            "cache read [B/rank]",
            "work [FLOP/rank]",
            "memory [ms]",
            "compute [ms]",
            "step [ms]",
            "tokens/s",
            "tokens/s a session",
            "bound",
        ),
        rows=tuple(
            (
                step.context,
                step.batch,
                step.batch <= fits[step.context],
                int(step.weight_bytes),
                step.cache_bytes,
                step.flops.total,
                1000 * step.memory_s,
                None if step.compute_s is None else 1000 * step.compute_s,
                1000 * step.seconds,
                step.tokens_per_second,
                1 / step.seconds,
                step.bound,
            )
            for step in steps
        ),
        note="At the published dense rates; without communication, launches, sampling and drafts, so a real step is "
        "slower. Experts read: those expected to be touched by random choices.",
    )


def check_table(log: EngineLog, found: LogCheck, deployment: Deployment, cut: MemoryPlan) -> Table:
    """What a log printed, what it implies, and what this plan says.

    >>> from rorqual.planner.check_log import check_log
    >>> from rorqual.planner.engine_log import read_log
    >>> from rorqual.planner.mix import one_context
    >>> example, log = _example(), read_log(["GPU KV cache size: 600,000 tokens"])
    >>> cut = plan(example, one_context(4096))
    >>> found = check_log(example.layout, example.rows, log, example.budget - cut.weights - cut.workspace)
    >>> check_table(log, found, example, cut).rows[1]
    ('memory [B]', 50646701424, 50646701424, "this plan's, the log gives none")

    Unit: as each row says. Source: `check_log.check_log`.
    """
    cache = cut.budget - cut.weights - cut.workspace
    source = "the log" if found.from_log else "this plan's, the log gives none"
    rows: list[tuple[Cell, ...]] = [
        ("tokens", found.tokens, cut.pool_tokens, f"of one rank; printed by {log.engine or 'the engine'}"),
        ("memory [B]", int(found.memory), cache, source),
        ("bytes a token [B]", float(found.implied), plain_number(found.planned), found.verdict),
    ]
    if found.request_bytes is not None and log.request_tokens and log.concurrency:
        mix = one_context(log.request_tokens)
        own = session_bytes(deployment.layout, mix, 1, deployment.rows)
        fit = sessions_that_fit(deployment.layout, mix, cache, deployment.rows)
        length = f"requests of {log.request_tokens:,} tokens"
        rows.append(("bytes a request [B]", int(found.request_bytes), own, f"memory / concurrency, {length}"))
        rows.append(("concurrency", float(log.concurrency), fit, length))
    if log.blocks is not None:
        size = f"of {log.block_size} tokens" if log.block_size else "of a size that the log does not give"
        rows.append(("blocks", log.blocks, cut.pages, f"{size}; the plan's of {cut.page_tokens}"))
    return Table(
        name="check",
        title="an engine's figures beside this plan",
        columns=("figure", "printed or implied", "this plan", "how"),
        rows=tuple(rows),
        note="agrees with the plan" if found.agrees else f"does not agree with the plan: {found.verdict}",
    )


def must_fit(deployment: Deployment, mixes: Sequence[Mix]) -> None:
    """Refuse the first context that a rank cannot hold even once.

    >>> from rorqual.planner.mix import one_context
    >>> must_fit(_example(), [one_context(4096), one_context(2**20)])

    Unit: none. Source: `deployment.plan`. Raises CapacityError naming the shortage.
    """
    for mix in mixes:
        plan(deployment, mix)


def _example() -> Deployment:
    """The release on eight H200: what the examples above are about."""
    from rorqual.config import presets
    from rorqual.planner.deployment import deploy
    from rorqual.planner.devices import find_device

    return deploy(presets.load("v4.1-flash"), find_device("h200"), count=8)
