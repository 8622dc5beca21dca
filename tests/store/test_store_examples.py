"""What the docstrings show is so."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from rorqual.store import catalogue, checksum, clock, memory, sizes


@pytest.mark.parametrize("module", [catalogue, checksum, clock, memory, sizes])
def test_examples(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0
