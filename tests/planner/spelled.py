"""Evaluates what the planner spells: + - x / ^ ( ) ceil() and numbers with commas, in exact fractions."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction

OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, power: Fraction(base ** int(power)),
}
LETTERS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12, "P": 10**15}


def evaluate(expression: str) -> Fraction:
    """The exact value. AssertionError for anything outside the grammar."""
    assert re.fullmatch(r"(?:[0-9,.+\-x/^() ]|ceil(?=\())+", expression), expression
    python = expression.replace(",", "").replace(" x ", " * ").replace("^", "**")
    return _value(ast.parse(python, mode="eval").body, python)


def _value(node: ast.AST, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(ast.get_source_segment(text, node) or "")
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_value(node.left, text), _value(node.right, text))
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ceil", text
    return Fraction(math.ceil(_value(node.args[0], text)))


def rounds_to(value: int | float | Fraction, shown: str) -> bool:
    """Whether `value`, rounded to the digits of `shown` in its unit, is `shown`."""
    match = re.fullmatch(r"(-?[0-9,]+)(?:\.([0-9]+))?(?: ([kKMGBTP]?)B?)?", shown)
    if match is None:
        return Fraction(shown) == value
    whole, decimals = match[1].replace(",", ""), match[2] or ""
    unit = LETTERS[match[3] or ("B" if shown.endswith(" B") else "")]
    return round(Fraction(value) / unit, len(decimals)) == Fraction(f"{whole}.{decimals or 0}")
