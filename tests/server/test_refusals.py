"""Every mistake of a client's is a body that its library reads, and never a 500."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from apps import asked, assert_free

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TURN = [{"role": "user", "content": "Who goes there?"}]
LEGAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURN, "max_tokens": 2},
    TEXT: {"prompt": "A whale", "max_tokens": 2},
    RESPONSES: {"input": "A whale", "max_output_tokens": 16},
    MESSAGES: {"messages": TURN, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": TURN},
    "/tokenize": {"prompt": "A whale"},
    "/detokenize": {"tokens": [50, 60]},
}
MALFORMED = 250
"""Bodies in `make test`; `make test-all` sends 2,000."""


def assert_error(path: str, answer: httpx.Response) -> str:
    """It is an error of the route's kind; its message."""
    body = answer.json()
    if path.startswith(MESSAGES):
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    message: str = body["error"]["message"]
    assert message
    return message


def refusal(path: str, body: dict[str, Any], status: int = 400) -> str:
    async def ask() -> str:
        async with asked() as (client, server):
            answer = await client.post(path, json=body)
            assert answer.status_code == status, answer.text
            assert_free(server)
            return assert_error(path, answer)

    return asyncio.run(ask())


def test_the_table_of_limits() -> None:
    table: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"n": 0}, "n: 0"),
        (CHAT, {"n": 17}, "1..16"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"top_p": 1.5}, "top_p"),
        (CHAT, {"stop": ""}, "stop"),
        (CHAT, {"max_tokens": 100_000}, "4096"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [10**6]}, "vocabulary"),
        (TEXT, {"n": 0}, "n: 0"),
        (TEXT, {"best_of": 3}, "best_of"),
        (TEXT, {"logprobs": 6}, "0..5"),
        (TEXT, {"temperature": -1}, "temperature"),
        (TEXT, {"top_p": 0}, "top_p"),
        (TEXT, {"top_p": 1.5}, "top_p"),
        (TEXT, {"stop": ""}, "stop"),
        (TEXT, {"max_tokens": 100_000, "stream": True}, "100000 new ones are more than the limit of 4096"),
        (TEXT, {"logit_bias": {"50": 10**400}}, "logit_bias"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"max_tokens": 100_000, "stream": True}, "4096"),
        (RESPONSES, {"input": []}, "nput"),
        (RESPONSES, {"max_output_tokens": 0}, "max_tokens"),
    ]

    async def ask() -> None:
        async with asked() as (client, server):
            for path, extra, told in table:
                answer = await client.post(path, json=LEGAL[path] | extra)
                assert answer.status_code == 400, (path, extra, answer.text)
                assert told in assert_error(path, answer), (path, extra, answer.text)
            assert_free(server)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "functions", [{"name": "a"}]),
        (CHAT, "audio", {"voice": "alloy"}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "store", True),
        (TEXT, "suffix", "the end"),
        (RESPONSES, "previous_response_id", "resp_1"),
        (RESPONSES, "store", True),
        (MESSAGES, "container", "c"),
    ],
)
def test_what_we_know_and_do_not_do_is_refused_by_name(path: str, field: str, value: object) -> None:
    assert field in refusal(path, LEGAL[path] | {field: value})


def test_what_we_do_not_know_is_told_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with asked() as (client, _):
            for path in (CHAT, TEXT, RESPONSES, MESSAGES):
                answer = await client.post(path, json=LEGAL[path] | {"colour": "sea", "a\nb": 1})
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-rorqual-ignored-fields"] == "colour"
                assert "x-rorqual-ignored-fields" not in (await client.post(path, json=LEGAL[path])).headers

    asyncio.run(ask())
    assert "colour" in caplog.text


def test_paths_and_methods_that_are_not_there_are_told_in_each_api() -> None:
    async def ask() -> None:
        async with asked() as (client, _):
            for method, path, status in (
                ("GET", "/nothing", 404),
                ("GET", TEXT, 405),
                ("POST", "/v1/messages/nothing", 404),
                ("GET", MESSAGES, 405),
            ):
                answer = await client.request(method, path)
                assert answer.status_code == status
                assert_error(path, answer)
                assert ("allow" in answer.headers) == (status == 405)

    asyncio.run(ask())


