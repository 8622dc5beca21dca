"""What `rorqual plan traffic` prints: one kind of request at one rate, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rorqual.layout import KVLayout
from rorqual.planner import traffic
from rorqual.planner.figure import Figure
from rorqual.planner.table import Table
from rorqual.planner.units import Number, count_text, decimal_bytes, plain_number

GB = 10**9
FIGURE_COLUMNS = ("figure", "value", "unit", "shown", "formula", "evaluated")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficCase:
    """One kind of request, and what serves it. The defaults are an example, measured nowhere.

    prompt, output: tokens. rate: requests a second, all together. prefill_rate: tokens a second that one prefill node
    computes. hit_rate: share of the prompt that the pool holds. link: bytes a second. latency_s: of the link, once a
    transfer. target_s: time that a hand-over may take. disk, endurance: bytes that the pool's disks hold, and may be
    written in their life.
    """

    prompt: int = 32_768
    output: int = 1024
    rate: Number = 1
    prefill_rate: Number = 20_000
    hit_rate: Number = Fraction(1, 2)
    link: Number = 50 * GB
    latency_s: Number = 0
    target_s: Number = Fraction(1, 10)
    disk: int | None = None
    endurance: Number | None = None


def traffic_tables(
    layout: KVLayout, case: TrafficCase, modes: Sequence[str] = traffic.HANDOVERS
) -> tuple[Table, Table, Table]:
    """Bytes of each hand-over [B], what links carry [GB/s], and the figures of pool, break-even and disk.

    Source: the functions of `rorqual.planner.traffic`. Errors: InputError, as theirs.

    >>> from rorqual.config import presets
    >>> tables = traffic_tables(KVLayout(presets.load("v4.1-flash")), TrafficCase(), ["rings"])
    >>> [table.name for table in tables], tables[0].records()[0]["total [B]"]
    (['handover', 'links', 'figures'], 32599064)
    """
    return _handovers(layout, case, modes), _links(layout, case, modes), figures_table(traffic_figures(layout, case))


def _handovers(layout: KVLayout, case: TrafficCase, modes: Sequence[str]) -> Table:
    parts = tuple(traffic.Handover.__slots__)
    rows = []
    for mode in modes:
        sizes = traffic.handover(layout, case.prompt, mode)
        rows.append((mode, *(getattr(sizes, part) for part in parts), sizes.total))
    return Table(
        name="handover",
        title=f"Hand-over of a prompt of {case.prompt:,} tokens",
        columns=("hand-over", *(f"{part} [B]" for part in parts), "total [B]"),
        rows=tuple(rows),
        note="pages: whole ones, the partial last one included; streams: bf16; mixing: their fp32 coefficients.",
    )


def _links(layout: KVLayout, case: TrafficCase, modes: Sequence[str]) -> Table:
    hit = traffic.hit_tokens(layout, case.prompt, case.hit_rate)
    computed = traffic.computed_tokens(layout, case.prompt, hit)
    rows = []
    for mode in modes:
        size = traffic.handover_bytes(layout, case.prompt, mode)
        rows.append(
            (
                mode,
                traffic.handover_layer_tokens(layout, case.prompt, mode),
                _gb(traffic.emitted_rate(size, case.prefill_rate, case.prompt)),
                _gb(traffic.emitted_rate(size, case.prefill_rate, computed)),
                _gb(traffic.nonnegative("rate", case.rate) * size),
                plain_number(1000 * traffic.transfer_s(size, case.link, case.latency_s)),
                _gb(traffic.link_for(size, case.target_s, case.latency_s)),
            )
        )
    return Table(
        name="links",
        title=f"At {number_text(case.prefill_rate)} tokens/s a prefill node, {number_text(case.rate)} requests/s",
        columns=(
            "hand-over",
            "receiver computes [layer-tokens]",
            "a node emits, cold [GB/s]",
            "a node emits, with hits [GB/s]",
            "all requests [GB/s]",
            f"time at {number_text(Fraction(case.link) / GB)} GB/s [ms]",
            f"link for {number_text(case.target_s)} s [GB/s]",
        ),
        rows=tuple(rows),
    )


def _gb(rate: Fraction) -> int | float:
    return plain_number(rate / GB)


def traffic_figures(layout: KVLayout, case: TrafficCase) -> tuple[Figure, ...]:
    """Figures of the pool, of fetching against computing, and of the disks where the case has some.

    Source: the functions of `rorqual.planner.traffic`. Errors: InputError, as theirs.

    >>> from rorqual.config import presets
    >>> figures = {f.id: f for f in traffic_figures(KVLayout(presets.load("v4.1-flash")), TrafficCase())}
    >>> figures["break_even_link"].expression, figures["break_even_link"].shown
    ('890 x 20000', '17.8 MB/s')
    """
    return (*_pool(layout, case), *_break_even(layout, case))


def _pool(layout: KVLayout, case: TrafficCase) -> Iterator[Figure]:
    hit = traffic.hit_tokens(layout, case.prompt, case.hit_rate)
    yield from _work(layout, case, hit)
    page, size, rate = layout.page_tokens, layout.page_bytes, number_text(case.rate)
    read = traffic.pool_read_bytes(layout, hit)
    written = traffic.pool_write_bytes(layout, case.prompt, case.output, hit)
    yield bytes_figure("pool_read", read, "B", "hit / page x page bytes", f"{hit} / {page} x {size}")
    yield bytes_figure(
        "pool_read_rate", traffic.nonnegative("rate", case.rate) * read, "B/s", "rate x bytes read", f"{rate} x {read}"
    )
    yield bytes_figure(
        "pool_write",
        written,
        "B",
        "(floor((prompt + output) / page) - hit / page) x page bytes",
        f"(floor(({case.prompt} + {case.output}) / {page}) - {hit} / {page}) x {size}",
    )
    write_rate = traffic.nonnegative("rate", case.rate) * written
    yield bytes_figure("pool_write_rate", write_rate, "B/s", "rate x bytes written", f"{rate} x {written}")
    yield from _disk(case, write_rate)


def _work(layout: KVLayout, case: TrafficCase, hit: int) -> Iterator[Figure]:
    """What a hit saves and what its replay costs."""
    page, encoder = layout.page_tokens, layout.config.decoder_start
    replayed, exact = layout.replay_tokens(hit), layout.replay_tokens(hit, "exact")
    computed = traffic.computed_tokens(layout, case.prompt, hit)
    yield tokens_figure(
        "hit_tokens",
        hit,
        "floor(hit rate x prompt / page) x page, 0 if not above W",
        f"floor({number_text(case.hit_rate)} x {case.prompt} / {page}) x {page}",
    )
    yield tokens_figure("reused_tokens", hit - replayed, "hit - W replayed", f"{hit} - {replayed}")
    yield tokens_figure("computed_tokens", computed, "prompt - hit + W replayed", f"{case.prompt} - {hit} + {replayed}")
    bounded_cost = traffic.replay_layer_tokens(layout, hit)
    yield plain_figure("replay_cost", bounded_cost, "layer-tokens", "encoder layers x W", f"{encoder} x {replayed}")
    yield plain_figure(
        "replay_cost_exact",
        traffic.replay_layer_tokens(layout, hit, "exact"),
        "layer-tokens",
        "encoder layers x tokens replayed in exact mode",
        f"{encoder} x {exact}",
    )
    yield plain_figure(
        "prefill_nodes",
        traffic.nonnegative("rate", case.rate) / traffic.node_rate(case.prefill_rate, computed),
        "nodes",
        "rate x computed tokens / prefill rate",
        f"{number_text(case.rate)} x {computed} / {number_text(case.prefill_rate)}",
    )


def _break_even(layout: KVLayout, case: TrafficCase) -> Iterator[Figure]:
    token, rate, link = (number_text(value) for value in (layout.bytes_per_token, case.prefill_rate, case.link))
    yield bytes_figure(
        "break_even_link",
        traffic.break_even_link(layout, case.prefill_rate),
        "B/s",
        "bytes a token x prefill rate",
        f"{token} x {rate}",
    )
    shortest = traffic.shortest_fetch(layout, case.prefill_rate, case.link, case.latency_s)
    if shortest is not None:
        window, latency = layout.config.sliding_window, number_text(case.latency_s)
        yield tokens_figure(
            "shortest_fetch",
            shortest,
            "(latency + W / prefill rate) / (1 / prefill rate - bytes a token / link), up to a page above W",
            f"({latency} + {window} / {rate}) / (1 / {rate} - {token} / {link})",
        )


def _disk(case: TrafficCase, write_rate: Fraction) -> Iterator[Figure]:
    if case.disk is None:
        return
    shown = number_text(write_rate)
    daily = traffic.drive_writes_per_day(write_rate, case.disk)
    formula = "86400 x write rate / capacity"
    yield plain_figure("drive_writes_per_day", daily, "1/day", formula, f"86400 x {shown} / {case.disk}")
    if not write_rate:
        return
    full = Fraction(case.disk) / write_rate / traffic.DAY_S
    formula = "capacity / write rate / 86400: how long a page stays"
    yield plain_figure("disk_residence", full, "days", formula, f"{case.disk} / {shown} / 86400")
    life = None if case.endurance is None else traffic.disk_life_s(write_rate, case.endurance)
    if life is not None and case.endurance is not None:
        expression = f"{number_text(case.endurance)} / {shown} / 86400"
        yield plain_figure("disk_life", life / traffic.DAY_S, "days", "endurance / write rate / 86400", expression)


def figures_table(figures: Sequence[Figure], name: str = "figures", title: str = "Pool, break-even, disk") -> Table:
    """Figures as rows: id, exact value, unit, as it is read, formula, the formula with numbers. Source: the figures.

    >>> figures_table([tokens_figure("hit_tokens", 384, "h", "384")]).rows
    (('hit_tokens', 384, 'tokens', '384', 'h', '384'),)
    """
    rows = tuple((f.id, plain_number(f.value), f.unit, f.shown, f.formula, f.expression) for f in figures)
    return Table(name=name, title=title, columns=FIGURE_COLUMNS, rows=rows)


def plain_figure(name: str, value: int | Fraction, unit: str, formula: str, expression: str, shown: str = "") -> Figure:
    """A derived figure, shown to four digits unless its text is given. Unit and source: the caller's.

    >>> plain_figure("x", Fraction(1, 3), "1", "a / b", "1 / 3").shown
    '0.3333'
    """
    text = shown or (f"{round(value):,}" if value >= 1000 else f"{float(value):.4g}")
    return Figure(
        id=name, value=value, shown=text, unit=unit, formula=formula, expression=expression, provenance="derived"
    )


def tokens_figure(name: str, value: int, formula: str, expression: str) -> Figure:
    """A derived number of tokens. Source: the caller.

    >>> tokens_figure("x", 32_768, "a", "32768").shown
    '32.77 K'
    """
    return plain_figure(name, value, "tokens", formula, expression, count_text(value))


def bytes_figure(name: str, value: int | Fraction, unit: str, formula: str, expression: str) -> Figure:
    """A derived size or rate in decimal units; `unit` is B or B/s. Source: the caller.

    >>> bytes_figure("x", 17_800_000, "B/s", "a", "17800000").shown
    '17.8 MB/s'
    """
    return plain_figure(name, value, unit, formula, expression, decimal_bytes(value) + unit.removeprefix("B"))


def number_text(value: Number) -> str:
    """A number as formulas spell it: exact where it is whole. In the value's own unit; source: the caller.

    >>> number_text(Fraction(3, 2)), number_text(Fraction(4, 2))
    ('1.5', '2')
    """
    return str(plain_number(value))
