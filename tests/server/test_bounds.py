"""How much a client may have at once, for how long, and what nobody ever sees."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import httpx
import pytest
from apps import asked, assert_free, events
from starlette.requests import ClientDisconnect

from rorqual.server.access import Server
from rorqual.server.settings import ServerSettings

LONG = {"prompt": "A whale", "max_tokens": 3000, "ignore_eos": True}
SHORT = {"prompt": "A whale", "max_tokens": 2}


async def begun(client: httpx.AsyncClient, server: Server, **extra: Any) -> asyncio.Task[httpx.Response]:
    """A long request that has its slot."""
    before = server.worker.engine.stats().running
    task = asyncio.ensure_future(client.post("/v1/completions", json={**LONG, **extra}))
    while server.worker.engine.stats().running == before:
        await asyncio.sleep(0.01)
        assert not task.done()
    return task


async def end(task: asyncio.Task[httpx.Response], server: Server) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    while server.worker.engine.live:
        await asyncio.sleep(0.01)


def test_one_key_has_its_share_and_another_its_own() -> None:
    async def ask() -> None:
        async with asked(api_keys={"one": "a", "two": "b"}, concurrency=1) as (client, server):
            client.headers["x-api-key"] = "one"
            task = await begun(client, server)
            answer = await client.post("/v1/completions", json=SHORT)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert "which is the limit" in answer.json()["error"]["message"]
            assert (await client.post("/v1/completions", json=SHORT, headers={"x-api-key": "two"})).status_code == 200
            await end(task, server)
            assert (await client.post("/v1/completions", json=SHORT)).status_code == 200
            assert_free(server)

    asyncio.run(ask())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_whoever_has_read_the_last_event_finds_its_place_free(path: str) -> None:
    async def ask() -> None:
        async with asked(concurrency=1) as (client, server):
            transport = client._transport
            assert isinstance(transport, httpx.ASGITransport)
            turn = {"messages": [{"role": "user", "content": "Hello"}], "input": "Hello", "prompt": "Hello"}
            parts = [json.dumps(turn | {"max_tokens": 2, "max_output_tokens": 2, "stream": True}).encode()]
            running: list[int] = []

            async def receive() -> Any:
                if parts:
                    return {"type": "http.request", "body": parts.pop(), "more_body": False}
                return await asyncio.Event().wait()

            async def send(message: Any) -> None:
                if message.get("body"):
                    running.append(server.running.total())

            scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
            await transport.app({**scope, "asgi": {"version": "3.0", "spec_version": "2.4"}}, receive, send)
            assert running[-1] == 0
            assert_free(server)

    asyncio.run(ask())


@pytest.mark.parametrize("engine", [{"slots": 1}, {"slots": 1, "max_waiting": 1}])
def test_a_full_queue_says_when_to_come_again(engine: dict[str, Any]) -> None:
    async def ask() -> None:
        async with asked(engine, waiting=1) as (client, server):
            running = await begun(client, server)
            waiting = asyncio.ensure_future(client.post("/v1/completions", json=LONG))
            while not server.worker.engine.stats().waiting:
                await asyncio.sleep(0.01)
            for path, body in (("/v1/completions", SHORT), ("/v1/completions", SHORT | {"stream": True})):
                answer = await client.post(path, json=body)
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            turn = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
            answer = await client.post("/v1/messages", json=turn)
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
            for task in (waiting, running):
                await end_quietly(task)
            while server.worker.engine.live:
                await asyncio.sleep(0.01)
            assert_free(server)

    asyncio.run(ask())


async def end_quietly(task: asyncio.Task[httpx.Response]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_time_runs_out_with_an_error_in_the_answer_or_in_the_stream() -> None:
    async def ask() -> None:
        async with asked(timeout=1) as (client, server):
            answer = await client.post("/v1/completions", json=LONG | {"speculative": False})
            assert answer.status_code == 408, answer.text
            assert answer.json()["error"]["type"] == "timeout_error"
            assert_free(server)
            answer = await client.post("/v1/completions", json=LONG | {"speculative": False, "stream": True})
            last = [line for line in answer.text.split("\n") if line.startswith("data: ")][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"
            assert_free(server)

    asyncio.run(ask())


def test_what_runs_ends_and_what_comes_new_is_refused_while_the_server_drains() -> None:
    async def ask() -> None:
        async with asked() as (client, server):
            task = await begun(client, server, max_tokens=60)
            server.draining = True
            for method, path in (("POST", "/v1/completions"), ("POST", "/v1/messages"), ("GET", "/health")):
                body = SHORT | {"messages": [{"role": "user", "content": "Hello"}]}
                answer = await client.request(method, path, json=body)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
            assert not server.idle
            assert (await task).json()["usage"]["completion_tokens"] == 60
            assert_free(server)

    asyncio.run(ask())


def test_an_engine_that_has_ended_is_told() -> None:
    async def ask() -> None:
        async with asked() as (client, server):
            assert (await client.get("/health")).status_code == 200
            server.worker.stop()
            for method, path in (("GET", "/health"), ("POST", "/v1/completions"), ("GET", "/stats")):
                assert (await client.request(method, path, json=SHORT)).status_code == 503
            assert (await client.get("/metrics")).status_code == 200

    asyncio.run(ask())


@pytest.mark.parametrize("several", [1, 3])
def test_usage_comes_once_at_the_end_of_a_chat(several: int) -> None:
    async def ask() -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "n": several, "stream": True}
        async with asked() as (client, _):
            answer = await client.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}})
            found = events(answer.text)
            assert [at for at, event in enumerate(found) if event.get("usage")] == [len(found) - 1]
            usage = found[-1]["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_cache_hit_tokens"] == 0
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["completion_tokens"] > several

    asyncio.run(ask())


def test_keys_are_never_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = "sk-open-sesame-1", "sk-open-sesame-2"
    settings = ServerSettings(api_keys={secrets[0]: "a"})
    caplog.set_level(logging.DEBUG)

    async def ask() -> None:
        async with asked(api_keys=settings.api_keys) as (client, server):
            for secret in secrets:
                for path in ("/v1/completions", "/v1/messages", "/stats", "/nothing"):
                    headers = {"authorization": f"Bearer {secret}", "x-api-key": secret}
                    answer = await client.post(path, json=SHORT | {"unknown": 1}, headers=headers)
                    assert secret not in answer.text
            # Not even where something of ours fails.
            monkeypatch.setattr(server, "known", lambda body: 1 / 0)
            answer = await client.post("/v1/completions", json=SHORT, headers={"x-api-key": secrets[0]})
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "internal error"

    asyncio.run(ask())
    assert "ZeroDivisionError" in caplog.text
    assert not any(secret in text for secret in secrets for text in (caplog.text, repr(settings)))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("sent", [0, 1, 3, None])
def test_a_client_that_is_gone_before_it_reads_leaves_nothing(path: str, sent: int | None) -> None:
    """sent: messages until sending fails; None for a client that is known to be gone, where sending never does."""

    async def ask() -> None:
        async with asked() as (client, server):
            transport = client._transport
            assert isinstance(transport, httpx.ASGITransport)
            turn = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3000}
            body = turn if "chat" in path else LONG
            parts = [{"type": "http.request", "body": json.dumps(body | {"stream": True}).encode(), "more_body": False}]
            messages: list[Any] = []

            async def receive() -> Any:
                if not parts and sent is not None:
                    await asyncio.Event().wait()
                return parts.pop() if parts else {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                messages.append(message)
                if sent is not None and len(messages) > sent:
                    raise OSError("gone")

            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
            with contextlib.suppress(OSError, ClientDisconnect):
                await transport.app({**scope, "asgi": {"version": "3.0", "spec_version": "2.4"}}, receive, send)
            if sent is None:
                assert all(message.get("more_body", True) for message in messages)
            else:
                assert len(messages) == sent + 1
            assert_free(server)

    asyncio.run(ask())
