"""Who may ask, how much of it at once, and what is read of a request before anybody understands it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastapi import Request

from rorqual.errors import InputError
from rorqual.server.errors import HttpError, shown
from rorqual.server.metrics import Metrics
from rorqual.server.protocol import Conversations
from rorqual.server.settings import ServerSettings
from rorqual.server.worker import EngineWorker, Served

PUBLIC = "everybody"
"""The tenant of a server without keys."""


class Server:
    """What the routes share. draining: it ends what runs and takes nothing more."""

    def __init__(self, engine: Served, settings: ServerSettings) -> None:
        if engine.model.tokenizer is None:
            raise InputError("model: this checkpoint has no tokenizer.json; a server is about text")
        self.settings, self.tokenizer = settings, engine.model.tokenizer
        self.metrics = Metrics(engine, settings.model)
        self.worker = EngineWorker(engine, settings.waiting, self.metrics, settings.stream_interval)
        self.conversations = Conversations(engine.model.tokenizer.to_str(), settings)
        self.running: Counter[str] = Counter()
        self.draining = False

    @property
    def idle(self) -> bool:
        """Nothing runs that somebody waits for."""
        return not self.running.total()

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
        """A JSON object within the limits. Raises HttpError 413, 408 or 400."""
        seconds = self.settings.timeout
        try:
            async with asyncio.timeout(seconds):
                return read_object(await self._bytes(request))
        except TimeoutError:
            raise HttpError(408, f"body: not complete after {seconds:g} seconds") from None

    async def _bytes(self, request: Request) -> bytes:
        limit, parts, size = self.settings.body_bytes, [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise HttpError(413, f"body: more than {limit:,} bytes")
            parts.append(part)
        return b"".join(parts)

    def known(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the model named; 404 for another one."""
        settings, asked = self.settings, body.get("model")
        if asked is None:
            return {**body, "model": settings.model}
        if asked != settings.model and asked not in settings.aliases:
            raise HttpError(
                404, f"model: {shown(asked)} is not served here; legal: {settings.model}", "model_not_found"
            )
        return body

    @contextlib.contextmanager
    def admitted(self, tenant: str) -> Iterator[None]:
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


def read_object(data: bytes) -> dict[str, Any]:
    """A JSON object whose texts are Unicode and whose numbers are finite.

    Raises:
        HttpError: 400, with what it is not.
    """
    try:
        found = json.loads(data, parse_constant=_no_constant)
        if b"\\u" in data:  # half of a surrogate pair is JSON, but no text
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"body: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise HttpError(400, "body: not a JSON object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
