"""The primitive checks that every config value goes through: one value in, the normalised value out, or a ConfigError.

A message always reads `name must be <legal values>; got <value>`. JSON is loose about types and Python looser: `true`
is an int, `64.0` equals 64, `NaN` parses. None of these is taken for an integer here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rorqual.errors import ConfigError

Check = Callable[[str, object], object]
"""(field name, raw value) -> normalised value."""


def refuse(name: str, legal: str, value: object) -> ConfigError:
    """The one wording of a refusal. Long values are cut: a hostile list must not fill the screen."""
    shown = repr(value)
    return ConfigError(f"{name} must be {legal}; got {shown if len(shown) <= 80 else shown[:77] + '...'}")


def integer(low: int, high: int) -> Check:
    """An int in [low, high], both ends legal. bool, float (64.0 too), str and None are refused."""

    def check(name: str, value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise refuse(name, f"an integer in {low}..{high}", value)
        return value

    return check


def number(low: float, high: float, *, open_low: bool = False) -> Check:
    """A finite float in [low, high], or in (low, high] when `open_low`. An int is taken and widened; NaN is refused."""
    legal = f"a number above {low:g}, at most {high:g}" if open_low else f"a number in {low:g}..{high:g}"

    def check(name: str, value: object) -> float:
        # Compared before float(): an int of a thousand digits does not convert. NaN fails every comparison.
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
            or (open_low and value == low)
        ):
            raise refuse(name, legal, value)
        return float(value)

    return check


def flag(name: str, value: object) -> bool:
    """A real bool; 0 and 1 are refused."""
    if type(value) is not bool:
        raise refuse(name, "true or false", value)
    return value


def choice(legal: Collection[str]) -> Check:
    """One of a few strings."""

    def check(name: str, value: object) -> str:
        if type(value) is not str or value not in legal:
            raise refuse(name, "one of " + ", ".join(legal), value)
        return value

    return check


def optional(inner: Check) -> Check:
    """None, or what `inner` accepts."""

    def check(name: str, value: object) -> object:
        return None if value is None else inner(name, value)

    return check


def instance(kind: type) -> Check:
    """A nested part that checked itself when it was made."""

    def check(name: str, value: object) -> object:
        if type(value) is not kind:
            raise refuse(name, f"a {kind.__name__}", value)
        return value

    return check


def integers(low: int, high: int, *, ascending: bool = False) -> Check:
    """A list or tuple of ints in [low, high], returned as a tuple; `ascending` also refuses repeats and disorder."""
    one = integer(low, high)

    def check(name: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            raise refuse(name, "a list of integers", value)
        items: list[int] = []
        for position, item in enumerate(value):
            checked = one(f"{name}[{position}]", item)
            assert isinstance(checked, int)
            if ascending and items and checked <= items[-1]:
                raise refuse(name, "in ascending order without repeats", value)
            items.append(checked)
        return tuple(items)

    return check


def apply(target: object, checks: Mapping[str, Check], prefix: str = "") -> None:
    """Checks each field of a frozen dataclass and stores its normalised value: tuples for lists, floats where due."""
    for name, check in checks.items():
        object.__setattr__(target, name, check(prefix + name, getattr(target, name)))
