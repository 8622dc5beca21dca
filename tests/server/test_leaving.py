"""Clients that leave in the middle of others' answers: the others notice nothing, and nothing is left of who left."""

from __future__ import annotations

import asyncio
import contextlib
import random

import httpx
import pytest
from load_client import body, stream
from serving import SECONDS, demo_server, until
from test_load import descriptors, offline

STREAMS, FULL_STREAMS = 24, 400
IN_FLIGHT = 12
PROMPTS = 6
TOKENS = 20


async def leave(client: httpx.AsyncClient, number: int, events: int) -> None:
    """Ask for much, read so many events of it and hang up."""
    async with client.stream("POST", "/v1/chat/completions", json=body(number, 2000) | {"ignore_eos": True}) as answer:
        answer.raise_for_status()
        lines = answer.aiter_lines()
        for _ in range(events):
            await anext(lines)


async def give_up(client: httpx.AsyncClient, number: int, seconds: float) -> None:
    """Ask for a whole answer, and do not wait for it."""
    asked = body(number, 2000) | {"ignore_eos": True, "stream": False}
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(client.post("/v1/chat/completions", json=asked), seconds)
        raise AssertionError("2,000 tokens came before the client gave up")


async def mixed(url: str, streams: int) -> tuple[list[tuple[int, str]], int]:
    """What those heard who stayed, by prompt, and how many left."""
    draw, heard, left = random.Random(7), list[tuple[int, str]](), 0
    room = asyncio.Semaphore(IN_FLIGHT)

    async def one(client: httpx.AsyncClient, kind: int, number: int, how_long: int) -> None:
        async with room:
            match kind:
                case 0:
                    await leave(client, number, how_long)
                case 1:
                    await give_up(client, number, 0.02 * how_long)
                case _:
                    heard.append((number, await stream(client, number, TOKENS)))

    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        asked = [(draw.randrange(4), draw.randrange(PROMPTS), draw.randrange(8)) for _ in range(streams)]
        left = sum(kind < 2 for kind, _, _ in asked)
        await asyncio.gather(*(one(client, *each) for each in asked))
    return heard, left


@pytest.mark.parametrize("streams", [STREAMS, pytest.param(FULL_STREAMS, marks=pytest.mark.full)])
def test_who_stays_hears_everything_and_who_leaves_leaves_nothing(streams: int) -> None:
    server, expected = demo_server(), offline(PROMPTS, TOKENS)
    server.assert_clean()
    files, before = descriptors(), server.stats()
    heard, left = asyncio.run(mixed(server.url, streams))
    assert len(heard) + left == streams
    assert min(len(heard), left) > streams // 4
    assert all(text == expected[number] for number, text in heard)
    server.assert_clean()
    after = server.stats()
    assert after.finished - before.finished == len(heard)
    # Who gives up before the request was read was never there.
    assert 0 < after.aborted - before.aborted <= left
    until(lambda: descriptors() <= files)
