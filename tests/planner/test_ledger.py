"""The ledger: the release byte for byte, its formulas evaluated, field cases 1-4, and the tensors themselves."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import CacheFormats, presets
from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.ledger import (
    context_table,
    crossing_table,
    crossing_tokens,
    entry_table,
    layer_table,
    ledger,
    residency_table,
    sequence_table,
    token_table,
)
from rorqual.planner.spelling import entries_per_token, per_token, row_formula, runs
from rorqual.planner.table import Table
from rorqual.planner.wrong_answers import recognise, wrong_table
from tests.planner.spelled import evaluate

RELEASE_CONFIG = presets.load("v4.1-flash")
RELEASE = KVLayout(RELEASE_CONFIG)


def variant(**changes: Any) -> KVLayout:
    return KVLayout(RELEASE_CONFIG.replace(**changes))


LAYOUTS: dict[str, KVLayout] = {
    "release": RELEASE,
    "no drafting": KVLayout(RELEASE_CONFIG, draft_rows=0),
    "large pages": KVLayout(RELEASE_CONFIG, page_tokens=1024),
    "tiny": KVLayout(presets.load("tiny")),
    "demo": KVLayout(presets.load("demo")),
    "mid": KVLayout(presets.load("mid")),
    "pair": KVLayout(presets.load("real-pair")),
    "bare": KVLayout(RELEASE_CONFIG.without("compression", "engram", "drafts", "vision")),
    "no Engram": KVLayout(RELEASE_CONFIG.without("engram")),
    "bf16": variant(cache=CacheFormats(main="bf16", index_key="bf16", window="bf16")),
    "fp32 and unscaled": variant(cache=CacheFormats(main="e2m1_unscaled", index_key="fp32", window="fp32")),
    "ratio 4": variant(compress_ratios=[4 if r == 2 else r for r in RELEASE_CONFIG.compress_ratios]),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def column(table: Table, name: str) -> list[Any]:
    return [row[table.columns.index(name)] for row in table.rows]


def test_layers_of_the_release() -> None:
    table = layer_table(RELEASE)
    assert column(table, "layer") == list(range(43))
    assert column(table, "part") == ["encoder"] * 20 + ["decoder"] * 20 + ["draft"] * 3
    increments = {layer: count for layer, count in enumerate(column(table, "increment [B/token]")) if count}
    assert increments == {2: 178, 8: 178, 14: 178, 20: 356}
    assert column(table, "window [B]") == [128 * 528] * 43
    assert column(table, "KV source")[2:5] == [2, 2, 2]
    assert {layer for layer, use in enumerate(column(table, "candidates")) if use == "user"} == {24, 28, 32, 36}


def test_draft_windows_are_kept_only_while_drafting() -> None:
    assert column(layer_table(KVLayout(RELEASE_CONFIG, draft_rows=0)), "window [B]")[39:] == [67_584, 0, 0, 0]


@every_layout
def test_layers_sum_to_the_layout(layout: KVLayout) -> None:
    table = layer_table(layout)
    assert sum(map(Fraction, column(table, "increment [B/token]"))) == layout.bytes_per_token
    windows = layout.window_bytes_logical + layout.draft_window_bytes
    assert sum(column(table, "window [B]")) == windows


@every_layout
def test_every_formula_gives_its_bytes(layout: KVLayout) -> None:
    pairs = [
        (entry_table(layout), "formula", "bytes [B]"),
        (token_table(layout), "formula", "bytes [B/token]"),
        (sequence_table(layout), "logical formula", "logical [B]"),
        (sequence_table(layout), "allocated formula", "allocated [B]"),
        (wrong_table(layout), "formula", "claimed [B/token]"),
    ]
    for table, formula, count in pairs:
        for spelled, value in zip(column(table, formula), column(table, count), strict=True):
            assert evaluate(spelled) == Fraction(value), (table.name, spelled)
    if layout.sources:
        for _, spelled, value, _ in crossing_table(layout).rows:
            assert float(evaluate(str(spelled))) == value


@every_layout
def test_sums_are_the_layouts(layout: KVLayout) -> None:
    sequence = sequence_table(layout)
    for name, whole in (
        ("logical [B]", layout.sequence_bytes_logical),
        ("allocated [B]", layout.sequence_bytes_allocated),
    ):
        assert column(sequence, name)[-1] == sum(column(sequence, name)[:-1]) == whole
    token = token_table(layout)
    for by in ("kind", "source"):
        parts = [Fraction(row[-1]) for row in token.rows if row[0] == by]
        assert sum(parts) == layout.bytes_per_token
    residency = residency_table(layout)
    assert sum(column(residency, "allocated [B/sequence]")) == layout.sequence_bytes_allocated
    assert sum(map(Fraction, column(residency, "bytes [B/token]"))) == layout.bytes_per_token


def test_formulas_follow_the_formats() -> None:
    assert column(entry_table(LAYOUTS["bf16"]), "formula") == ["512 x 2", "128 x 2", "1,024 + 256", "512 x 2"]
    wide = column(entry_table(LAYOUTS["fp32 and unscaled"]), "formula")
    assert wide == ["512 / 2", "128 x 4", "256 + 512", "512 x 4"]
    assert row_formula(RELEASE.window_format, "head_dim") == "head_dim + head_dim / 32"


def test_spelled_sums() -> None:
    assert (runs([7]), runs([3, 5, 3])) == ("7", "2 x 3 + 5")
    assert (per_token([]), per_token([1, 4, 4])) == ("0", "1 / 1 + 2 / 4")
    assert entries_per_token(LAYOUTS["ratio 4"]) == Fraction(7, 4)
    assert entries_per_token(LAYOUTS["bare"]) == 0


def test_a_config_without_global_kv_drafts_and_engram() -> None:
    layout = LAYOUTS["bare"]
    names = ["layers", "entries", "token", "sequence", "contexts", "residency"]
    assert [table.name for table in ledger(layout)] == names
    assert column(entry_table(layout), "row") == ["window row"]
    assert column(sequence_table(layout), "state") == ["windows", "sum"]
    assert column(context_table(layout, [10**6]), "total [B]") == [2_703_360]
    assert column(residency_table(layout), "pool") == ["no"]
    assert all(use is None for use in column(layer_table(layout), "KV source"))
    with pytest.raises(InputError, match=r"^no layer stores global KV"):
        crossing_tokens(layout)


def test_crossing() -> None:
    assert crossing_tokens(RELEASE) == Fraction(2_703_360, 890)
    before, after = (context_table(RELEASE, [tokens]).rows[0] for tokens in (3036, 3038))
    assert before[1] < 2_703_360 < after[1]


def test_planned_length_does_not_change_bytes_a_token() -> None:
    """Field case 1."""
    sums = set()
    for length in (4096, 131_072, 2**20):
        layout = variant(max_position_embeddings=length)
        sums.add((token_table(layout).rows[-1][-1], sequence_table(layout).rows[-1][-2]))
    assert sums == {(890, 3_085_504)}


def test_bytes_are_not_linear_in_the_tokens() -> None:
    """Field case 2: groups that are still filling are in the tail, pages are whole."""
    rows = context_table(RELEASE, [0, 1, 128, 129, 10**6]).rows
    assert [row[1] for row in rows] == [0, 356, 113_920, 114_276, 890_000_000]
    assert [row[2] for row in rows] == [0, 113_920, 113_920, 227_840, 7813 * 113_920]
    assert [row[6] for row in rows] == [2_918_424 + row[1] for row in rows]
    assert [row[7] for row in rows] == [3_085_504 + row[2] for row in rows]


def test_only_whole_pages_go_to_the_pool() -> None:
    """Field case 3: what is resident does not depend on a pool, and the pool gets no fixed bytes."""
    table = residency_table(RELEASE)
    assert column(table, "device") == ["yes"] * 5
    assert [row[0] for row in table.rows if row[2] == "yes"] == ["global KV"]


def test_wrong_answers() -> None:
    """Field case 4, each computed another way than the table does."""
    claimed = column(wrong_table(RELEASE), "claimed [B/token]")
    assert claimed == [18 * 178 + 20 * 356, 40 * 2 * 512 * 2, 40 * 512, 2.5 * (256 + 64)]
    assert claimed == [10_324, 81_920, 20_480, 800]
    named = {recognise(RELEASE, total) for total in claimed}
    assert len(named) == 4 and None not in named
    assert recognise(RELEASE, 890) is None
    assert recognise(RELEASE, 891) is None
    assert column(wrong_table(RELEASE), "times the truth")[1] == 81_920 / 890


def test_a_mistake_that_is_none_is_not_listed() -> None:
    unscaled = variant(cache=CacheFormats(main="e2m1_unscaled", index_key="e2m1_unscaled"))
    assert column(wrong_table(unscaled), "claimed [B/token]") == [(9 + 20) * 320, 81_920, 20_480]
    assert recognise(unscaled, 800) is None


def test_contexts_beyond_the_model_say_so() -> None:
    assert "1,048,576" in context_table(RELEASE, [2**20 + 1]).note
    assert context_table(RELEASE, [2**20]).note == ""
    with pytest.raises(InputError, match="tokens must be an integer of 0 or more"):
        context_table(RELEASE, [-1])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(tokens=st.integers(0, 2**20), more=st.integers(0, 5000), name=st.sampled_from(sorted(LAYOUTS)))
def test_bytes_grow_with_the_context_and_pages_cover_them(tokens: int, more: int, name: str) -> None:
    layout = LAYOUTS[name]
    earlier, later = context_table(layout, [tokens, tokens + more]).rows
    for index in (1, 2, 6, 7, 9):
        assert earlier[index] <= later[index]
    assert earlier[1] <= earlier[2] and earlier[6] <= earlier[7]
    assert earlier[2] - earlier[1] < layout.page_bytes or not layout.sources


@pytest.mark.parametrize("name", ["tiny", "demo"])
@pytest.mark.parametrize("without", [(), ("drafts",), ("engram", "compression")], ids=["all", "no drafts", "windows"])
def test_the_ledger_is_what_the_cache_allocates(name: str, without: tuple[str, ...]) -> None:
    """Against the tensors of a real cache: pages, and each state of a slot."""
    from rorqual.cache.kv_cache import KVCache

    config = presets.load(name).without(*without)
    layout = KVLayout(config)
    cache = KVCache(config, layout, pages=3, slots=2)
    tensors = {
        "windows": [cache.slots.rings.data],
        "draft windows": [cache.slots.draft_rings.data],
        "tails": list(cache.slots.tails),
        "Engram history": [cache.slots.history],
    }
    table = sequence_table(layout)
    allocated = dict(zip(column(table, "state"), column(table, "allocated [B]"), strict=True))
    for state, parts in tensors.items():
        assert sum(part.untyped_storage().nbytes() for part in parts) == 2 * allocated.get(state, 0), state
    assert sum(allocated[state] for state in tensors if state in allocated) == allocated["sum"]
    (context,) = context_table(layout, [3 * layout.page_tokens]).rows
    assert cache.pages.pool.untyped_storage().nbytes() == context[2] == context[1]
    assert cache.nbytes == context[7] + allocated["sum"]
