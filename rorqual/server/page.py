"""The page: chat, and the live cache beside it. Files of the package; nothing is built or fetched from elsewhere."""

from __future__ import annotations

import dataclasses
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rorqual.engine.engine import Engine
from rorqual.server.errors import HttpError

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
RECENT = 32
"""Steps that `/stats` tells of."""


def add_page(app: FastAPI) -> None:
    """`/`, `/page/NAME`, and `/stats` where the application has none."""
    files = page_files()

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            error = HttpError(404, f"page: {name!r} is no file of it; legal: {', '.join(files)}")
            return JSONResponse(error.body(anthropic=False), error.status)
        return Response(files[name], media_type=TYPES[name[name.rindex(".") :]], headers=HEADERS)

    app.add_api_route("/", file, methods=["GET"], include_in_schema=False)
    app.add_api_route("/page/{name}", file, methods=["GET"], include_in_schema=False)
    if not any(getattr(route, "path", None) == "/stats" for route in app.routes):
        app.add_api_route("/stats", stats(app), methods=["GET"])


def page_files() -> dict[str, bytes]:
    """Name -> bytes, of every file of the page."""
    folder = resources.files("rorqual.server") / "page"
    return {
        entry.name: entry.read_bytes()
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(tuple(TYPES))
    }


def stats(app: FastAPI) -> Any:
    """GET of the engine's statistics, with the layers and the model's name."""
    from rorqual.server.app import guarded

    server = app.state.server

    async def handle(request: Request) -> Response:
        server.tenant(request)
        found = await server.worker.call(lambda: engine_stats(server.worker.engine))
        return JSONResponse({**found, "model": server.settings.model})

    return guarded(handle)


def engine_stats(engine: Engine) -> dict[str, Any]:
    """What an engine shows of itself, as JSON takes it, with its last steps and its layers. Its thread's to call."""
    found = dataclasses.asdict(engine.stats())
    found["recent"] = found["recent"][-RECENT:]
    roles = engine.model.config.roles
    found["layers"] = [
        {"id": role.layer_id, "mode": str(role.mode), "part": str(role.part), "ratio": role.ratio} for role in roles
    ]
    return found
