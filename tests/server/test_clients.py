"""The official clients, as they are, over a real socket."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import anthropic
import httpx
import openai
import pytest
from dialogue import CHAT_TOOL, COMMAND, MARKED, PARAMETERS
from serving import demo_server, scripted, until

from rorqual.training.data.tokens import EOS, token_id

ASKED: Any = [{"role": "user", "content": "Who goes there?"}]
TOOLS: Any = [CHAT_TOOL]
SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@cache
def chat() -> Any:
    return openai.OpenAI(base_url=f"{demo_server().url}/v1", api_key="any", max_retries=0).chat.completions


@cache
def responses() -> Any:
    return openai.OpenAI(base_url=f"{demo_server().url}/v1", api_key="any", max_retries=0).responses


@cache
def messages() -> Any:
    return anthropic.Anthropic(base_url=demo_server().url, api_key="any", max_retries=0).messages


def ids_of(text: str) -> list[int]:
    tokenizer = demo_server().model.tokenizer
    assert tokenizer is not None
    return [*tokenizer.encode(text, add_special_tokens=False).ids, token_id(tokenizer, EOS)]


def ask(**options: Any) -> Any:
    return chat().create(**{"model": "rorqual", "messages": ASKED, "max_tokens": 8, "seed": 1, **options})


def test_an_answer_and_its_stream_are_one_text() -> None:
    whole = ask()
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == whole.choices[0].message.content
    )
    # Usage comes with the last chunk and no other.
    assert [one.usage is not None for one in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == 8
    demo_server().assert_clean()


def test_a_stream_ends_with_done() -> None:
    body = {"model": "rorqual", "messages": ASKED, "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{demo_server().url}/v1/chat/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


def test_the_second_time_the_prompt_is_found() -> None:
    long: Any = [{"role": "user", "content": "All that we see or seem is but a dream within a dream. " * 24}]
    first, second = (ask(messages=long).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens > 0
    demo_server().assert_clean()


def test_seeds_repeat_and_completions_differ() -> None:
    several = [[one.message.content for one in ask(n=3, temperature=1.0).choices] for _ in range(2)]
    assert several[0] == several[1]
    assert len(set(several[0])) == 3
    unseeded = {ask(seed=openai.omit, temperature=1.0, max_tokens=12).choices[0].message.content for _ in range(3)}
    assert len(unseeded) == 3


def test_logprobs_are_finite_and_of_the_likeliest() -> None:
    (choice,) = ask(logprobs=True, top_logprobs=3).choices
    assert len(choice.logprobs.content) == 8
    for one in choice.logprobs.content:
        assert math.isfinite(one.logprob)
        assert len(one.top_logprobs) == 3
        assert [top.logprob for top in one.top_logprobs] == sorted(
            (top.logprob for top in one.top_logprobs), reverse=True
        )


def test_a_schema_is_kept() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    (choice,) = ask(response_format=form, max_tokens=60).choices
    assert json.loads(choice.message.content)["a"] in ("x", "y")


def test_a_tool_is_called_and_its_result_goes_back() -> None:
    with scripted(ids_of("So.\n\n" + MARKED)):
        (choice,) = ask(tools=TOOLS, max_tokens=300).choices
        chunks = [one.choices[0].delta for one in ask(tools=TOOLS, max_tokens=300, stream=True) if one.choices]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"cmd": COMMAND, "n": 3}
    parts = [one.tool_calls[0].function.arguments or "" for one in chunks if one.tool_calls]
    assert "".join(parts) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "a b"}
    again = ask(tools=TOOLS, messages=[*ASKED, choice.message, result])
    assert again.choices[0].finish_reason == "length"
    demo_server().assert_clean()


def test_messages_think_call_a_tool_and_take_its_result() -> None:
    tools = [{"name": "sh", "description": "Run a command", "input_schema": PARAMETERS}]
    options: Any = {"model": "rorqual", "max_tokens": 1100, "tools": tools}
    options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    with scripted(ids_of("Hm.</think>So.\n\n" + MARKED)), messages().stream(**options, messages=ASKED) as stream:
        found = stream.get_final_message()
    assert found.stop_reason == "tool_use"
    kinds = {block.type: block for block in found.content}
    assert list(kinds) == ["thinking", "text", "tool_use"]
    assert (kinds["thinking"].thinking, kinds["text"].text.strip()) == ("Hm.", "So.")
    assert kinds["tool_use"].input == {"cmd": COMMAND, "n": 3}
    result = {"type": "tool_result", "tool_use_id": kinds["tool_use"].id, "content": "a b"}
    said = {"role": "assistant", "content": found.content}
    again = messages().create(
        **{**options, "max_tokens": 4, "thinking": {"type": "disabled"}},
        messages=[*ASKED, said, {"role": "user", "content": [result]}],
    )
    assert again.usage.output_tokens == 4
    demo_server().assert_clean()


def test_responses_stream_their_events() -> None:
    with scripted(ids_of("One two.")):
        events = list(responses().create(model="rorqual", input="Count.", max_output_tokens=30, stream=True))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == "One two."
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    (
        ({"model": "other"}, openai.NotFoundError, "other"),
        ({"max_tokens": 5000}, openai.BadRequestError, "4096"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, openai.BadRequestError, "4096"),
        ({"messages": [{"role": "user", "content": "a " * 5000}], "stream": True}, openai.BadRequestError, "4096"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n: 0"),
        ({"messages": []}, openai.BadRequestError, "message"),
    ),
)
def test_errors_are_the_clients_own(options: dict[str, Any], error: type[openai.APIStatusError], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        ask(**options)
    assert raised.value.type is not None


def test_errors_of_messages_are_the_clients_own() -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        messages().create(model="other", max_tokens=4, messages=ASKED)
    assert raised.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="4096"):
        messages().create(model="rorqual", max_tokens=4, messages=[{"role": "user", "content": "a " * 5000}])


def test_an_image_is_refused_by_name() -> None:
    url = {"url": f"data:image/png;base64,{PNG}"}
    with pytest.raises(openai.BadRequestError, match="vision"):
        ask(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": url}]}])
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    with pytest.raises(anthropic.BadRequestError, match="vision"):
        messages().create(
            model="rorqual", max_tokens=4, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]
        )


@pytest.mark.parametrize("path", ("chat/completions", "messages", "responses"))
@pytest.mark.parametrize("stream", (False, True))
def test_a_client_that_leaves_leaves_nothing(path: str, stream: bool) -> None:
    about = {"input": "a"} if path == "responses" else {"messages": ASKED, "max_tokens": 3000}
    body = {"model": "rorqual", "stream": stream, "ignore_eos": True, **about}
    server, url = demo_server(), f"{demo_server().url}/v1/{path}"
    before = server.stats()
    with httpx.Client() as client:
        if stream:
            with client.stream("POST", url, json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(url, json=body, timeout=httpx.Timeout(60, read=0.5))
    until(lambda: server.stats().aborted == before.aborted + 1)
    server.assert_clean()
    assert server.stats().finished == before.finished
    # Long before the end of the text.
    assert server.stats().counts.new - before.counts.new < 1000


def test_an_answer_that_is_read_to_its_end_is_no_abort() -> None:
    before = demo_server().stats()
    ask()
    list(ask(stream=True))
    demo_server().assert_clean()
    after = demo_server().stats()
    assert (after.finished - before.finished, after.aborted) == (2, before.aborted)
