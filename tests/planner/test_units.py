"""Quantities to text and back: exact rounding, no unit mixed up, no number taken for another."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.errors import InputError
from rorqual.planner import units
from rorqual.planner.units import (
    binary_bytes,
    count_text,
    decimal_bytes,
    fixed_text,
    flops_text,
    number_text,
    parse_bytes,
    parse_token_list,
    parse_tokens,
    plain_number,
)

bounded = settings(max_examples=50, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("count", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1 kB", "1,000 B"),
        (1024, "1.02 kB", "1 KiB"),
        # Rounding does not print 1,000 MB for what is 1 GB.
        (999_999_999, "1 GB", "953.67 MiB"),
        (2**30 - 1, "1.07 GB", "1 GiB"),
        (-2_703_360, "-2.7 MB", "-2.58 MiB"),
        (5 * 10**21, "5,000 EB", "4,336.81 EiB"),
        (Fraction(7029, 2), "3.51 kB", "3.43 KiB"),
    ],
)
def test_bytes_as_text(count: int | Fraction, decimal: str, binary: str) -> None:
    assert (decimal_bytes(count), binary_bytes(count)) == (decimal, binary)


def test_the_same_count_as_parameters_and_as_flops() -> None:
    assert (count_text(22_011_707_392), flops_text(22_011_707_392)) == ("22.01 B", "22.01 G")
    assert (count_text(512), flops_text(0), count_text(1500, 0)) == ("512", "0", "2 K")


def test_rounding_is_exact_and_half_to_even() -> None:
    # 2.675 as a float is below 2.675: formatting it would give 2.67.
    assert fixed_text(Fraction(2675, 1000), 2) == "2.68"
    assert [fixed_text(Fraction(n, 2)) for n in (1, 3, 5)] == ["0", "2", "2"]
    assert fixed_text(10**24 + 1) == "1,000,000,000,000,000,000,000,001"
    assert (fixed_text(-0.004, 2), fixed_text(-0.006, 2)) == ("0.00", "-0.01")
    assert (number_text(100), number_text(Fraction(1, 3)), number_text(1000.5)) == ("100", "0.3333", "1,000.5")
    assert number_text(Fraction(1, 10**6)) == "0"


def test_plain_numbers() -> None:
    assert [plain_number(value) for value in (3, 0.5, Fraction(6, 2), Fraction(1, 4))] == [3, 0.5, 3, 0.25]
    assert type(plain_number(Fraction(6, 2))) is int


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("12", 12),
        (" 80 GB ", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5kB", 1500),
        ("2,703,360", 2_703_360),
        ("1e3", 1000),
        # E begins an exponent only before digits.
        ("1EB", 10**18),
        ("2 EiB", 2 * 2**60),
        ("1E3 EB", 10**21),
        ("0.5 MB", 500_000),
        ("0.3 KiB", 307),
    ],
)
def test_bytes_from_text(text: str, count: int) -> None:
    assert parse_bytes(text, "--memory") == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "-1",
        "1,5TB",
        "1,50,000",
        "1__000",
        "12_0",
        "80 gb",
        "80 G",
        "nan",
        "inf",
        "1/2",
        "1e999999999",
        "9" * 5000,
        "1 2",
        "٣",
        "0x10",
        "1.2.3",
    ],
)
def test_no_bytes(text: str) -> None:
    with pytest.raises(InputError, match=r"^--memory must be a number of bytes, 0 or more, with a unit of B, kB"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1_000", 1000),
        ("1,048,576", 2**20),
        ("128k", 128_000),
        ("128Ki", 2**17),
        ("1Mi", 2**20),
    ],
)
def test_tokens_from_text(text: str, tokens: int) -> None:
    assert parse_tokens(text, "--context") == tokens


@pytest.mark.parametrize(
    "text",
    ["", "M", "-1", "1.5M", "1,5", "4096,32768", "1__000", "1_0", ",1", "1iM", "1Gi", "1 M", "9" * 5000, "1kk", "²"],
)
def test_no_tokens(text: str) -> None:
    with pytest.raises(InputError, match=r"^--context must be a number of tokens such as"):
        parse_tokens(text, "--context")


def test_lists_of_tokens() -> None:
    assert parse_token_list([], "--context") == []
    assert parse_token_list(["4096,32768", " 512, 768 ", "1Mi"], "--context") == [4096, 32_768, 512, 768, 2**20]
    # One number as it is printed, or several: neither is guessed.
    with pytest.raises(
        InputError, match=r"^--context 1,048,576 may be one number or several; write 1048576 or '1, 048"
    ):
        parse_token_list(["1,048,576"], "--context")
    for text in ("", "4Ki,", ",", "4Ki,,8Ki", "4Ki;8Ki"):
        with pytest.raises(InputError, match=r"^--context must be a number of tokens such as"):
            parse_token_list([text], "--context")


@bounded
@given(count=st.integers(0, 10**20), write=st.sampled_from([decimal_bytes, binary_bytes]))
def test_what_is_printed_is_read_back(count: int, write: Callable[[int], str]) -> None:
    text = write(count)
    unit = units.SUFFIXES[text.split(" ")[1]]
    assert abs(parse_bytes(text, "bytes") - count) <= Fraction(unit, 200) + 1


@bounded
@given(counts=st.lists(st.integers(0, 10**18), min_size=2, max_size=2), digits=st.integers(0, 3))
def test_larger_counts_never_print_as_smaller(counts: list[int], digits: int) -> None:
    small, large = sorted(counts)
    assert parse_bytes(decimal_bytes(small, digits), "a") <= parse_bytes(decimal_bytes(large, digits), "b")
