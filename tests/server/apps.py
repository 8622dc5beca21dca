"""Applications for tests, asked without a socket: the shipped model, few slots."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi import FastAPI
from serving import demo_model

from rorqual.engine.engine import Engine
from rorqual.server.access import Server
from rorqual.server.app import create_app
from rorqual.server.settings import ServerSettings

SECONDS = 120.0
"""Of one test's requests; far above what they take, so that a hang is a failure and not a wait."""


Asking = AsyncIterator[tuple[httpx.AsyncClient, Server]]


@contextlib.asynccontextmanager
async def asked(engine: dict[str, Any] | None = None, **settings: Any) -> Asking:
    """A client of a fresh application, and what its routes share."""
    app: FastAPI = create_app(Engine(demo_model(), **{"slots": 4, **(engine or {})}), ServerSettings(**settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server", timeout=SECONDS) as client,
    ):
        yield client, app.state.server


def events(text: str) -> list[dict[str, Any]]:
    """Of a stream that ends as OpenAI's do."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def assert_free(server: Server) -> None:
    """Nothing is held, and nobody is counted as running."""
    engine = server.worker.engine
    engine.check_integrity()
    engine.drop_cached()
    stats = engine.stats()
    assert (stats.pages_free, stats.slots_free, engine.live) == (stats.pages, stats.slots, [])
    assert server.idle