def test_models_bodies_and_keys_that_are_not_legal() -> None:
    async def ask() -> None:
        async with asked(body_bytes=1000, api_keys={"sesame": "a"}) as (client, _):
            client.headers["authorization"] = "Bearer sesame"
            for path, legal in LEGAL.items():
                for body, status in (
                    (json.dumps(legal | {"model": "other"}), 404),
                    ("x" * 1001, 413),
                    ("{", 400),
                    ("[1]", 400),
                    ("\xff\xfe", 400),
                    ('{"prompt": NaN}', 400),
                    ('{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
                    ('{"a": ' + "[" * 400 + "]" * 400 + "}", 400),
                ):
                    answer = await client.post(path, content=body.encode("latin-1"))
                    assert answer.status_code == status, (path, body, answer.text)
                    assert_error(path, answer)
                answer = await client.post(path, json=legal, headers={"authorization": "Bearer sesam"})
                assert answer.status_code == 401
                assert_error(path, answer)
                assert (await client.post(path, json=legal)).status_code == 200

    asyncio.run(ask())


NAMES = [
    *(
        "model",
        "messages",
        "prompt",
        "input",
        "tokens",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n",
    ),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_sequences", "stop_token_ids", "logprobs", "echo"),
    *("top_logprobs", "logit_bias", "stream", "stream_options", "tools", "tool_choice", "response_format", "reasoning"),
    *("reasoning_effort", "thinking", "output_config", "cache_salt", "speculative", "best_of", "user", "min_tokens"),
    *("ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "text", "system", "instructions"),
    *("metadata", "return_token_strs", "add_special_tokens", "return_tokens_as_token_ids", "content", "role", "name"),
    *("type", "priority", "n"),
]


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A value of any type, most of them wrong wherever they come to stand."""
    choices: list[Any] = [
        None, True, False, 0, 1, -1, 2, 16, 50, 10**6, 2**31, -(2**63), 10**30, 10**400, 0.0, 0.5, -1.5, 1e308,
        "", "a", "user", "assistant", "tool", "auto", "none", "required", "json_object", "high", "\x00", "🐋",
        "<｜User｜>", "<｜image｜>", "x" * 300, "data:image/png;base64,AAAA", "http://169.254.169.254/",
        [], {}, [[]], [50, 60],
    ]  # fmt: skip
    if depth < 4 and rng.random() < 0.5:
        if rng.random() < 0.5:
            return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice(NAMES): anything(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(choices)


def malformed(rng: random.Random, legal: dict[str, Any]) -> dict[str, Any]:
    body = dict(legal)
    for name in rng.sample(NAMES, rng.randrange(1, 4)):
        body[name] = anything(rng)
    if rng.random() < 0.3:
        body["messages"] = [
            {"role": rng.choice(["user", "assistant", "tool", "system"]), rng.choice(NAMES): anything(rng)},
            {"role": "user", "content": [{"type": rng.choice(["text", "image_url", "image"]), "text": anything(rng)}]},
        ]
    return body


async def send_malformed(count: int, seed: int) -> None:
    rng = random.Random(seed)
    served = 0
    async with asked(timeout=60) as (client, server):
        for at in range(count):
            path = rng.choice(list(LEGAL))
            body = malformed(rng, LEGAL[path])
            # A legal one among them would fill all positions.
            if (body.get("max_tokens") or 0) not in (1, 2) and "max_tokens" in LEGAL[path]:
                body["max_tokens"] = rng.choice([2, -1, "2", 2.5, True])
            answer = await client.post(path, json=body)
            told = (seed, at, path, body, answer.text[:500])
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, told
            if answer.status_code == 200:
                served += 1
            else:
                assert_error(path, answer)
        # Both kinds come: what is wrong where nobody looks is passed over.
        assert count * 0.02 < served < count * 0.6
        assert (await client.get("/health")).status_code == 200
        assert_free(server)


def test_malformed_bodies_are_refused_and_leave_nothing() -> None:
    asyncio.run(send_malformed(MALFORMED, seed=7))


@pytest.mark.full
def test_malformed_bodies_are_refused_and_leave_nothing_in_full() -> None:
    asyncio.run(send_malformed(2000, seed=11))
