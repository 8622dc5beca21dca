"""A server of the demo model on a free port, for tests that go through a socket."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from rorqual.engine.engine import Engine
from rorqual.model.load import load
from rorqual.server.app import create_app
from rorqual.server.settings import ServerSettings

START_SECONDS = 120.0


@contextlib.contextmanager
def served(settings: ServerSettings | None = None, **options: Any) -> Iterator[tuple[str, Engine]]:
    """(address, engine). options: of the engine."""
    engine = Engine(load(None, kernels="fast"), **{"slots": 4, "pages": 64, **options})
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(engine, settings), log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        end = time.monotonic() + START_SECONDS
        while not server.started:
            assert thread.is_alive() and time.monotonic() < end, "the server did not start"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", engine
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
