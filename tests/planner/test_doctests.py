"""Every public function of the planner has a worked value in its docstring, and the value is right."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import rorqual.planner

ROOT = Path(rorqual.planner.__file__).parent
MODULES = sorted(
    ".".join(("rorqual", "planner", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
)


def public_functions(module: ModuleType) -> Iterator[str]:
    """Functions that the module itself defines, cached ones too."""
    for name, value in vars(module).items():
        function = inspect.unwrap(value) if callable(value) else value
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_"):
            yield name


def test_the_modules_are_found() -> None:
    assert {"rorqual.planner", "rorqual.planner.ledger", "rorqual.planner.numbers.work"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_worked_values(name: str) -> None:
    module = import_module(name)
    examples = {test.name: test.examples for test in doctest.DocTestFinder().find(module)}
    bare = [function for function in public_functions(module) if not examples.get(f"{name}.{function}")]
    assert not bare, f"no worked value in the docstring of {', '.join(bare)}"
    assert doctest.testmod(module).failed == 0
