"""Every public function of the planner says its unit, its source and a worked value, and the value is right."""

from __future__ import annotations

import doctest
import inspect
import re
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


SOURCE = re.compile(r"[Ss]ource\b|[Ff]rom the config|SPEC|arXiv")
UNIT = re.compile(
    r"[Uu]nits?\b|\[\S+\]|\b(bytes|tokens|layer-tokens|FLOPs?|parameters|entries|layers|groups|keys|patches|seconds|count|terms)\b",
    re.IGNORECASE,
)


def public_functions(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(name, docstring) of functions that the module itself defines, cached ones too."""
    for name, value in vars(module).items():
        function = inspect.unwrap(value) if callable(value) else value
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_"):
            yield name, function.__doc__ or ""


def test_the_modules_are_found() -> None:
    assert {"rorqual.planner", "rorqual.planner.ledger", "rorqual.planner.numbers.work"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_worked_values(name: str) -> None:
    module = import_module(name)
    examples = {test.name: test.examples for test in doctest.DocTestFinder().find(module)}
    bare = [function for function, _ in public_functions(module) if not examples.get(f"{name}.{function}")]
    assert not bare, f"no worked value in the docstring of {', '.join(bare)}"
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_units_and_sources(name: str) -> None:
    for function, docstring in public_functions(import_module(name)):
        words = docstring.split(">>>")[0] + docstring.rpartition("\n\n")[2]
        assert SOURCE.search(words), f"{function} names no source"
        assert UNIT.search(words), f"{function} names no unit"
