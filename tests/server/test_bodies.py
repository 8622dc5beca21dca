"""What a body becomes: histories with tool calls, efforts, spellings of special tokens, images."""

from __future__ import annotations

from typing import Any

import deepseek_recipe as recipe
import pytest
from dialogue import ASKED, CHAT_TOOL, body_of, conversations
from serving import demo_model

from rorqual.errors import InputError
from rorqual.server.errors import as_http
from rorqual.server.images import with_images
from rorqual.server.protocol import CHAT, MESSAGES, RESPONSES, Api
from rorqual.server.settings import ServerSettings
from rorqual.training.data.tokens import ASSISTANT, BOS, EOS, IMAGE, SPECIAL_TOKENS, SYSTEM, THINK, USER, token_id

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAf"
    "FcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def ids_of(api: Api, body: dict[str, Any]) -> list[int]:
    return conversations().call(api, body, "answer").ids


def text_of(api: Api, body: dict[str, Any]) -> str:
    tokenizer = demo_model().tokenizer
    assert tokenizer is not None
    return str(tokenizer.decode(ids_of(api, body), skip_special_tokens=False))


def history(**arguments: Any) -> dict[str, Any]:
    """A conversation in which the assistant has called a tool."""
    call = {"id": "a", "type": "function", "function": {"name": "sh", **arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "none"}
    return {"model": "rorqual", "messages": [*ASKED, said, result], "tools": [CHAT_TOOL]}


@pytest.mark.parametrize("arguments", ({}, {"arguments": None}, {"arguments": ""}, {"arguments": "{}"}))
def test_a_call_without_arguments_is_history(arguments: dict[str, Any]) -> None:
    assert ids_of(CHAT, history(**arguments)) == ids_of(CHAT, history(arguments="{}"))


def test_arguments_as_an_object_are_those_as_a_text() -> None:
    assert ids_of(CHAT, history(arguments={"cmd": "ls"})) == ids_of(CHAT, history(arguments='{"cmd": "ls"}'))


@pytest.mark.parametrize("arguments", ("{", "[1]", "ls", '{"cmd": }'))
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    with pytest.raises((recipe.ConversionError, InputError, ValueError)) as raised:
        ids_of(CHAT, history(arguments=arguments))
    assert as_http(raised.value).status == 400


def test_tool_choice_none_shows_no_tools() -> None:
    shown = text_of(CHAT, body_of(CHAT))
    assert "Run a command" in shown
    assert "Run a command" not in text_of(CHAT, body_of(CHAT, tool_choice="none"))


EFFORTS = {"low": 50, "high": 75, "max": 100, **{n: n for n in range(1, 101)}}


@pytest.mark.parametrize("api", (CHAT, RESPONSES), ids=lambda api: api.name)
def test_an_effort_is_a_number_in_the_prompt(api: Api) -> None:
    def body(effort: object) -> dict[str, Any]:
        if api is RESPONSES:
            return {"model": "rorqual", "input": "Hello", "reasoning": {"effort": effort}}
        return {
            "model": "rorqual",
            "messages": ASKED,
            "thinking": {"type": "enabled"},
            "reasoning_effort": effort,
        }

    for effort, number in EFFORTS.items():
        assert f"Reasoning Effort: {number} " in text_of(api, body(effort)), effort
    for effort in (0, 101, -1, True):
        with pytest.raises(InputError, match=r"1\.\.100"):
            ids_of(api, body(effort))


def test_a_request_that_thinks_without_saying_how_much_thinks_as_the_release() -> None:
    asked = {"model": "rorqual", "messages": ASKED, "thinking": {"type": "enabled"}}
    assert ids_of(CHAT, asked) == ids_of(CHAT, {**asked, "reasoning_effort": "high"})


def test_a_prompt_holds_the_models_own_special_tokens() -> None:
    tokenizer = demo_model().tokenizer
    assert tokenizer is not None
    ids = ids_of(CHAT, {"model": "rorqual", "messages": [{"role": "system", "content": "Be brief."}, *ASKED]})
    for spelling in (BOS, SYSTEM, USER, ASSISTANT):
        assert ids.count(token_id(tokenizer, spelling)) == 1, spelling
    # What the library writes is what the tokenizer calls it, and both read it alike.
    for kind in ("Bos", "Eos", "System", "User", "Assistant", "ThinkingStart", "ThinkingEnd", "Dsml", "Image"):
        assert getattr(recipe.SpecialToken, kind).default_str() in SPECIAL_TOKENS, kind
    assert ids == tokenizer.encode(text_of(CHAT, {"model": "rorqual", "messages": [
        {"role": "system", "content": "Be brief."}, *ASKED]}), add_special_tokens=False).ids  # fmt: skip


@pytest.mark.parametrize("api", (CHAT, MESSAGES, RESPONSES), ids=lambda api: api.name)
@pytest.mark.parametrize("effort", (None, 33))
def test_spellings_in_a_users_text_are_plain_text(api: Api, effort: int | None) -> None:
    tokenizer = demo_model().tokenizer
    assert tokenizer is not None
    spellings = [*SPECIAL_TOKENS, EOS, THINK, IMAGE]
    text = "a " + " ".join(spellings) + " b"
    counts = []
    for content in ("a b", text):
        body: dict[str, Any] = {"model": "rorqual", "messages": [{"role": "user", "content": content}]}
        if api is RESPONSES:
            body = {"model": "rorqual", "input": content}
        elif api is MESSAGES:
            body["max_tokens"] = 5
        if effort is not None and api is CHAT:
            body |= {"thinking": {"type": "enabled"}, "reasoning_effort": effort}
        ids = ids_of(api, body)
        counts.append([ids.count(token_id(tokenizer, spelling)) for spelling in spellings])
    assert counts[0] == counts[1]
    assert text in str(tokenizer.decode(ids, skip_special_tokens=False))


def test_an_image_for_a_text_model_is_refused_by_name() -> None:
    content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    call = conversations().call(CHAT, {"model": "rorqual", "messages": [{"role": "user", "content": content}]}, "a")
    assert len(call.sources) == 1
    with pytest.raises(InputError, match="image: this model has no vision tower"):
        with_images(demo_model(), call.ids, call.sources, ServerSettings())


@pytest.mark.parametrize("thought", (None, "Hm."))
def test_what_goes_on_with_an_answer_has_thought_already(thought: str | None) -> None:
    """Nothing waits for the end of a thought that never comes: a format holds from the first token on."""
    begun = {"role": "assistant", "content": '{"a":', "prefix": True}
    begun |= {} if thought is None else {"reasoning_content": thought}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "model": "rorqual",
        "messages": [*ASKED, begun],
        "thinking": {"type": "enabled"},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    call = conversations().call(CHAT, body, "answer")
    assert call.params.constraint is not None
    assert (call.params.constraint.after, call.making.end_think) == (None, None)
    call = conversations().call(CHAT, body | {"messages": ASKED}, "answer")
    assert call.params.constraint is not None
    assert call.params.constraint.after == "</think>"
