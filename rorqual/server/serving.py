"""An application on a socket, until somebody ends it: what runs is answered, what comes new is refused."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from rorqual.errors import InputError
from rorqual.log import logger
from rorqual.server.access import Server

DRAIN_SECONDS = 30.0
"""How long requests that run may take to end once the server is told to."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. port: 0 for any free one.

    Raises:
        InputError: an address that is not there, or is taken.
    """
    if not 0 <= port < 65536:
        raise InputError(f"port: {port} is not legal; legal: 0 (any free one)..65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(f"host, port: {host}:{port} cannot be listened on ({error.strerror or error})") from error


def address(listener: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: FastAPI, listener: socket.socket, drain: float = DRAIN_SECONDS, began: Callable[[], None] | None = None
) -> None:
    """Answer until SIGTERM or SIGINT; then end in order. began: called once requests are taken."""
    Draining(configured(app), app.state.server, drain, began).run(sockets=[listener])


def configured(app: FastAPI, **options: Any) -> uvicorn.Config:
    """How uvicorn serves it: without a line a request, and without a look at what proxies say of clients."""
    return uvicorn.Config(
        app,
        **{
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "lifespan": "on",
            "timeout_graceful_shutdown": 5,
            **options,
        },
    )


class Draining(uvicorn.Server):
    """A server that goes on listening while it drains, so that new requests hear why they are refused.

    The first signal drains: what runs may end, for so many seconds. The second ends at once.
    """

    def __init__(
        self, config: uvicorn.Config, server: Server, seconds: float, began: Callable[[], None] | None = None
    ) -> None:
        super().__init__(config)
        self._own, self._seconds, self._began = server, seconds, began
        self._deadline = float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._own.draining:
            self.should_exit = self.force_exit = True
        self._own.draining = True
        self._deadline = time.monotonic() + self._seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._began is not None and not self.should_exit:
            self._began()

    async def on_tick(self, counter: int) -> bool:
        if self._own.draining and (self._own.idle or time.monotonic() >= self._deadline):
            if not self._own.idle:
                logger.warning("server: %d requests did not end in time", self._own.running.total())
                # Whoever still waits is told so by the engine's end, and not by a connection that breaks.
                self._own.worker.stop(0)
            self.should_exit = True
        return await super().on_tick(counter)
