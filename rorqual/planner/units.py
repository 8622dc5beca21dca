"""Quantities as text. Decimal units (MB, GB) unless binary ones (MiB, GiB) are asked for; never both in one text."""

from __future__ import annotations

from fractions import Fraction

from rorqual.errors import InputError

Number = int | float | Fraction

DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
COUNTS = ("", "K", "M", "B", "T")
SUFFIXES = {name: 1000**power for power, name in enumerate(DECIMAL)} | {
    name: 1024**power for power, name in enumerate(BINARY)
}


def decimal_bytes(count: Number, digits: int = 2) -> str:
    """Bytes in units of 1000.

    >>> decimal_bytes(890), decimal_bytes(890_000_000), decimal_bytes(2_703_360)
    ('890 B', '890 MB', '2.7 MB')
    """
    return _scaled(count, 1000, DECIMAL, digits)


def binary_bytes(count: Number, digits: int = 2) -> str:
    """Bytes in units of 1024.

    >>> binary_bytes(2_703_360), binary_bytes(890 * 2**20)
    ('2.58 MiB', '890 MiB')
    """
    return _scaled(count, 1024, BINARY, digits)


def count_text(count: Number, digits: int = 2) -> str:
    """A count of parameters, FLOPs or tokens in units of 1000: K, M, B (10^9), T.

    >>> count_text(15_472_910_336), count_text(384)
    ('15.47 B', '384')
    """
    return _scaled(count, 1000, COUNTS, digits).rstrip()


def plain_number(value: Number) -> int | float:
    """A whole number as an int, else a float: what JSON and tables can hold.

    >>> plain_number(Fraction(890)), plain_number(Fraction(7, 2))
    (890, 3.5)
    """
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def parse_bytes(text: str, name: str) -> int:
    """Bytes from a number with or without a unit; the inverse of what is printed.

    >>> parse_bytes("80GB", "--memory"), parse_bytes("1.5 GiB", "--memory"), parse_bytes("4096", "--memory")
    (80000000000, 1610612736, 4096)

    Raises:
        InputError: no number, a negative one, or an unknown unit; the message names `name` and the units.
    """
    stripped = text.strip()
    unit = stripped.lstrip("0123456789.+-eE_ ")
    number = stripped[: len(stripped) - len(unit)].strip()
    try:
        value = Fraction(number) * SUFFIXES[unit or "B"]
    except (ValueError, KeyError, ZeroDivisionError):
        value = Fraction(-1)
    if value < 0:
        legal = f"a number of bytes, 0 or more, with a unit of {', '.join(SUFFIXES)}"
        raise InputError(f"{name} must be {legal}; got {text!r}")
    return int(value)


def parse_tokens(text: str, name: str) -> int:
    """Tokens from an integer or one with k, M (powers of 1000) or Ki, Mi (powers of 1024).

    >>> parse_tokens("4096", "--context"), parse_tokens("128Ki", "--context"), parse_tokens("1M", "--context")
    (4096, 131072, 1000000)

    Raises:
        InputError: anything else; the message names `name`.
    """
    units = {"k": 1000, "K": 1000, "M": 10**6, "Ki": 1024, "Mi": 2**20}
    digits = text.strip().rstrip("kKMi").replace("_", "").replace(",", "")
    unit = text.strip()[len(text.strip().rstrip("kKMi")) :]
    if not digits.isascii() or not digits.isdigit() or (unit and unit not in units):
        raise InputError(f"{name} must be a number of tokens such as 4096, 128Ki or 1M; got {text!r}")
    return int(digits) * units.get(unit, 1)


def _scaled(count: Number, base: int, units: tuple[str, ...], digits: int) -> str:
    power, size = 0, abs(Fraction(count))
    # Rounding must not print 1000 MB for what is 1 GB.
    while power + 1 < len(units) and round(size / base**power, digits) >= base:
        power += 1
    value = Fraction(count) / base**power
    text = f"{float(value):,.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"{text} {units[power]}"
