"""Many streams at once, from a process of its own: `load_client.py URL STREAMS TOKENS SECONDS`, texts as JSON.

Stream i sends prompt and seed i, again and again until the seconds are over, once at least.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx

HOW = {"temperature": 0.9, "stream": True}


def body(number: int, tokens: int) -> dict[str, Any]:
    """Of one request."""
    return {
        "model": "rorqual",
        "messages": [{"role": "user", "content": f"Of whales, chapter {number}."}],
        "max_tokens": tokens,
        "seed": number,
        **HOW,
    }


async def stream(client: httpx.AsyncClient, number: int, tokens: int) -> str:
    """What one request says."""
    text, done = "", False
    async with client.stream("POST", "/v1/chat/completions", json=body(number, tokens)) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
    assert done, "a stream ended without [DONE]"
    return text


async def main(url: str, streams: int, tokens: int, seconds: float) -> list[list[str]]:
    """All that each stream got."""
    end = time.monotonic() + seconds

    async def again(client: httpx.AsyncClient, number: int) -> list[str]:
        found = [await stream(client, number, tokens)]
        while time.monotonic() < end:
            found.append(await stream(client, number, tokens))
        return found

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        return list(await asyncio.gather(*(again(client, number) for number in range(streams))))


if __name__ == "__main__":
    url, streams, tokens, seconds = sys.argv[1:]
    print(json.dumps(asyncio.run(main(url, int(streams), int(tokens), float(seconds)))))
