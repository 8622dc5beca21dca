"""Inputs on which servers of this kind were reported wrong: which test has each, and those that have no other place."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from apps import asked, assert_free, events
from dialogue import ASKED, TOOL, body_of, conversations
from serving import demo_model
from test_bodies import EFFORTS, PIXEL, text_of

from rorqual.errors import InputError
from rorqual.server.protocol import CHAT, MESSAGES, RESPONSES, Api

TESTS = Path(__file__).resolve().parents[1]
CASES: dict[int, str] = {
    40: """server/test_cut_streams test_every_cut_in_two_gives_the_whole test_a_token_at_a_time_gives_the_whole
        test_a_whole_answer_is_the_stream_s""",
    41: """server/test_cut_streams test_malformed_markup_is_no_content_and_no_broken_call
        test_a_call_that_no_client_can_answer_is_not_told test_an_answer_that_its_budget_cuts_says_so""",
    42: """server/test_bodies test_a_call_without_arguments_is_history test_arguments_as_an_object_are_those_as_a_text
        test_arguments_that_are_no_object_are_refused test_tool_choice_none_shows_no_tools
        server/test_served_field_cases test_earlier_calls_are_history_in_every_api""",
    43: """server/test_bodies test_an_effort_is_a_number_in_the_prompt
        test_a_request_that_thinks_without_saying_how_much_thinks_as_the_release
        server/test_served_field_cases test_an_effort_of_messages_is_a_number_in_the_prompt""",
    44: "server/test_bodies test_spellings_in_a_users_text_are_plain_text",
    45: """server/test_images_served test_a_shape_costs_the_tokens_of_its_grid
        test_what_is_too_long_and_thin_is_refused_by_its_size test_images_cost_tokens_by_their_size
        test_a_grey_is_the_same_grey_in_every_pixel_format test_an_animation_is_refused_whichever_frame_was_meant
        test_damaged_files_are_refused_wherever_they_are_cut test_what_is_no_image_here_is_refused""",
    46: "server/test_served_field_cases test_an_image_for_a_text_model_is_refused_in_every_api",
    47: """server/test_cut_streams test_a_stop_text_never_shows_its_beginning
        server/test_text_completions test_no_token_of_a_stop_text_is_told""",
    48: "server/test_cut_streams test_no_delta_holds_half_a_character",
    49: """server/test_clients test_a_client_that_leaves_leaves_nothing
        test_an_answer_that_is_read_to_its_end_is_no_abort
        server/test_bounds test_a_client_that_is_gone_before_it_reads_leaves_nothing""",
    50: """server/test_clients test_seeds_repeat_and_completions_differ
        server/test_load test_many_streams_say_what_the_engine_says_alone""",
    51: """server/test_refusals test_the_table_of_limits
        server/test_served_field_cases test_what_does_not_fit_is_told_before_the_stream_opens""",
    52: """server/test_load test_tenants_and_salts_never_share_a_page test_a_tenant_cannot_spell_another_one
        server/test_cut_streams test_no_logprob_breaks_the_json""",
    53: """server/test_bounds test_usage_comes_once_at_the_end_of_a_chat
        server/test_clients test_a_stream_ends_with_done
        server/test_refusals test_what_we_do_not_know_is_told_and_passed_over
        test_what_we_know_and_do_not_do_is_refused_by_name
        server/test_served_field_cases test_the_last_chunk_tells_what_was_found_in_the_cache""",
}
"""Case -> files and the tests in them."""


def test_every_case_of_the_server_has_its_tests() -> None:
    assert list(CASES) == list(range(40, 54))
    for case, named in CASES.items():
        text = ""
        for word in named.split():
            if "/" in word:
                text = (TESTS / f"{word}.py").read_text(encoding="utf-8")
            else:
                assert re.search(rf"^def {word}\(", text, re.MULTILINE), (case, word)


def called(api: Api, arguments: Any) -> dict[str, Any]:
    """A conversation in which the assistant has called a tool; `...` leaves the arguments out."""
    given = {} if arguments is ... else {"arguments": arguments}
    if api is MESSAGES:
        use = {"type": "tool_use", "id": "a", "name": "sh"} | ({} if arguments is ... else {"input": arguments})
        result = {"type": "tool_result", "tool_use_id": "a", "content": "none"}
        turns = [*ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        return body_of(api, messages=turns)
    call = {"type": "function_call", "call_id": "a", "name": TOOL["name"], **given}
    output = {"type": "function_call_output", "call_id": "a", "output": "none"}
    return body_of(api, input=[{"role": "user", "content": "List the files."}, call, output])


@pytest.mark.parametrize(
    ("api", "arguments", "same"),
    (
        *((RESPONSES, given, "{}") for given in (..., None, "", {})),
        (RESPONSES, {"cmd": "ls"}, '{"cmd": "ls"}'),
        *((MESSAGES, given, {}) for given in (..., None)),
    ),
)
def test_earlier_calls_are_history_in_every_api(api: Api, arguments: Any, same: Any) -> None:
    shown = text_of(api, called(api, arguments))
    assert shown == text_of(api, called(api, same))
    assert 'invoke name="sh"' in shown
    if api is RESPONSES:
        for wrong in ("{", "[1]", "ls", 3):
            with pytest.raises(InputError, match=r"input\.1\.arguments"):
                text_of(api, called(api, wrong))


def test_an_effort_of_messages_is_a_number_in_the_prompt() -> None:
    def body(effort: object) -> dict[str, Any]:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        turn = {"model": "rorqual", "max_tokens": 2000, "messages": ASKED, "thinking": thinking}
        return {**turn, "output_config": {"effort": effort}}

    for effort, number in EFFORTS.items():
        assert f"Reasoning Effort: {number} " in text_of(MESSAGES, body(effort)), effort
    for effort in (0, 101, -1, True):
        with pytest.raises(InputError, match=r"1\.\.100"):
            text_of(MESSAGES, body(effort))


def test_an_image_for_a_text_model_is_refused_in_every_api() -> None:
    head, data = PIXEL.split(",")
    assert head == "data:image/png;base64"
    source = {"type": "base64", "media_type": "image/png", "data": data}

    def turn(part: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [part]}]

    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": turn({"type": "image_url", "image_url": {"url": PIXEL}})},
        "/v1/messages": {"max_tokens": 4, "messages": turn({"type": "image", "source": source})},
        "/v1/responses": {"input": turn({"type": "input_image", "image_url": PIXEL})},
    }

    async def ask() -> None:
        async with asked() as (client, server):
            for path, body in bodies.items():
                for stream in (False, True):
                    answer = await client.post(path, json=body | {"stream": stream})
                    assert answer.status_code == 400, (path, answer.text)
                    assert "image: this model has no vision tower" in answer.json()["error"]["message"]
            assert_free(server)

    asyncio.run(ask())


def test_what_does_not_fit_is_told_before_the_stream_opens() -> None:
    """With the limit, the prompt's tokens and what was asked for."""
    limit = demo_model().config.max_position_embeddings
    prompt = len(conversations().call(CHAT, {"model": "rorqual", "messages": ASKED}, "a").ids)
    bodies = {
        "/v1/chat/completions": ({"messages": ASKED, "max_tokens": 4095}, prompt),
        "/v1/messages": ({"messages": ASKED, "max_tokens": 4095}, prompt),
        "/v1/responses": ({"input": ASKED[0]["content"], "max_output_tokens": 4095}, prompt),
        "/v1/completions": ({"prompt": [50] * 9, "max_tokens": 4095}, 9),
    }

    async def ask() -> None:
        async with asked() as (client, server):
            for path, (body, tokens) in bodies.items():
                for stream in (False, True):
                    answer = await client.post(path, json=body | {"stream": stream})
                    assert answer.status_code == 400, (path, answer.text)
                    assert answer.headers["content-type"] == "application/json"
                    numbers = re.findall(r"\d+", answer.json()["error"]["message"])
                    assert {str(limit), str(tokens), "4095"} <= set(numbers), answer.text
            assert_free(server)

    asyncio.run(ask())


@pytest.mark.parametrize("path", ("/v1/chat/completions", "/v1/completions"))
def test_the_last_chunk_tells_what_was_found_in_the_cache(path: str) -> None:
    long = "All that we see or seem is but a dream within a dream. " * 24
    body = {"prompt": long} if path == "/v1/completions" else {"messages": [{"role": "user", "content": long}]}
    body |= {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}

    async def ask() -> None:
        async with asked() as (client, server):
            found = [events((await client.post(path, json=body)).text) for _ in range(2)]
            assert_free(server)
        for chunks in found:
            assert [at for at, chunk in enumerate(chunks) if chunk.get("usage")] == [len(chunks) - 1]
        first, second = (chunks[-1]["usage"] for chunks in found)
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_cache_hit_tokens"] > 0

    asyncio.run(ask())
