"""The examples in docstrings of engine and pool are true."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import rorqual.engine
import rorqual.pool

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (rorqual.engine, rorqual.pool)
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    assert not doctest.testmod(import_module(name)).failed
