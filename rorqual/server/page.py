"""The page: chat, and the live cache beside it. Files of the package; nothing is built or fetched from elsewhere."""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

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


def add_page(app: FastAPI) -> None:
    """`/` and `/page/NAME`."""
    files = page_files()

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            error = HttpError(404, f"page: {name!r} is no file of it; legal: {', '.join(files)}")
            return JSONResponse(error.body(anthropic=False), error.status)
        return Response(files[name], media_type=TYPES[name[name.rindex(".") :]], headers=HEADERS)

    app.add_api_route("/", file, methods=["GET"], include_in_schema=False)
    app.add_api_route("/page/{name}", file, methods=["GET"], include_in_schema=False)


def page_files() -> dict[str, bytes]:
    """Name -> bytes, of every file of the page."""
    folder = resources.files("rorqual.server") / "page"
    return {
        entry.name: entry.read_bytes()
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(tuple(TYPES))
    }
