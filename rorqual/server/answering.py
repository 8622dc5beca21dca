"""How a handler's work reaches its client: whole or as a stream, within a time, and undone when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rorqual.log import logger
from rorqual.server.access import Server
from rorqual.server.errors import HttpError, as_http

Handler = Callable[[Request], Awaitable[Response]]


class Work(Protocol):
    """Something that the engine does for a client. ended: the engine has no more to do for it."""

    @property
    def ended(self) -> bool: ...

    async def answer(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[str]: ...

    async def abort(self) -> None: ...


def guarded(handler: Handler, anthropic: bool = False) -> Handler:
    """A handler whose errors become the body that its clients expect."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            return error_response(as_http(error), request, anthropic)

    return run


def error_response(found: HttpError, request: Request, anthropic: bool) -> Response:
    """An error as JSON; what is nobody's mistake is logged with where it came from."""
    if found.status == 500:
        logger.error("server: %s %s failed", request.method, request.url.path, exc_info=found.__cause__ or found)
    return JSONResponse(found.body(anthropic), found.status, found.headers)


async def answered(
    server: Server,
    request: Request,
    tenant: str,
    begin: Callable[[], Coroutine[Any, Any, Work]],
    *,
    stream: bool,
    anthropic: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Begin some work in a tenant's name, and answer with its events or its answer.

    Raises:
        HttpError: 429, 503, 408; and whatever `begin` raises. Then nothing is left in the engine.
    """
    seconds = server.settings.timeout
    with contextlib.ExitStack() as admission:
        admission.enter_context(server.admitted(tenant))
        deadline = asyncio.get_running_loop().time() + seconds
        work = await within(begin(), deadline, seconds)
        if stream:
            return EventStream(work, deadline, seconds, admission.pop_all(), anthropic, headers)
        return JSONResponse(await unless_gone(request, work.answer(), deadline, seconds), headers=dict(headers or {}))


async def within(work: Coroutine[Any, Any, Any], deadline: float, seconds: float) -> Any:
    """What `work` gives before a deadline of the loop's clock; else HttpError 408."""
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError:
        raise HttpError(408, f"request: more than {seconds:g} seconds") from None


class EventStream(StreamingResponse):
    """Server-sent events of some work. However it ends, read or not, the work ends with it.

    An error after the first event is an event too.
    """

    def __init__(
        self,
        work: Work,
        deadline: float,
        seconds: float,
        admission: contextlib.ExitStack,
        anthropic: bool,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._work, self._deadline, self._seconds = work, deadline, seconds
        self._admission, self._anthropic = admission, anthropic
        given = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(self._events(), media_type="text/event-stream", headers=given)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client may be gone before the first event is asked for: then the generator below never begins.
        with self._admission:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await asyncio.shield(self._work.abort())

    async def _events(self) -> AsyncIterator[str]:
        try:
            async with asyncio.timeout_at(self._deadline):
                async for event in self._work.events():
                    if self._work.ended:
                        # Whoever reads the last event may ask again at once, and is to find its place free.
                        self._admission.close()
                    yield event
        except TimeoutError:
            yield self._told(HttpError(408, f"request: more than {self._seconds:g} seconds"))
        except Exception as error:
            found = as_http(error)
            if found.status == 500:
                logger.error("server: a stream failed", exc_info=error)
            yield self._told(found)

    def _told(self, error: HttpError) -> str:
        text = json.dumps(error.body(self._anthropic))
        return f"event: error\ndata: {text}\n\n" if self._anthropic else f"data: {text}\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any], deadline: float, seconds: float) -> Any:
    """What `work` gives, unless the client leaves or time runs out first: then it is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    left = max(0.0, deadline - asyncio.get_running_loop().time())
    try:
        done, _ = await asyncio.wait({task, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
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
