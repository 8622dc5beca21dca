"""The engine as others watch it: `/metrics` for Prometheus, `/stats` for the page and whoever reads JSON."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rorqual.server.access import Server
from rorqual.server.answering import Handler, guarded
from rorqual.server.texts import Routes
from rorqual.server.worker import Served

RECENT = 32
"""Steps in `/stats`."""


def routes(server: Server) -> Routes:
    """(method, path, handler) of each. Metrics need no key: they tell of no request and of no tenant."""
    return [("GET", "/metrics", guarded(metrics(server))), ("GET", "/stats", guarded(stats(server)))]


def metrics(server: Server) -> Handler:
    async def handle(request: Request) -> Response:
        # The engine's own thread counts, so it also reads; once it has ended, nobody else writes.
        made = server.metrics.exposition
        text = await server.worker.call(made) if server.worker.alive else made()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return handle


def stats(server: Server) -> Handler:
    async def handle(request: Request) -> Response:
        server.tenant(request)
        engine = server.worker.engine
        found = await server.worker.call(lambda: snapshot(engine))
        return JSONResponse({"model": server.settings.model, "draining": server.draining, **found})

    return handle


def snapshot(engine: Served) -> dict[str, Any]:
    """`Engine.stats` by field, its last steps alone, and what each layer is."""
    found = engine.stats()
    layers = [
        {"id": role.layer_id, "mode": str(role.mode), "part": str(role.part), "ratio": role.ratio}
        for role in engine.model.config.roles
    ]
    whole = asdict(replace(found, recent=found.recent[-RECENT:]))
    for step, own in zip(whole["recent"], found.recent[-RECENT:], strict=True):
        step["seconds"], step["rows"] = own.seconds, own.rows
    return {**whole, "max_model_len": engine.max_model_len, "layers": layers}
