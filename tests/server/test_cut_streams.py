"""Whatever the engine says, cut anywhere: clients get the same text, arguments that are JSON, and no markup."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
from dialogue import ASKED, COMMAND, MARKED, Told, answer_of, body_of, conversations, events_of, told_of
from serving import demo_model, pieces, spelled_ids

from rorqual.server.protocol import CHAT, MESSAGES, RESPONSES, Api, Call
from rorqual.training.data.tokens import ASSISTANT, BOS, EOS, USER, token_id

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


@dataclass(frozen=True)
class Ends:
    """What an API says of why an answer ended."""

    stop: str
    calls: str
    length: str


ENDS = {
    CHAT.name: Ends("stop", "tool_calls", "length"),
    MESSAGES.name: Ends("end_turn", "tool_use", "max_tokens"),
    RESPONSES.name: Ends("completed", "completed", "incomplete"),
}


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


def tokens_of(api: Api, call: Call, ids: list[int]) -> int:
    """What is counted of an answer that its budget cuts: all tokens, told or not."""
    usage = answer_of(call, [[one] for one in ids], None)["usage"]
    return int(usage["completion_tokens" if api is CHAT else "output_tokens"])


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
@pytest.mark.parametrize("api", (CHAT, MESSAGES, RESPONSES), ids=lambda api: api.name)
def test_malformed_markup_is_no_content_and_no_broken_call(api: Api, said: str) -> None:
    ids = ids_of(said)
    told = streamed(api, [[one] for one in ids])
    assert told == streamed(api, [ids])
    assert not any(one in told.content for one in MARKUP), told.content
    for name, arguments in told.calls:
        assert name == "sh"
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("said", [*OPEN.values(), BAD["an unknown tool"]], ids=[*OPEN, "an unknown tool"])
@pytest.mark.parametrize("api", (CHAT, MESSAGES, RESPONSES), ids=lambda api: api.name)
def test_a_call_that_no_client_can_answer_is_not_told(api: Api, said: str) -> None:
    """What was said before it is, and so are whole calls."""
    call = MARKED.replace("</｜DSML｜ calls>", said.partition("calls>\n")[2] or said)
    for text, calls in ((f"So.\n\n{said}", 0), (f"So.\n\n{call}", 1)):
        ids = ids_of(text)
        told = streamed(api, [[one] for one in ids])
        assert (told.content.strip(), len(told.calls)) == ("So.", calls)
        assert told.finish == (ENDS[api.name].calls if calls else ENDS[api.name].stop)


@pytest.mark.parametrize("api", (CHAT, MESSAGES, RESPONSES), ids=lambda api: api.name)
def test_an_answer_that_its_budget_cuts_says_so(api: Api) -> None:
    """At every token: neither markup nor half of a call."""
    ids = ids_of(SAID)[:-1]
    wanted = streamed(api, [ids]).calls
    for count in range(1, len(ids)):
        told = streamed(api, [[one] for one in ids[:count]], ends=False)
        assert told.finish == ENDS[api.name].length, count
        assert not any(one in told.content for one in MARKUP), (count, told.content)
        assert told.calls in ([], wanted), count
        if count % 20 == 0:
            assert tokens_of(api, call_of(api), ids[:count]) == count


def test_of_several_calls_one_is_told_where_one_is_asked_for() -> None:
    invoke = MARKED[MARKED.index("<｜DSML｜ invoke") : MARKED.index("\n</｜DSML｜ calls>")]
    ids = ids_of("So.\n\n" + MARKED.replace(invoke, f"{invoke}\n{invoke}"))
    for api, fields in (
        (CHAT, {"parallel_tool_calls": False}),
        (RESPONSES, {"parallel_tool_calls": False}),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ):
        for said, more in ((1, fields), (2, {})):
            for parts in ([[one] for one in ids], [ids]):
                told = told_of(api, events_of(call_of(api, **more), parts, eos()))
                assert [name for name, _ in told.calls] == ["sh"] * said
                assert (told.content.strip(), told.finish) == ("So.", ENDS[api.name].calls)


@pytest.mark.parametrize("api", (CHAT, MESSAGES, RESPONSES), ids=lambda api: api.name)
@pytest.mark.parametrize("thinks", (False, True))
def test_special_tokens_are_no_text(api: Api, thinks: bool) -> None:
    """A model whose eos does not end it says one, or whatever comes behind it."""
    before, behind = ("Hm", "</think>") if thinks else ("", "")
    ids = ids_of(f"{before}{EOS}{behind}a{EOS}b<think></think>{BOS}{USER}{ASSISTANT}<｜ref｜>c<｜/ref｜>")
    for parts in ([[one] for one in ids], [ids]):
        told = streamed(api, parts, thinks, ends=False)
        assert (told.content, told.reasoning) == ("ab<｜ref｜>c<｜/ref｜>", before)
    assert tokens_of(api, call_of(api, thinks), ids) == len(ids)


def test_a_call_without_tools_is_text_without_special_tokens() -> None:
    call = conversations().call(CHAT, {"model": "rorqual", "messages": ASKED}, "answer")
    told = told_of(CHAT, events_of(call, [[one] for one in ids_of(SAID)], eos()))
    assert not told.calls
    assert "DSML" not in told.content
    assert told.finish == "stop"


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
