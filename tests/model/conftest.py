"""A random checkpoint that the tests of fused regions share."""

from __future__ import annotations

from pathlib import Path

import pytest

from rorqual.checkpoint.random import write_random
from rorqual.cli.init import distinct_keys
from rorqual.config import presets


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the preset `tiny`."""
    made = tmp_path_factory.mktemp("models") / "tiny"
    config = presets.load("tiny")
    write_random(config, made, 3, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    return made
