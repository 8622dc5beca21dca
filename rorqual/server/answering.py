"""How a handler's work reaches its client: whole or as a stream, within a time, and undone when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rorqual.log import logger
from rorqual.server.access import Server
from rorqual.server.errors import HttpError, as_http

Handler = Callable[[Request], Awaitable[Response]]
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""No proxy is to keep events back."""


class Work(Protocol):
    """Something that the engine does for a client."""

    async def answer(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[str]: ...

    async def abort(self) -> None: ...

    @property
    def over(self) -> bool:
        """The engine has no part in it any more."""
        ...


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


class EventStream(Response):
    """Server-sent events of some work. However it ends, read or not, the work ends with it.

    An error after the first event is an event too. Events go straight to the server's `send`: what lies between costs
    as much as an event itself.
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
        super().__init__(media_type="text/event-stream", headers={**STREAM_HEADERS, **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client may be gone before the first event is asked for: then the work's events never begin.
        with self._admission:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._tell(receive, send)
            except OSError as error:
                raise ClientDisconnect from error
            finally:
                if not self._work.over:
                    await asyncio.shield(self._work.abort())

    async def _tell(self, receive: Receive, send: Send) -> None:
        last = ""
        try:
            async with asyncio.timeout_at(self._deadline) as limit:
                leaving = asyncio.ensure_future(_ended_by(limit, receive))
                try:
                    async for event in self._work.events():
                        if self._work.over:  # before its client can know, and ask for the next
                            self._admission.close()
                        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
                finally:
                    leaving.cancel()
        except TimeoutError:
            if leaving.done() and not leaving.cancelled():
                return
            last = self._told(HttpError(408, f"request: more than {self._seconds:g} seconds"))
        except OSError:
            raise
        except Exception as error:
            found = as_http(error)
            if found.status == 500:
                logger.error("server: a stream failed", exc_info=error)
            last = self._told(found)
        await send({"type": "http.response.body", "body": last.encode(), "more_body": False})

    def _told(self, error: HttpError) -> str:
        text = json.dumps(error.body(self._anthropic))
        return f"event: error\ndata: {text}\n\n" if self._anthropic else f"data: {text}\n\n"


async def _ended_by(limit: asyncio.Timeout, receive: Receive) -> None:
    """Let a time run out when the client leaves."""
    await _disconnected(receive)
    limit.reschedule(asyncio.get_running_loop().time())


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any], deadline: float, seconds: float) -> Any:
    """What `work` gives, unless the client leaves or time runs out first: then it is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request.receive))
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
