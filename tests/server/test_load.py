"""Many streams at once: no error, nothing left over, the same texts as without a server; tenants keep apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dialogue import conversations
from serving import Served, demo_model, demo_server

from rorqual.engine.llm import LLM
from rorqual.engine.params import SamplingParams
from rorqual.server.protocol import CHAT
from rorqual.server.settings import ServerSettings

CLIENT = Path(__file__).with_name("load_client.py")


def load(streams: int, tokens: int, seconds: float) -> list[list[str]]:
    """What clients in another process got."""
    arguments = [demo_server().url, str(streams), str(tokens), str(seconds)]
    run = subprocess.run(
        [sys.executable, str(CLIENT), *arguments], capture_output=True, text=True, timeout=seconds + 300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found: list[list[str]] = json.loads(run.stdout)
    return found


def offline(streams: int, tokens: int) -> list[str]:
    """The same prompts and seeds without a server."""
    prompts = [
        conversations()
        .call(CHAT, {"model": "rorqual", "messages": [{"role": "user", "content": f"Of whales, chapter {n}."}]}, "a")
        .ids
        for n in range(streams)
    ]
    params = [SamplingParams(temperature=0.9, seed=n, max_tokens=tokens) for n in range(streams)]
    return [output.text for output in LLM(demo_model(), slots=4).generate(prompts, params)]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_streams_say_what_the_engine_says_alone() -> None:
    demo_server().assert_clean()
    before = descriptors()
    assert load(16, 12, 0) == [[text] for text in offline(16, 12)]
    demo_server().assert_clean()
    assert descriptors() <= before


@pytest.mark.full
def test_a_minute_of_many_streams_leaves_nothing_and_costs_little() -> None:
    server, expected = demo_server(), offline(64, 24)
    load(64, 24, 0)  # whatever grows once has grown
    server.assert_clean()
    files, memory = descriptors(), resident()
    engine, process = server.ask(lambda _: time.thread_time()), time.process_time()
    found = load(64, 24, 60)
    engine, process = server.ask(lambda _: time.thread_time()) - engine, time.process_time() - process
    assert all(text == expected[n] for n, texts in enumerate(found) for text in texts)
    server.assert_clean()
    assert descriptors() <= files
    assert resident() - memory < 64 << 20
    rest = process - engine
    print(f"load: {sum(map(len, found))} streams, engine {engine:.1f} s, the rest of the server {rest:.1f} s")
    assert rest <= 0.1 * engine


@pytest.fixture(scope="module")
def tenants() -> Iterator[Served]:
    served = Served(demo_model(), ServerSettings(api_keys={"key-a": "a", "key-a2": "a", "key-b": "b"}), slots=2)
    yield served
    served.close()


def asked(server: Served, key: str, **fields: Any) -> tuple[int, int]:
    """(prompt tokens found in the cache, rows computed) of one long prompt."""
    before = server.stats().counts.computed
    body = {
        "model": "rorqual",
        "messages": [{"role": "user", "content": "Thou still unravished bride of quietness. " * 24}],
        "max_tokens": 1,
        "seed": 1,
        **fields,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"x-api-key": key}, timeout=60)
    answer.raise_for_status()
    return answer.json()["usage"]["prompt_cache_hit_tokens"], server.stats().counts.computed - before


def test_tenants_and_salts_never_share_a_page(tenants: Served) -> None:
    hit, rows = asked(tenants, "key-a")
    assert hit == 0
    # Neither what is told nor the work, which is what takes the time, shows that another had it.
    assert asked(tenants, "key-b") == (0, rows)
    assert asked(tenants, "key-a", cache_salt="s") == (0, rows)
    for key, salt in (("key-a", None), ("key-a2", None), ("key-b", None), ("key-a", "s")):
        found, computed = asked(tenants, key, cache_salt=salt)
        assert found > 0
        assert computed < rows
    assert asked(tenants, "key-b", cache_salt="s") == (0, rows)
    tenants.assert_clean()


def test_a_tenant_cannot_spell_another_one(tenants: Served) -> None:
    asked(tenants, "key-a", cache_salt="t")
    for salt in ("a", "t", '["a", "t"]', 'b", "t'):
        hit, _ = asked(tenants, "key-b", cache_salt=salt)
        assert hit == 0


def test_a_key_is_needed(tenants: Served) -> None:
    for headers in ({}, {"x-api-key": "key"}, {"authorization": "Bearer key-c"}, {"x-api-key": "é".encode()}):
        answer = httpx.post(f"{tenants.url}/v1/chat/completions", json={"messages": []}, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
