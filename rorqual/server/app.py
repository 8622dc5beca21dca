"""The routes: who may ask, what is read, where it goes, and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from rorqual import __version__
from rorqual.engine.engine import Engine
from rorqual.errors import InputError
from rorqual.log import logger
from rorqual.server.errors import HttpError, as_http
from rorqual.server.exchange import Exchange
from rorqual.server.page import add_page
from rorqual.server.protocol import CHAT, MESSAGES, RESPONSES, Api, Call, Conversations
from rorqual.server.settings import ServerSettings
from rorqual.server.worker import EngineWorker

PUBLIC = "everybody"
"""The tenant of a server without keys."""


class Server:
    """What the routes share."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        if engine.model.tokenizer is None:
            raise InputError("model: this checkpoint has no tokenizer.json; a server is about text")
        self.settings, self.worker = settings, EngineWorker(engine)
        self.conversations = Conversations(engine.model.tokenizer.to_str(), settings)
        self.running: Counter[str] = Counter()
        self.draining = False

    def tenant(self, request: Request) -> str:
        """Who asks. Raises HttpError 401."""
        keys = self.settings.api_keys
        if not keys:
            return PUBLIC
        header = request.headers.get("authorization", "")
        given = request.headers.get("x-api-key") or header.removeprefix("Bearer ").strip()
        found = None
        # Every key is compared, each in constant time: how long it takes says nothing.
        for key, tenant in keys.items():
            if hmac.compare_digest(given.encode(), key.encode()):
                found = tenant
        if found is None:
            raise HttpError(401, "no valid API key; give one as a Bearer token or as x-api-key", "invalid_api_key")
        return found

    async def body(self, request: Request) -> dict[str, Any]:
        """A JSON object within the limit. Raises HttpError 413 or 400."""
        limit, parts, size = self.settings.body_bytes, [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise HttpError(413, f"body: more than {limit:,} bytes")
            parts.append(part)
        try:
            found = json.loads(b"".join(parts))
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"body: not JSON ({error})") from error
        if not isinstance(found, dict):
            raise HttpError(400, "body: not a JSON object")
        return found

    def known(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the model named; 404 for another one."""
        settings, asked = self.settings, body.get("model")
        if asked is None:
            return {**body, "model": settings.model}
        if asked != settings.model and asked not in settings.aliases:
            raise HttpError(404, f"model: {asked!r} is not served here; legal: {settings.model}", "model_not_found")
        return body

    @contextlib.contextmanager
    def admitted(self, tenant: str) -> Any:
        """One request of a tenant's; 429 above its share, 503 while the server drains."""
        if self.draining:
            raise HttpError(503, "server: shutting down")
        if self.running[tenant] >= self.settings.concurrency:
            raise HttpError(429, f"key: {self.settings.concurrency} requests run already, which is the limit")
        self.running[tenant] += 1
        try:
            yield
        finally:
            self.running[tenant] -= 1


def create_app(engine: Engine, settings: ServerSettings | None = None) -> FastAPI:
    """The application of one engine, which it then owns."""
    server = Server(engine, settings or ServerSettings())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        try:
            yield
        finally:
            server.worker.stop()

    app = FastAPI(title="Rorqual", version=__version__, lifespan=lifespan)
    app.state.server = server
    for path, api in (("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)):
        app.add_api_route(path, conversation(server, api), methods=["POST"], name=api.name)
    app.add_api_route("/v1/models", models(server), methods=["GET"])
    app.add_api_route("/health", health(server), methods=["GET"])
    app.add_api_route("/version", lambda: {"version": __version__}, methods=["GET"])
    add_page(app)
    return app


Handler = Callable[[Request], Awaitable[Response]]


def guarded(handler: Handler, anthropic: bool = False) -> Handler:
    """A handler whose errors become the body that its clients expect."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            found = as_http(error)
            if found.status == 500:
                logger.exception("server: %s %s failed", request.method, request.url.path)
            return JSONResponse(found.body(anthropic), found.status, found.headers)

    return run


def conversation(server: Server, api: Api) -> Handler:
    """POST of a conversation API."""

    async def handle(request: Request) -> Response:
        tenant = server.tenant(request)
        body = server.known(await server.body(request))
        name = f"{api.name}-{uuid.uuid4().hex}"
        call = server.conversations.call(api, body, name)
        return await answered(server, request, tenant, call)

    return guarded(handle, anthropic=api is MESSAGES)


async def answered(server: Server, request: Request, tenant: str, call: Call) -> Response:
    """Submit a call, and answer with a stream or as a whole."""
    admission = contextlib.ExitStack()
    admission.enter_context(server.admitted(tenant))
    try:
        exchange = await Exchange.begin(server.worker, salted(call, tenant), server.settings)
        if call.stream:
            events = streamed(exchange, call.api is MESSAGES, server.settings.timeout, admission.pop_all())
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return JSONResponse(await unless_gone(request, exchange.answer(), server.settings.timeout))
    finally:
        admission.close()


def salted(call: Call, tenant: str) -> Call:
    """Two tenants never share a page, nor two salts of one."""
    from dataclasses import replace

    return replace(call, salt=json.dumps([tenant, call.salt]))


async def streamed(
    exchange: Exchange, anthropic: bool, seconds: float, admission: contextlib.ExitStack
) -> AsyncIterator[str]:
    """Events of an exchange; an error after the first of them is an event too."""
    with admission:
        try:
            async with asyncio.timeout(seconds):
                async for event in exchange.events():
                    yield event
        except TimeoutError:
            yield _error(HttpError(408, f"request: more than {seconds:g} seconds"), anthropic)
        except Exception as error:
            yield _error(as_http(error), anthropic)


def _error(error: HttpError, anthropic: bool) -> str:
    text = json.dumps(error.body(anthropic))
    return f"event: error\ndata: {text}\n\n" if anthropic else f"data: {text}\n\n"


async def unless_gone(request: Request, work: Any, seconds: float) -> Any:
    """What `work` gives, unless the client leaves or time runs out first: then it is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        done, _ = await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise HttpError(408, f"request: more than {seconds:g} seconds" if not done else "client: gone")
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
        return JSONResponse({"status": "ok"})

    return guarded(handle)
