"""A server of the shipped model for the page and the client pages, one a test module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from serving import Served, demo_model

from rorqual.engine.engine import Engine
from rorqual.server.settings import ServerSettings


@contextlib.contextmanager
def served(settings: ServerSettings | None = None, **options: Any) -> Iterator[tuple[str, Engine]]:
    """(address, engine). options: of the engine."""
    made = Served(demo_model(), settings or ServerSettings(), **{"slots": 4, "pages": 64, **options})
    try:
        yield made.url, made.engine
    finally:
        made.close()
