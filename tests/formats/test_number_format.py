"""Formats without torch: bytes, legal widths, names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rorqual.errors import FormatError
from rorqual.formats.spec import (
    BF16,
    E2M1_E4M3_16,
    E2M1_E8M0_32,
    E2M1_UNSCALED,
    E4M3_E8M0_32,
    FORMATS,
    FP32,
    NumberFormat,
)


@pytest.mark.parametrize(
    ("fmt", "width", "codes", "scales"),
    [
        (E2M1_E4M3_16, 512, 256, 32),
        (E2M1_E8M0_32, 128, 64, 4),
        (E4M3_E8M0_32, 512, 512, 16),
        (E2M1_UNSCALED, 512, 256, 0),
        (BF16, 512, 1024, 0),
        (FP32, 3, 12, 0),
    ],
    ids=lambda value: value.name if isinstance(value, NumberFormat) else str(value),
)
def test_row_bytes_are_codes_and_scales(fmt: NumberFormat, width: int, codes: int, scales: int) -> None:
    assert (fmt.code_bytes(width), fmt.scale_bytes(width), fmt.row_bytes(width)) == (codes, scales, codes + scales)
    assert fmt.width_of(codes + scales) == width


def test_row_bytes_of_the_release() -> None:
    assert E2M1_E4M3_16.row_bytes(512) == 288
    assert E2M1_E8M0_32.row_bytes(128) == 68
    assert E4M3_E8M0_32.row_bytes(512) == 528
    # SPEC 11: three sources of ratio 2 and one of ratio 1.
    assert 3 * (288 + 68) // 2 + 288 + 68 == 890


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_illegal_widths_name_the_multiple(fmt: NumberFormat) -> None:
    illegal = [0, -fmt.width_multiple] + ([fmt.width_multiple // 2, fmt.width_multiple + 1] * (fmt.width_multiple > 1))
    for width in illegal:
        for method in (fmt.code_bytes, fmt.scale_bytes, fmt.row_bytes):
            with pytest.raises(FormatError, match=f"width {width} .* multiple of {fmt.width_multiple}$"):
                method(width)


def test_width_of_refuses_a_fraction_of_a_row() -> None:
    for row_bytes in (0, 8, 10, 289):
        with pytest.raises(FormatError, match="positive multiple of 9"):
            E2M1_E4M3_16.width_of(row_bytes)


def test_formats_are_keyed_by_their_own_distinct_names() -> None:
    assert all(name == fmt.name for name, fmt in FORMATS.items())
    assert len({(fmt.value, fmt.scale, fmt.group) for fmt in FORMATS.values()}) == len(FORMATS) == 6
    assert E2M1_E4M3_16.name != E2M1_E8M0_32.name
    with pytest.raises(TypeError):
        FORMATS["fp4"] = FP32  # type: ignore[index]


@pytest.mark.parametrize(
    "arguments",
    [
        {"value": "e4m3", "scale": "e4m3", "group": 16},
        {"value": "e2m1", "scale": "e8m0", "group": 1},
        {"value": "e2m1", "scale": "e8m0", "group": 15},
        {"value": "bf16", "group": 32},
        {"value": "e5m2"},
    ],
)
def test_impossible_formats_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(FormatError, match=r"^format odd"):
        NumberFormat(name="odd", **arguments)  # type: ignore[arg-type]


def test_spec_needs_no_torch() -> None:
    program = "import sys, rorqual.formats.spec; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
