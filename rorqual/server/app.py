"""The routes of one engine's server."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from importlib.metadata import version as installed_version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from rorqual.server import fields, live, texts
from rorqual.server.access import Server
from rorqual.server.answering import Handler, answered, error_response, guarded
from rorqual.server.completions import Completions
from rorqual.server.document import described
from rorqual.server.errors import HttpError, as_http
from rorqual.server.exchange import Exchange
from rorqual.server.page import add_page
from rorqual.server.protocol import CHAT, MESSAGES, RESPONSES, Api
from rorqual.server.settings import ServerSettings
from rorqual.server.worker import Served

VERSION = installed_version("rorqual")


def create_app(engine: Served, settings: ServerSettings | None = None) -> FastAPI:
    """The application of one engine, which it then owns."""
    server = Server(engine, settings or ServerSettings())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        try:
            yield
        finally:
            server.worker.stop()

    app = FastAPI(title="Rorqual", version=VERSION, lifespan=lifespan)
    app.state.server = server
    app.router.route_class = Direct
    conversations = ("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)
    routes: texts.Routes = [
        *(("POST", path, conversation(server, api)) for path, api in conversations),
        ("POST", "/v1/completions", completions(server)),
        ("GET", "/v1/models", models(server)),
        ("GET", "/health", health(server)),
        ("GET", "/version", version),
        *texts.routes(server),
        *live.routes(server),
    ]
    for method, path, handler in routes:
        name = path.removeprefix("/v1").strip("/").replace("/", "_")
        app.add_api_route(path, handler, methods=[method], name=name, openapi_extra=described(path))
    for kind in (HTTPException, RequestValidationError):
        app.add_exception_handler(kind, refused)
    add_page(app)
    return app


class Direct(APIRoute):
    """A route whose handler gets the request as it is: there is nothing to inject, and looking for it costs as much as
    a few events of a stream."""

    def __init__(self, path: str, endpoint: Handler, **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = app


async def refused(request: Request, error: Exception) -> Response:
    """What no route of ours answered: an unknown path, a method that is not there."""
    found = HttpError(400, str(error)) if isinstance(error, RequestValidationError) else as_http(error)
    return error_response(found, request, request.url.path.startswith("/v1/messages"))


def conversation(server: Server, api: Api) -> Handler:
    """POST of a conversation API."""

    async def handle(request: Request) -> Response:
        tenant = server.tenant(request)
        body = server.known(await server.body(request))
        ignored = fields.check(api.fields, body)
        call = server.conversations.call(api, body, f"{api.name}-{uuid.uuid4().hex}").of(tenant)

        async def begin() -> Exchange:
            return await Exchange.begin(server.worker, call, server.settings)

        return await answered(
            server, request, tenant, begin, stream=call.stream, anthropic=api is MESSAGES, headers=ignored
        )

    return guarded(handle, anthropic=api is MESSAGES)


def completions(server: Server) -> Handler:
    """POST of text completions."""

    async def handle(request: Request) -> Response:
        tenant = server.tenant(request)
        body = server.known(await server.body(request))
        ignored = fields.check(fields.COMPLETIONS, body)
        work = Completions(server, body, tenant)

        async def begin() -> Completions:
            await work.begin()
            return work

        return await answered(server, request, tenant, begin, stream=work.asked.stream, headers=ignored)

    return guarded(handle)


def models(server: Server) -> Handler:
    async def handle(request: Request) -> Response:
        server.tenant(request)
        names = [server.settings.model, *server.settings.aliases]
        length = server.worker.engine.max_model_len
        found = [
            {"id": name, "object": "model", "created": 0, "owned_by": "rorqual", "max_model_len": length}
            for name in names
        ]
        return JSONResponse({"object": "list", "data": found})

    return guarded(handle)


def health(server: Server) -> Handler:
    async def handle(request: Request) -> Response:
        if not server.worker.alive:
            raise HttpError(503, "engine: not running")
        if server.draining:
            raise HttpError(503, "server: shutting down")
        return JSONResponse({"status": "ok"})

    return guarded(handle)


async def version(request: Request) -> Response:
    return JSONResponse({"version": VERSION})
