"""Bytes a second as they are typed: of a link, of a device's memory."""

from __future__ import annotations

import re
from contextlib import suppress
from fractions import Fraction

from rorqual.errors import InputError

BITS = {"kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12}
BITS_TEXT = re.compile(r"([0-9]{1,31}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?) *([kMGT]bit/s)")


def parse_rate(text: str, name: str) -> Fraction:
    """Bytes a second from "50GB/s" or "400Gbit/s". A unit must be given: a bare 50 would be read in two ways.

    Raises:
        InputError: no number above 0, no unit or an unknown one.

    >>> parse_rate("400Gbit/s", "--link") == parse_rate("50 GB/s", "--link") == 50 * 10**9
    True
    """
    from rorqual.planner.units import parse_bytes

    stripped, value = text.strip(), Fraction(0)
    if bits := BITS_TEXT.fullmatch(stripped):
        value = Fraction(bits[1]) * BITS[bits[2]] / 8
    elif stripped.endswith("B/s"):
        # The complaint below says what a rate looks like.
        with suppress(InputError):
            value = Fraction(parse_bytes(stripped.removesuffix("/s"), name))
    if value <= 0:
        raise InputError(
            f"{name} must be above 0 with a unit of bytes or bits a second: 50GB/s, 400Gbit/s; got {text!r}"
        )
    return value
