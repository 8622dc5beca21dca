"""`/v1/completions`, `/tokenize`, `/detokenize`: shapes, echo, log-probabilities, and what lm-eval reads of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from apps import asked, assert_free, events
from serving import demo_model

from rorqual import LLM, SamplingParams

WHALE = {"prompt": "The whale", "temperature": 0, "max_tokens": 6}


def whole(body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with asked() as (client, server):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert_free(server)
            found: dict[str, Any] = answer.json()
            return found

    return asyncio.run(ask())


def streamed(body: dict[str, Any]) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        async with asked() as (client, server):
            answer = await client.post("/v1/completions", json={**body, "stream": True})
            assert answer.status_code == 200, answer.text
            assert_free(server)
            return events(answer.text)

    return asyncio.run(ask())


def test_the_text_is_the_engines_own() -> None:
    output = LLM(demo_model(), slots=2).generate("The whale", SamplingParams(max_tokens=6))[0]
    found = whole(WHALE)
    assert found["choices"][0]["text"] == output.text
    assert found["choices"][0]["finish_reason"] == output.finish_reason
    assert found["usage"]["completion_tokens"] == len(output.token_ids)


def test_as_an_evaluation_asks_the_prompt_is_scored_and_nothing_is_added() -> None:
    model, ids = demo_model(), [0, 371, 280, 287, 332, 50]
    assert model.tokenizer is not None
    body = {"prompt": [ids], "temperature": 0, "seed": 1234, "logprobs": 1, "echo": True}
    full = LLM(model, slots=2).generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs
    assert full is not None
    none, one = (whole({**body, "max_tokens": new})["choices"][0] for new in (0, 1))
    assert none["text"] == model.tokenizer.decode(ids)
    assert none["finish_reason"] == "length"
    assert none["logprobs"]["token_logprobs"] == [None, *(own.logprob for own in full[1:] if own)]
    for name, values in none["logprobs"].items():
        assert one["logprobs"][name][: len(ids)] == values
        assert len(values) == len(ids)
    # The client calls a token greedy where it is the likeliest of its row.
    for token, top in zip(none["logprobs"]["tokens"][1:], none["logprobs"]["top_logprobs"][1:], strict=True):
        assert 1 <= len(top) <= 2
        assert token in top


def test_offsets_are_where_tokens_begin() -> None:
    choice = whole({**WHALE, "echo": True, "logprobs": 2, "max_tokens": 8})["choices"][0]
    told = choice["logprobs"]
    assert choice["text"].startswith("The whale")
    for token, start, end in zip(
        told["tokens"], told["text_offset"], [*told["text_offset"][1:], len(choice["text"])], strict=True
    ):
        if not token.startswith(("<｜", "bytes:")):
            assert choice["text"][start:end] == token


@pytest.mark.parametrize("extra", [{}, {"logprobs": 3}, {"echo": True, "logprobs": 0}, {"n": 2, "seed": 5}])
def test_a_stream_is_the_whole_answer_in_pieces(extra: dict[str, Any]) -> None:
    body = {**WHALE, **extra, "temperature": 1.0, "seed": 5, "prompt": ["The whale", "A ship"]}
    answer, found = whole(body), streamed({**body, "stream_options": {"include_usage": True}})
    assert [event["usage"] for event in found if "usage" in event] == [answer["usage"]]
    assert "usage" in found[-1]
    for choice in answer["choices"]:
        pieces = [own for event in found for own in event["choices"] if own["index"] == choice["index"]]
        assert "".join(own["text"] for own in pieces) == choice["text"]
        assert [own["finish_reason"] for own in pieces if own["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"] is not None:
            told = [own["logprobs"] for own in pieces if own["logprobs"] is not None]
            assert [each for own in told for each in own["tokens"]] == choice["logprobs"]["tokens"]


def test_no_token_of_a_stop_text_is_told() -> None:
    text = whole({**WHALE, "max_tokens": 12})["choices"][0]["text"]
    stop = text[5:9]
    choice = whole({**WHALE, "max_tokens": 12, "stop": [stop], "logprobs": 0})["choices"][0]
    assert (choice["finish_reason"], choice["text"]) == ("stop", text[: text.index(stop)])
    assert all(at < len(choice["text"]) for at in choice["logprobs"]["text_offset"])


def test_tokens_of_a_text_and_back() -> None:
    found = whole({"prompt": "A whale 🐋", "return_token_strs": True}, "/tokenize")
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["tokens"][0] == demo_model().config.bos_token_id
    assert whole({"tokens": found["tokens"][1:]}, "/detokenize") == {"prompt": "A whale 🐋"}


def test_a_conversation_is_counted_as_it_is_run() -> None:
    turn = {"messages": [{"role": "user", "content": "Who goes there?"}]}
    counted = whole(turn, "/v1/messages/count_tokens")["input_tokens"]
    ran = whole({**turn, "max_tokens": 1}, "/v1/messages")["usage"]["input_tokens"]
    assert counted == ran == whole(turn, "/tokenize")["count"]
