"""Row formats: the ranges the field quotes follow from the rows, for the release and for any config."""

from __future__ import annotations

from fractions import Fraction

import pytest

from rorqual.config import CacheFormats, presets
from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.storage import (
    STORAGES,
    USERS,
    bytes_per_token,
    global_bytes_logical,
    page_bytes,
    range_text,
    row_format,
    row_formats,
    slot_bytes,
    slot_bytes_logical,
)

CONFIG = presets.load("v4.1-flash")
RELEASE = KVLayout(CONFIG)


def test_the_ranges_of_the_release() -> None:
    entries = Fraction(5, 2)  # three sources of ratio 2 and one of ratio 1
    v4_row = 448 + 2 * 64 + 8
    assert v4_row == 584
    fp8_row = 512 + 512 // 32
    expected = {
        "packed": [entries * (288 + 68)],
        "fp8-uniform": [entries * (fp8_row + 68), entries * (fp8_row + 132)],
        "v4-rows": [entries * (v4_row + 68), entries * (v4_row + 132)],
        "bf16": [entries * (1024 + 256)],
    }
    got = {
        storage: [bytes_per_token(RELEASE, rows) for rows in row_formats(RELEASE) if rows.storage == storage]
        for storage in STORAGES
    }
    assert (
        got
        == expected
        == {
            "packed": [890],
            "fp8-uniform": [1490, 1650],
            "v4-rows": [1630, 1790],
            "bf16": [3200],
        }
    )
    assert [range_text(RELEASE, storage) for storage in STORAGES] == ["890", "1,490-1,650", "1,630-1,790", "3,200"]
    assert set(USERS) == set(STORAGES)
    assert all("not verified here" in USERS[storage] for storage in STORAGES[1:])


@pytest.mark.parametrize(
    "layout",
    [
        RELEASE,
        KVLayout(CONFIG, page_tokens=1024, draft_rows=0),
        KVLayout(presets.load("tiny"), page_tokens=16),
        KVLayout(presets.load("mid")),
        KVLayout(CONFIG.replace(cache=CacheFormats(main="bf16", index_key="fp32", window="bf16"))),
        KVLayout(CONFIG.without("compression")),
    ],
)
def test_packed_rows_are_what_the_layout_allocates(layout: KVLayout) -> None:
    packed = row_format(layout, "packed")
    assert page_bytes(layout, packed) == layout.page_bytes
    assert slot_bytes(layout, packed) == layout.sequence_bytes_allocated
    assert slot_bytes_logical(layout, packed) == layout.sequence_bytes_logical
    assert bytes_per_token(layout, packed) == layout.bytes_per_token
    for tokens in (0, 1, 2, 129, 10**6):
        assert global_bytes_logical(layout, packed, tokens) == layout.global_bytes_logical(tokens)


def test_wider_windows_widen_the_slots() -> None:
    # 40 rings of 133 rows and 3 draft windows of 128; tails and history are the same in all storages.
    window_rows = 40 * 133 + 3 * 128
    rest = RELEASE.sequence_bytes_allocated - window_rows * 528
    assert rest == 73_728 + 64
    assert slot_bytes(RELEASE, row_format(RELEASE, "v4-rows")) == window_rows * 584 + rest
    assert slot_bytes(RELEASE, row_format(RELEASE, "bf16")) == window_rows * 1024 + rest
    assert slot_bytes_logical(RELEASE, row_format(RELEASE, "bf16")) == 43 * 128 * 1024 + 12_288 + 24


def test_the_larger_index_key_is_planned_with() -> None:
    assert row_format(RELEASE, "fp8-uniform").index == 128 + 4
    assert row_format(RELEASE, "v4-rows").index == 132
    with pytest.raises(InputError, match=r"^--storage must be one of packed, fp8-uniform, v4-rows, bf16; got 'fp8'"):
        row_format(RELEASE, "fp8")
