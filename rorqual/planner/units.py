"""Quantities as text. Decimal units (MB, GB) unless binary ones (MiB, GiB) are asked for; never both in one text.

Everything is rounded exactly, half to even, from the fraction that the value is: a text and its value never part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rorqual.errors import InputError

Number = int | float | Fraction

DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
COUNTS = ("", "K", "M", "B", "T")
METRIC = ("", "k", "M", "G", "T", "P", "E")
SUFFIXES = {name: 1000**power for power, name in enumerate(DECIMAL)} | {
    name: 1024**power for power, name in enumerate(BINARY)
}
TOKEN_UNITS = {"": 1, "k": 1000, "K": 1000, "M": 10**6, "Ki": 1024, "Mi": 2**20}
# Commas and underscores stand between groups of three digits or nowhere: 1,5 is neither 15 nor one and a half here.
# Bounded on purpose: 1e999999999 is a number too, and would take the machine with it.
WHOLE = r"[0-9]{1,3}(?:[,_][0-9]{3}){1,10}|[0-9]{1,31}"
BYTES_TEXT = re.compile(rf"((?:{WHOLE})(?:\.[0-9]{{0,30}})?(?:[eE][+-]?[0-9]{{1,2}})?) *([A-Za-z]*)")
TOKENS_TEXT = re.compile(r"([0-9]{1,3}(?:[,_][0-9]{3}){1,6}|[0-9]{1,21})([A-Za-z]*)")
AMBIGUOUS_LIST = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")


def decimal_bytes(count: Number, digits: int = 2) -> str:
    """Bytes in units of 1000, to at most `digits` decimals. Source: IEC 80000-13 leaves kB, MB, GB to the powers of 10.

    >>> decimal_bytes(890), decimal_bytes(890_000_000), decimal_bytes(2_703_360)
    ('890 B', '890 MB', '2.7 MB')
    """
    return _scaled(count, 1000, DECIMAL, digits)


def binary_bytes(count: Number, digits: int = 2) -> str:
    """Bytes in units of 1024, to at most `digits` decimals. Source: the prefixes of IEC 80000-13.

    >>> binary_bytes(2_703_360), binary_bytes(890 * 2**20)
    ('2.58 MiB', '890 MiB')
    """
    return _scaled(count, 1024, BINARY, digits)


def count_text(count: Number, digits: int = 2) -> str:
    """A count of parameters or tokens in units of 1000, as model cards write them: K, M, B (10^9), T.

    Source: model cards write so.

    >>> count_text(15_468_675_184), count_text(384)
    ('15.47 B', '384')
    """
    return _scaled(count, 1000, COUNTS, digits).rstrip()


def flops_text(count: Number, digits: int = 2) -> str:
    """FLOPs in units of 1000 with the metric letters, as device data sheets write them: k, M, G (10^9), T, P.

    Source: device data sheets.

    >>> flops_text(22_011_707_392), flops_text(989.5e12)
    ('22.01 G', '989.5 T')
    """
    return _scaled(count, 1000, METRIC, digits).rstrip()


def fixed_text(value: Number, digits: int = 0) -> str:
    """A number with exactly `digits` decimals, thousands grouped. In the value's own unit; rounded half to even.

    Source: the caller.

    >>> fixed_text(Fraction(2_703_360, 890), 1), fixed_text(Fraction(890_000_000, 2_703_360)), fixed_text(-1, 2)
    ('3,037.5', '329', '-1.00')
    """
    scaled = round(Fraction(value) * 10**digits)
    whole, rest = divmod(abs(scaled), 10**digits)
    decimals = f".{rest:0{digits}d}" if digits else ""
    return f"{'-' if scaled < 0 else ''}{whole:,}{decimals}"


def number_text(value: Number, digits: int = 4) -> str:
    """A number with at most `digits` decimals, no zeros at its end, thousands grouped. In the value's own unit.

    Source: the caller.

    >>> number_text(890), number_text(Fraction(7, 2)), number_text(Fraction(14_057, 4)), number_text(2 / 3)
    ('890', '3.5', '3,514.25', '0.6667')
    """
    text = fixed_text(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text else text


def plain_number(value: Number) -> int | float:
    """A whole number as an int, else a float: what JSON and tables can hold. In the value's own unit.

    Source: the caller.

    >>> plain_number(Fraction(890)), plain_number(Fraction(7, 2))
    (890, 3.5)
    """
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def parse_bytes(text: str, name: str) -> int:
    """Bytes from a number with or without a unit, the inverse of what is printed; a broken byte is rounded down.

    Source: `SUFFIXES`.

    >>> parse_bytes("80GB", "--memory"), parse_bytes("1.5 GiB", "--memory"), parse_bytes("2,703,360", "--memory")
    (80000000000, 1610612736, 2703360)

    Raises:
        InputError: no number, a negative one, or an unknown unit; the message names `name` and the units.
    """
    match = BYTES_TEXT.fullmatch(text.strip())
    unit = SUFFIXES.get(match[2] or "B") if match else None
    if match is None or unit is None:
        legal = f"a number of bytes, 0 or more, with a unit of {', '.join(SUFFIXES)}"
        raise InputError(f"{name} must be {legal}; got {text!r}")
    return int(Fraction(match[1].replace(",", "").replace("_", "")) * unit)


def parse_tokens(text: str, name: str) -> int:
    """Tokens from an integer or one with k, M (powers of 1000) or Ki, Mi (powers of 1024). Source: `TOKEN_UNITS`.

    >>> parse_tokens("4096", "--context"), parse_tokens("128Ki", "--context"), parse_tokens("1M", "--context")
    (4096, 131072, 1000000)

    Raises:
        InputError: anything else; the message names `name`.
    """
    match = TOKENS_TEXT.fullmatch(text.strip())
    unit = TOKEN_UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise InputError(f"{name} must be a number of tokens such as 4096, 128Ki or 1M; got {text!r}")
    return int(match[1].replace(",", "").replace("_", "")) * unit


def parse_token_list(texts: Sequence[str], name: str) -> list[int]:
    """Tokens of an option that may be repeated and takes several at once: "4Ki,128Ki". In the order given.

    Source: `parse_tokens`.

    >>> parse_token_list(["4Ki,128Ki", "1M"], "--context")
    [4096, 131072, 1000000]

    Raises:
        InputError: as `parse_tokens`; and for 1,048,576, which is one number or three: a list needs a space or a unit.
    """
    found = []
    for text in texts:
        if AMBIGUOUS_LIST.fullmatch(text.strip()):
            plain, apart = text.strip().replace(",", ""), text.strip().replace(",", ", ")
            raise InputError(f"{name} {text.strip()} may be one number or several; write {plain} or '{apart}'")
        found += [parse_tokens(item, name) for item in text.split(",")]
    return found


def _scaled(count: Number, base: int, units: tuple[str, ...], digits: int) -> str:
    exact, power = Fraction(count), 0
    # Rounding must not print 1000 MB for what is 1 GB.
    while power + 1 < len(units) and round(abs(exact) / base**power, digits) >= base:
        power += 1
    return f"{number_text(exact / base**power, digits)} {units[power]}"
