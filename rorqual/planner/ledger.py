"""The cache of one config, every byte with its formula: layers, entries, tokens, a sequence, contexts.

Two lifetimes that are never divided into each other: bytes a token (global KV) and bytes a sequence (windows, tails,
history), which do not grow. A pool planned for 4 K and for 1 M therefore costs the same bytes a token. Within each,
*logical* bytes are what the mathematics needs and *allocated* bytes what `rorqual.cache` makes, tensor for tensor.
All numbers are `KVLayout`'s; here they are laid out and spelled. Source: the release's config and SPEC 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rorqual.config import LayerRole
from rorqual.errors import InputError
from rorqual.layout import FP32_BYTES, HISTORY_ID_BYTES, TAIL_TENSORS, KVLayout
from rorqual.planner.spelling import entries_per_token, per_token, row_formula, total
from rorqual.planner.table import Cell, Table
from rorqual.planner.units import binary_bytes, decimal_bytes, fixed_text, number_text, plain_number
from rorqual.planner.wrong_answers import wrong_table

CONTEXTS = (4096, 32_768, 131_072, 10**6, 1 << 20)


def ledger(layout: KVLayout, contexts: Sequence[int] = ()) -> tuple[Table, ...]:
    """The whole ledger in bytes: every table below, in reading order. Source: SPEC 11.

    contexts: tokens of one sequence; without any, those of `CONTEXTS` that the model reaches.

    >>> from rorqual.config import presets
    >>> [table.name for table in ledger(KVLayout(presets.load("v4.1-flash")))]
    ['layers', 'entries', 'token', 'sequence', 'contexts', 'crossing', 'residency', 'wrong_answers']

    Raises:
        InputError: a negative context.
    """
    return (
        layer_table(layout),
        entry_table(layout),
        token_table(layout),
        sequence_table(layout),
        context_table(layout, contexts or default_contexts(layout)),
        *([crossing_table(layout)] if layout.sources else []),
        residency_table(layout),
        *([wrong_table(layout)] if layout.sources else []),
    )


def default_contexts(layout: KVLayout) -> tuple[int, ...]:
    """Tokens: those of `CONTEXTS` up to `max_position_embeddings`, or that alone. Source: the config.

    >>> from rorqual.config import presets
    >>> default_contexts(KVLayout(presets.load("v4.1-flash")))
    (4096, 32768, 131072, 1000000, 1048576)
    >>> default_contexts(KVLayout(presets.load("tiny")))
    (1024,)
    """
    longest = layout.config.max_position_embeddings
    return tuple(tokens for tokens in CONTEXTS if tokens <= longest) or (longest,)


def layer_table(layout: KVLayout) -> Table:
    """One row a layer, the drafts last: who computes, who shares, bytes a token and bytes of window. Source: SPEC 1.

    >>> from rorqual.config import presets
    >>> table = layer_table(KVLayout(presets.load("v4.1-flash")))
    >>> [table.rows[i][-2] for i in (0, 2, 3, 20)], table.rows[0][-1]
    ([0, 178, 0, 356], 67584)
    """
    rows = tuple(_layer_row(layout, role) for role in layout.config.roles)
    columns = ("layer", "part", "mode", "ratio", "KV source", "index source", "candidates", "Engram table")
    return Table(
        name="layers",
        title="Layers: what each adds to the cache",
        columns=(*columns, "increment [B/token]", "window [B]"),
        rows=rows,
        note="The ratio names the cache that a layer reads; only a KV source (mode full) adds to it.",
    )


def entry_table(layout: KVLayout) -> Table:
    """Bytes of one entry of global KV and of one window row, from the formats of the config. Source: SPEC 2.

    >>> from rorqual.config import presets
    >>> for row in entry_table(KVLayout(presets.load("v4.1-flash"))).rows:
    ...     print(row[0], "=", row[-2], "=", row[-1])
    main entry = 512 / 2 + 512 / 16 = 288
    index key = 128 / 2 + 128 / 32 = 68
    entry = 288 + 68 = 356
    window row = 512 + 512 / 32 = 528
    """
    config, main, index = layout.config, layout.main_format, layout.index_format
    rows: list[tuple[Cell, ...]] = []
    if layout.sources:
        bytes_of = main.row_bytes(config.head_dim), index.row_bytes(config.index_head_dim)
        widths = config.head_dim, config.index_head_dim
        rows = [
            ("main entry", main.name, widths[0], row_formula(main, widths[0]), bytes_of[0]),
            ("index key", index.name, widths[1], row_formula(index, widths[1]), bytes_of[1]),
            ("entry", "both", sum(widths), total(bytes_of), sum(bytes_of)),
        ]
    window = layout.window_format
    formula = row_formula(window, config.head_dim)
    rows.append(("window row", window.name, config.head_dim, formula, layout.window_row_bytes))
    return Table(
        name="entries",
        title="Entries: bytes of one row of each cache",
        columns=("row", "format", "elements", "formula", "bytes [B]"),
        rows=tuple(rows),
    )


def token_table(layout: KVLayout) -> Table:
    """Bytes of global KV that a token adds, summed by kind and again by source. Source: SPEC 11.

    >>> from rorqual.config import presets
    >>> for row in token_table(KVLayout(presets.load("v4.1-flash"))).rows:
    ...     print(row[1], "=", row[-2], "=", row[-1])
    main KV = (3 / 2 + 1 / 1) x 288 = 720
    index keys = (3 / 2 + 1 / 1) x 68 = 170
    3 sources of ratio 2 = 3 x 356 / 2 = 534
    1 source of ratio 1 = 1 x 356 / 1 = 356
    global KV = 720 + 170 = 890
    """
    rows = [*_rows_by_kind(layout), *_rows_by_ratio(layout)]
    parts = [Fraction(row[-1]) for row in _rows_by_kind(layout) if isinstance(row[-1], int | float)]
    rows.append(("sum", "global KV", total(parts), plain_number(layout.bytes_per_token)))
    page = f"A page of {layout.page_tokens:,} tokens: {layout.page_bytes:,} B of every source together."
    return Table(
        name="token",
        title="A token: global KV, which grows with the context",
        columns=("by", "part", "formula", "bytes [B/token]"),
        rows=tuple(rows),
        note=page if layout.sources else "No layer stores global KV: the cache does not grow with the context.",
    )


def sequence_table(layout: KVLayout) -> Table:
    """Bytes that a sequence holds whatever its length, logical and as a slot allocates them. Source: SPEC 11.

    >>> from rorqual.config import presets
    >>> for row in sequence_table(KVLayout(presets.load("v4.1-flash"))).rows:
    ...     print(row[0], row[2], row[3], row[5], row[6])
    windows 2703360 2.58 MiB 2808960 2.68 MiB
    draft windows 202752 198 KiB 202752 198 KiB
    tails 12288 12 KiB 73728 72 KiB
    Engram history 24 24 B 64 64 B
    sum 2918424 2.78 MiB 3085504 2.94 MiB
    """
    states = [*_windows(layout), *_tails(layout), *_history(layout)]
    logical, allocated = [state[2] for state in states], [state[4] for state in states]
    states.append(("sum", total(logical), sum(logical), total(allocated), sum(allocated)))
    rows = [
        (name, formula, need, binary_bytes(need), how, made, binary_bytes(made))
        for name, formula, need, how, made in states
    ]
    return Table(
        name="sequence",
        title="A sequence: fixed bytes, whatever its length",
        columns=(
            "state",
            "logical formula",
            "logical [B]",
            "logical [binary]",
            "allocated formula",
            "allocated [B]",
            "allocated [binary]",
        ),
        rows=tuple(rows),
        note=f"Allocated: {layout.draft_rows} rows more a ring, so that a rejected draft can be taken back."
        if layout.draft_rows
        else "",
    )


def context_table(layout: KVLayout, contexts: Sequence[int]) -> Table:
    """Bytes of one sequence at each context: global, windows and all fixed state, logical and allocated.

    Source: SPEC 11. Global KV is a step function of the tokens, in pages a coarser one.

    >>> from rorqual.config import presets
    >>> table = context_table(KVLayout(presets.load("v4.1-flash")), [1, 129, 1_000_000])
    >>> [(row[1], row[2], row[6]) for row in table.rows]
    [(356, 113920, 2918780), (114276, 227840, 3032700), (890000000, 890056960, 892918424)]

    Raises:
        InputError: a negative context.
    """
    longest = layout.config.max_position_embeddings
    beyond = f"max_position_embeddings is {longest:,}: beyond it these bytes are arithmetic, not a promise."
    return Table(
        name="contexts",
        title="Contexts: one sequence",
        columns=(
            "context [tokens]",
            "global KV [B]",
            "global KV in pages [B]",
            "windows [B]",
            "fixed [B]",
            "fixed, allocated [B]",
            "total [B]",
            "total, allocated [B]",
            "total [decimal]",
            "global share [%]",
        ),
        rows=tuple(_context_row(layout, tokens) for tokens in contexts),
        note=beyond if any(tokens > longest for tokens in contexts) else "",
    )


def crossing_tokens(layout: KVLayout) -> Fraction:
    """Tokens at which global KV has as many bytes as the windows: below them windows cost more. Source: SPEC 11.

    >>> from rorqual.config import presets
    >>> round(float(crossing_tokens(KVLayout(presets.load("v4.1-flash")))), 1)
    3037.5

    Raises:
        InputError: there is no global KV, so nothing ever crosses.
    """
    if not layout.sources:
        raise InputError("no layer stores global KV (every compress_ratio is 0): it never crosses the windows")
    return layout.window_bytes_logical / layout.bytes_per_token


def crossing_table(layout: KVLayout) -> Table:
    """Tokens at which global KV overtakes the windows, and all that a slot allocates. Source: `crossing_tokens`.

    >>> from rorqual.config import presets
    >>> [(row[1], row[3]) for row in crossing_table(KVLayout(presets.load("v4.1-flash"))).rows]
    [('2,703,360 / 890', '3,037.5'), ('3,085,504 / 890', '3,466.9')]

    Raises:
        InputError: there is no global KV.
    """
    crossing_tokens(layout)
    per, spelled = layout.bytes_per_token, number_text(layout.bytes_per_token)
    windows, slot = layout.window_bytes_logical, layout.sequence_bytes_allocated
    return Table(
        name="crossing",
        title="Crossing: where global KV overtakes the fixed bytes",
        columns=("global KV equals", "formula", "context [tokens]", "rounded"),
        rows=tuple(
            (name, f"{count:,} / {spelled}", plain_number(count / per), fixed_text(count / per, 1))
            for name, count in (("the windows", windows), ("all that a slot allocates", slot))
        ),
    )


def residency_table(layout: KVLayout) -> Table:
    """What lives in device memory and what goes to the pool, in bytes a token and bytes a sequence. Source: SPEC 11.

    Only whole pages are persisted; everything else is made again from the prompt, so a pool adds no fixed bytes.

    >>> from rorqual.config import presets
    >>> for row in residency_table(KVLayout(presets.load("v4.1-flash"))).rows:
    ...     print(*row[:5])
    global KV yes yes 890 0
    windows yes no 0 2808960
    draft windows yes no 0 202752
    tails yes no 0 73728
    Engram history yes no 0 64
    """
    window = f"replay of the last {layout.config.sliding_window:,} tokens below the hit"
    states: list[tuple[str, int, str]] = [
        ("windows", layout.window_bytes_allocated, window),
        ("draft windows", layout.draft_window_bytes, window),
        ("tails", layout.tail_bytes, "nothing: a page ends with whole groups"),
        ("Engram history", layout.history_bytes, "the last token ids of the prompt"),
    ]
    per_token_bytes = plain_number(layout.bytes_per_token)
    rows: list[tuple[Cell, ...]] = []
    if layout.sources:
        rows.append(("global KV", "yes", "yes", per_token_bytes, 0, "the pool, page by page"))
    rows += [(name, "yes", "no", 0, count, how) for name, count, how in states if count]
    fixed = layout.sequence_bytes_allocated
    return Table(
        name="residency",
        title="Resident against persisted",
        columns=("state", "device", "pool", "bytes [B/token]", "allocated [B/sequence]", "after a hit it comes from"),
        rows=tuple(rows),
        note=f"Device: {per_token_bytes:,} B/token and {fixed:,} B/sequence. Pool: {per_token_bytes:,} B/token alone.",
    )


def _layer_row(layout: KVLayout, role: LayerRole) -> tuple[Cell, ...]:
    increment = layout.source(role.layer_id).bytes_per_token if role.is_kv_source else Fraction(0)
    kept = role.draft_index is None or role.draft_index < layout.draft_layers
    return (
        role.layer_id,
        str(role.part),
        str(role.mode),
        role.ratio,
        role.kv_source,
        role.index_source,
        "source" if role.is_candidate_source else "user" if role.uses_candidates else None,
        role.engram_index,
        plain_number(increment),
        layout.config.sliding_window * layout.window_row_bytes if kept else 0,
    )


def _rows_by_kind(layout: KVLayout) -> list[tuple[Cell, ...]]:
    if not layout.sources:
        return []
    entries, config = entries_per_token(layout), layout.config
    spelled = per_token(source.ratio for source in layout.sources)
    kinds = (
        ("main KV", layout.main_format.row_bytes(config.head_dim)),
        ("index keys", layout.index_format.row_bytes(config.index_head_dim)),
    )
    return [("kind", name, f"({spelled}) x {count:,}", plain_number(entries * count)) for name, count in kinds]


def _rows_by_ratio(layout: KVLayout) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for ratio in dict.fromkeys(source.ratio for source in layout.sources):
        alike = [source for source in layout.sources if source.ratio == ratio]
        name = f"{len(alike)} source{'s' if len(alike) > 1 else ''} of ratio {ratio}"
        formula = per_token([ratio] * len(alike), alike[0].entry_bytes)
        rows.append(("source", name, formula, plain_number(sum(source.bytes_per_token for source in alike))))
    return rows


_State = tuple[str, str, int, str, int]
"""Name; formula and bytes as the mathematics needs them; formula and bytes as a slot allocates them."""


def _windows(layout: KVLayout) -> list[_State]:
    config, row, drafts = layout.config, layout.window_row_bytes, layout.draft_rows
    layers, window = config.num_hidden_layers, config.sliding_window
    ring = f"({window:,} + {drafts})" if drafts else f"{window:,}"
    needed, made = layout.window_bytes_logical, layout.window_bytes_allocated
    states = [("windows", f"{layers} x {window:,} x {row:,}", needed, f"{layers} x {ring} x {row:,}", made)]
    if layout.draft_layers:
        formula, count = f"{layout.draft_layers} x {window:,} x {row:,}", layout.draft_window_bytes
        states.append(("draft windows", formula, count, formula, count))
    return states


def _tails(layout: KVLayout) -> list[_State]:
    """fp32 rows x Wkv and x Wgate of a group that is still filling; a ratio of 1 has none."""
    if not layout.tail_bytes_logical:
        return []
    size = f"{TAIL_TENSORS} x {layout.config.head_dim:,} x {FP32_BYTES}"
    ratios = [source.ratio for source in layout.sources if source.ratio > 1]
    alike = [(ratios.count(ratio), ratio) for ratio in dict.fromkeys(ratios)]
    needed = " + ".join(f"{count} x ({ratio} - 1) x {size}" for count, ratio in alike)
    made = needed.replace(" - 1)", f" - 1 + {layout.draft_rows})") if layout.draft_rows else needed
    return [("tails", needed, layout.tail_bytes_logical, made, layout.tail_bytes)]


def _history(layout: KVLayout) -> list[_State]:
    """Compressed ids, int64, that the next n-gram looks back on."""
    if not layout.history_rows:
        return []
    needed = f"({layout.config.engram_max_ngram_size} - 1) x {HISTORY_ID_BYTES}"
    drafts = f"({layout.config.engram_max_ngram_size} - 1 + {layout.draft_rows}) x {HISTORY_ID_BYTES}"
    logical = layout.history_rows_logical * HISTORY_ID_BYTES
    return [("Engram history", needed, logical, drafts if layout.draft_rows else needed, layout.history_bytes)]


def _context_row(layout: KVLayout, tokens: int) -> tuple[Cell, ...]:
    logical, paged = layout.global_bytes_logical(tokens), layout.global_bytes_allocated(tokens)
    fixed, slot = layout.sequence_bytes_logical, layout.sequence_bytes_allocated
    whole = logical + fixed
    share = 100 * logical / whole
    windows = layout.window_bytes_logical
    return tokens, logical, paged, windows, fixed, slot, whole, paged + slot, decimal_bytes(whole), share
