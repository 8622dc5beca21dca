"""The device table: figures as published, the user's own in their place, nothing made up."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rorqual.errors import InputError
from rorqual.planner.devices import DEVICES, device_table, find_device, rate


def test_the_table_is_complete_and_sourced() -> None:
    assert list(DEVICES) == ["h100", "h200", "b200", "gb300", "mi300x", "mi350x", "rtx5090", "m3ultra", "cpu"]
    for name, device in DEVICES.items():
        assert device.name == name
        assert name == "cpu" or re.search(r"\(20\d\d\)", device.source), name
        assert "http" not in device.source
    table = device_table()
    assert [row[0] for row in table.rows] == list(DEVICES)
    assert all("[" in column for column in table.columns[2:7])


@pytest.mark.parametrize(
    ("name", "gigabytes", "terabytes_a_second", "bf16", "fp8", "fp4"),
    [
        ("h100", 80, 3.35, 1979 / 2, 3958 / 2, None),
        ("h200", 141, 4.8, 1979 / 2, 3958 / 2, None),
        ("b200", 1440 / 8, 64 / 8, 36_000 / 8 / 2, 72_000 / 8 / 2, 144_000 / 8 / 2),
        ("gb300", 288, 8, 360_000 / 72 / 2, 720_000 / 72 / 2, 15_000),
        ("mi300x", 192, 5.3, 1307.4, 2614.9, None),
        ("mi350x", 288, 8, 2300, 4600, 9200),
        ("rtx5090", 32, 1.792, 209.5, 419, 1676),
        ("m3ultra", 512, 0.819, None, None, None),
    ],
)
def test_published_figures(
    name: str, gigabytes: float, terabytes_a_second: float, bf16: float | None, fp8: float | None, fp4: float | None
) -> None:
    """TFLOP/s; where a data sheet gives systems or sparsity, divided as the source says."""
    device = DEVICES[name]
    assert device.memory == gigabytes * 10**9
    assert device.bandwidth == pytest.approx(terabytes_a_second * 10**12)
    for got, published in ((device.bf16, bf16), (device.fp8, fp8), (device.fp4, fp4)):
        if published is None:
            assert got is None
        else:
            assert got is not None
            assert 0 <= published - got / 10**12 < 1


def test_a_missing_width_runs_at_the_next_wider_one() -> None:
    assert rate(DEVICES["h100"], "fp4") == DEVICES["h100"].fp8
    assert rate(DEVICES["gb300"], "fp4") == DEVICES["gb300"].fp4
    own = find_device("cpu", memory=1, bf16=2 * 10**12)
    assert rate(own, "fp4") == rate(own, "fp8") == rate(own, "bf16") == 2 * 10**12
    assert rate(DEVICES["m3ultra"], "bf16") is None


def test_the_users_figures() -> None:
    own = find_device("H200", memory=150 * 10**9, bandwidth=4 * 10**12)
    assert (own.memory, own.bandwidth, own.fp8) == (150 * 10**9, 4 * 10**12, DEVICES["h200"].fp8)
    assert DEVICES["h200"].memory == 141 * 10**9
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("a100", {}, r"^--device must be one of h100, .*; got 'a100'"),
        ("cpu", {}, r"^--device cpu has no published size; give --memory"),
        ("h200", {"memory": 0}, r"^--memory must be above 0; got 0"),
        ("h200", {"bandwidth": -1}, r"^--bandwidth must be above 0"),
        ("h200", {"bf16": 0}, r"^--flops must be above 0"),
    ]
    for name, options, message in cases:
        with pytest.raises(InputError, match=message):
            find_device(name, **options)
