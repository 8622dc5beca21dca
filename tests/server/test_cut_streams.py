"""Whatever the engine says, cut anywhere: clients get the same text, arguments that are JSON, and no markup."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from dialogue import COMMAND, MARKED, Told, answer_of, body_of, conversations, events_of, told_of
from serving import demo_model, pieces, spelled_ids

from rorqual.server.protocol import CHAT, MESSAGES, RESPONSES, Api, Call
from rorqual.training.data.tokens import EOS, token_id

SAID = "Let me 漢😀 see.\n\n" + MARKED
THOUGHT = "<b> first</think>\n\n" + SAID
MARKUP = ("DSML", "<think>", "</think>", "invoke", "parameter", "\ufffd")
BAD = {
    "no end of the invocation": MARKED.replace("</｜DSML｜ invoke>\n", ""),
    "no end of a parameter": MARKED.replace("</｜DSML｜ parameter>", "", 1),
    "a parameter without a name": MARKED.replace('name="cmd" ', ""),
    "text between": MARKED.replace(" calls>\n<", " calls> so <", 1),
    "text behind": MARKED + " and more",
    "an unknown tool": MARKED.replace('name="sh"', 'name="other"'),
    "an empty block": "<｜DSML｜ calls></｜DSML｜ calls>",
    "a block in a block": MARKED.replace("<｜DSML｜ invoke", "<｜DSML｜ calls>\n<｜DSML｜ invoke", 1),
}
OPEN = {
    "a number that is none": MARKED.replace(">3<", ">three<"),
    "an end in the middle": MARKED[:-30],
    "an invocation alone": '<｜DSML｜ invoke name="sh">',
}
"""The model itself ends within a call, or writes a value that is no JSON."""


def ids_of(text: str) -> list[int]:
    tokenizer = demo_model().tokenizer
    assert tokenizer is not None
    return spelled_ids(tokenizer, text)


def eos() -> int:
    tokenizer = demo_model().tokenizer
    assert tokenizer is not None
    return token_id(tokenizer, EOS)


def call_of(api: Api, thinks: bool = False, **fields: Any) -> Call:
    kind = {"type": "enabled" if thinks else "disabled"}
    body = body_of(api, **fields)
    if api is RESPONSES:
        body["reasoning"] = {"effort": "high" if thinks else "none"}
    else:
        body["thinking"] = {**kind, "budget_tokens": 1024} if api is MESSAGES and thinks else kind
    return conversations().call(api, body, "answer")


def streamed(api: Api, parts: list[list[int]], thinks: bool = False, ends: bool = True) -> Told:
    return told_of(api, events_of(call_of(api, thinks), parts, eos() if ends else None))


def assert_call(told: Told) -> None:
    """Both parts as said, to the character."""
    assert told.content.strip() == "Let me 漢😀 see."
    ((name, arguments),) = told.calls
    assert (name, json.loads(arguments)) == ("sh", {"cmd": COMMAND, "n": 3})


@pytest.mark.parametrize("api", (CHAT, MESSAGES, RESPONSES), ids=lambda api: api.name)
def test_every_cut_in_two_gives_the_whole(api: Api) -> None:
    ids = ids_of(SAID)
    whole = streamed(api, [ids])
    assert_call(whole)
    # Tokens of the text are single bytes and characters, so a cut is inside characters too.
    for cut in range(1, len(ids)):
        assert streamed(api, [ids[:cut], ids[cut:]]) == whole, cut


@pytest.mark.parametrize("api", (CHAT, MESSAGES, RESPONSES), ids=lambda api: api.name)
@pytest.mark.parametrize("thinks", (False, True))
def test_a_token_at_a_time_gives_the_whole(api: Api, thinks: bool) -> None:
    ids = ids_of(THOUGHT if thinks else SAID)
    told = streamed(api, [[one] for one in ids], thinks)
    assert told == streamed(api, [ids], thinks)
    assert_call(told)
    assert told.reasoning == ("<b> first" if thinks else "")


def test_a_whole_answer_is_the_stream_s() -> None:
    ids = ids_of(SAID)
    (choice,) = answer_of(call_of(CHAT), [[one] for one in ids], eos())["choices"]
    told = streamed(CHAT, [[one] for one in ids])
    assert choice["message"]["content"] == told.content
    calls = [one["function"] for one in choice["message"]["tool_calls"]]
    assert [[one["name"], one["arguments"]] for one in calls] == told.calls
    assert choice["finish_reason"] == told.finish == "tool_calls"


@pytest.mark.parametrize("said", {**BAD, **OPEN}.values(), ids={**BAD, **OPEN})
def test_malformed_markup_is_no_content(said: str) -> None:
    ids = ids_of(said)
    told = streamed(CHAT, [[one] for one in ids])
    assert told == streamed(CHAT, [ids])
    assert not any(one in told.content for one in MARKUP), told.content


@pytest.mark.parametrize("said", BAD.values(), ids=BAD)
def test_arguments_of_malformed_markup_are_an_object(said: str) -> None:
    for _, arguments in streamed(CHAT, [ids_of(said)]).calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.xfail(strict=True, reason="deepseek-recipe streams arguments before it knows how they end")
@pytest.mark.parametrize("said", OPEN.values(), ids=OPEN)
def test_arguments_that_the_model_leaves_open_are_an_object(said: str) -> None:
    for _, arguments in streamed(CHAT, [ids_of(said)]).calls:
        assert isinstance(json.loads(arguments), dict)


def test_an_answer_that_its_budget_cuts_says_so() -> None:
    ids = ids_of(SAID)[:-1]
    for count in range(1, len(ids)):
        told = streamed(CHAT, [[one] for one in ids[:count]], ends=False)
        assert told.finish == "length", count
        assert not any(one in told.content for one in MARKUP), (count, told.content)


def test_no_delta_holds_half_a_character() -> None:
    text = "a 😀漢字 é👩‍👩‍👧"
    ids = ids_of(text)
    assert len(ids) - 1 > len(pieces(text))
    told = streamed(CHAT, [[one] for one in ids])
    assert told.content == text
    # A budget may end within a character; what is left of it is dropped or marked, and all before it is there.
    for count in range(1, len(ids)):
        found = streamed(CHAT, [[one] for one in ids[:count]], ends=False).content
        assert text.startswith(found.rstrip("\ufffd")), count


@pytest.mark.parametrize(
    ("stops", "content"),
    (
        (["two th"], "one "),
        (["two three", "two"], "one "),
        (["two three four", "e"], "on"),
        (["two x", "three four x"], "one two three four"),
    ),
)
def test_a_stop_text_never_shows_its_beginning(stops: list[str], content: str) -> None:
    ids = ids_of("one two three four")
    call = call_of(CHAT, stop=stops)
    assert told_of(CHAT, events_of(call, [ids], eos())).content == content
    for cut in range(1, len(ids)):
        told = told_of(CHAT, events_of(call, [ids[:cut], ids[cut:]], eos()))
        assert (told.content, told.finish) == (content, "stop"), cut


@pytest.mark.parametrize("value", (-math.inf, -1e30))
def test_no_logprob_breaks_the_json(value: float) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    call, ids = call_of(CHAT, logprobs=True, top_logprobs=1), ids_of("one")
    for event in events_of(call, [[one] for one in ids], eos(), value):
        if "[DONE]" not in event:
            json.loads(event.removeprefix("data: "), parse_constant=refuse)
    (choice,) = answer_of(call, [ids], eos(), value)["choices"]
    for one in choice["logprobs"]["content"]:
        assert one["logprob"] is None or math.isfinite(one["logprob"])
