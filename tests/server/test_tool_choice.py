"""Tool choice and tool schemas are kept to: over random tokens of the grammars, and by a model that knows no tools."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from apps import asked, assert_free
from dialogue import ASKED, body_of, conversations, events_of, of_chat, of_messages, of_responses, told_of
from serving import demo_model

from rorqual.engine.grammar import Grammars
from rorqual.engine.params import Constraint
from rorqual.errors import InputError
from rorqual.server.errors import as_http
from rorqual.server.protocol import CHAT, MESSAGES, RESPONSES, Api
from rorqual.training.data.tokens import DSML, EOS, token_id

PATHS = {CHAT.name: "/v1/chat/completions", MESSAGES.name: "/v1/messages", RESPONSES.name: "/v1/responses"}
READ = {CHAT.name: of_chat, MESSAGES.name: of_messages, RESPONSES.name: of_responses}
WALKS, FULL_WALKS = 24, 500
LONGEST = 600
DEPTHS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["m", "fathoms"]},
        "deep": {"type": "boolean"},
        "seas": {"type": "array", "items": {"$ref": "#/$defs/sea"}, "maxItems": 2},
        "note": {"type": ["string", "null"], "maxLength": 9},
    },
    "required": ["unit", "deep"],
    "additionalProperties": False,
    "$defs": {"sea": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}},
}
SHIP: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "code": {"type": "string", "pattern": "^[A-Z]{2}$"}},
    "required": ["code"],
}
LEAD: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["m", "fathoms"]}, "deep": {"type": "boolean"}, "bed": {"const": "sand"}},
    "required": ["deep", "unit"],
}
"""Ends soon, whatever the model thinks of it."""
SCHEMAS = {"depth": DEPTHS, "ship": SHIP, "lead": LEAD, "nothing": {"type": "object", "properties": {}}}


def tools_of(api: Api, *names: str, **more: Any) -> list[dict[str, Any]]:
    """These tools, or all, as an API has them."""
    found = []
    for name in names or SCHEMAS:
        function = {"name": name, "description": "Tells of the sea", **more}
        if api is MESSAGES:
            found.append({**function, "input_schema": SCHEMAS[name]})
        elif api is RESPONSES:
            found.append({"type": "function", **function, "parameters": SCHEMAS[name]})
        else:
            found.append({"type": "function", "function": {**function, "parameters": SCHEMAS[name]}})
    return found


def choice_of(api: Api, name: str | None) -> Any:
    """One tool by its name, or any."""
    if api is MESSAGES:
        return {"type": "any"} if name is None else {"type": "tool", "name": name}
    if name is None:
        return "required"
    return {"type": "function", "name": name} if api is RESPONSES else {"type": "function", "function": {"name": name}}


def constraint_of(api: Api, **fields: Any) -> Constraint | None:
    return conversations().call(api, body_of(api, **fields), "answer").params.constraint


def assert_calls(calls: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    """Of these tools, with arguments of their schemas."""
    for name, arguments in calls:
        assert name in names
        jsonschema_rs.validate(SCHEMAS[name], json.loads(arguments))


@cache
def grammars() -> Grammars:
    model = demo_model()
    return Grammars(model.tokenizer, model.config.vocab_size, model.config.eos_token_id)


def spelled(*ids: str) -> set[int]:
    tokenizer = demo_model().tokenizer
    assert tokenizer is not None
    return {token_id(tokenizer, one) for one in ids}


def walked(constraint: Constraint, rng: random.Random) -> list[int]:
    """Random tokens that the constraint allows; such as end something come more often, or nothing ever would end."""
    matcher, found = grammars().matcher(constraint), list[int]()
    (eos,), ends = spelled(EOS), spelled(DSML, "<", "/", '"', "}", "]")
    while len(found) < LONGEST:
        allowed = matcher.allowed().nonzero().flatten().tolist()
        likely = [token for token in allowed if token in ends]
        token = eos if allowed == [eos] else rng.choice(likely if likely and rng.random() < 0.4 else allowed)
        if token == eos:
            break
        matcher.take(token)
        found.append(token)
    return found


@pytest.mark.parametrize("walks", [WALKS, pytest.param(FULL_WALKS, marks=pytest.mark.full)])
def test_whatever_the_grammar_allows_is_a_call_to_the_parser(walks: int) -> None:
    rng, ended = random.Random(5), 0
    (eos,) = spelled(EOS)
    for at in range(walks):
        api = (CHAT, MESSAGES, RESPONSES)[at % 3]
        names = list(SCHEMAS) if at % 2 else [rng.choice(list(SCHEMAS))]
        choice = choice_of(api, None if at % 2 else names[0])
        call = conversations().call(api, body_of(api, tools=tools_of(api), tool_choice=choice), "answer")
        assert call.params.constraint is not None
        ids = walked(call.params.constraint, rng)
        whole = len(ids) < LONGEST
        told = told_of(api, events_of(call, [[one] for one in ids], eos if whole else None))
        assert told.content == ""
        assert_calls(told.calls, names)
        assert told.calls or not whole
        ended += whole
    assert ended > walks // 2


@pytest.mark.parametrize("api", (CHAT, MESSAGES, RESPONSES), ids=lambda api: api.name)
@pytest.mark.parametrize("stream", (False, True))
def test_a_model_that_knows_no_tools_calls_one_where_it_must(api: Api, stream: bool) -> None:
    """The demo model has never seen a call: its random ones are of the schema all the same."""

    name = None if stream else "lead"
    body = body_of(api, tools=tools_of(api, "lead", "nothing"), tool_choice=choice_of(api, name), stream=stream)
    body |= {"seed": 1, "temperature": 1}
    if api is MESSAGES:
        body["tool_choice"]["disable_parallel_tool_use"] = True
    else:
        body["parallel_tool_calls"] = False

    async def ask() -> None:
        async with asked() as (client, server):
            answer = await client.post(PATHS[api.name], json=body)
            assert answer.status_code == 200, answer.text
            calls = calls_of(api, answer.text, stream)
            assert len(calls) == 1, answer.text
            assert_calls(calls, ["lead", "nothing"] if name is None else [name])
            assert_free(server)

    asyncio.run(ask())


def calls_of(api: Api, text: str, stream: bool) -> list[list[str]]:
    """(name, arguments) of an answer, which is nothing but calls and ended because of them."""
    if stream:
        data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        told = READ[api.name]([json.loads(one) for one in data if one != "[DONE]"])
        assert (told.content, told.finish) == ("", {"msg": "tool_use", "resp": "completed"}.get(api.name, "tool_calls"))
        return told.calls
    found = json.loads(text)
    if api is CHAT:
        (choice,) = found["choices"]
        assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "tool_calls")
        return [[one["function"]["name"], one["function"]["arguments"]] for one in choice["message"]["tool_calls"]]
    if api is MESSAGES:
        assert found["stop_reason"] == "tool_use"
        return [[one["name"], json.dumps(one["input"])] for one in found["content"]]
    return [[one["name"], one["arguments"]] for one in found["output"]]


@pytest.mark.parametrize("choice", ({"type": "any"}, {"type": "auto"}))
def test_a_thought_comes_before_a_call_that_must_be(choice: dict[str, str]) -> None:
    body = {"tools": tools_of(MESSAGES), "tool_choice": choice, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    found = constraint_of(MESSAGES, **body, max_tokens=2000)
    if choice["type"] == "auto":
        assert found is None
    else:
        assert found is not None and found.after == "</think>"


def allows(constraint: Constraint, text: str) -> bool:
    """All of it, and nothing behind it is needed."""
    tokenizer = demo_model().tokenizer
    assert tokenizer is not None
    matcher = grammars().matcher(constraint)
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        if not bool(matcher.allowed()[token]):
            return False
        matcher.take(token)
    return bool(matcher.allowed()[next(iter(spelled(EOS)))])


def marked(name: str, *parameters: tuple[str, str, str]) -> str:
    each = "".join(
        f'<{DSML} parameter name="{key}" string="{text}">{value}</{DSML} parameter>\n'
        for key, text, value in parameters
    )
    return f'\n\n<{DSML} calls>\n<{DSML} invoke name="{name}">\n{each}</{DSML} invoke>\n</{DSML} calls>'


RIGHT = marked("ship", ("name", "true", 'A "b" </ <c> 2>&1\n漢😀'), ("code", "false", '"UK"'))
WRONG = (
    marked("boat"),
    marked("ship"),
    marked("ship", ("name", "true", "a")),
    marked("ship", ("code", "false", '"Uk"')),
    marked("ship", ("code", "false", '"UK"'), ("more", "true", "a")),
    RIGHT.removesuffix(f"</{DSML} calls>"),
)


def test_a_strict_tool_is_called_rightly_or_not_at_all() -> None:
    strict = {**SHIP, "required": ["name", "code"], "additionalProperties": False}
    function = {"name": "ship", "parameters": strict, "strict": True}
    for api, tools in (
        (CHAT, [{"type": "function", "function": function}]),
        (RESPONSES, [{"type": "function", **function}]),
        (MESSAGES, [{"name": "ship", "input_schema": strict, "strict": True}]),
    ):
        found = constraint_of(api, tools=tools)
        assert found is not None
        for text in ("", "Ahoy < there!", RIGHT, "Ahoy." + RIGHT):
            assert allows(found, text), text
        for text in WRONG:
            assert not allows(found, "Ahoy." + text), text
        assert constraint_of(api, tools=tools_of(api)) is None, "a tool that is not strict is the model's own affair"


def test_a_response_format_beside_tools_is_kept_to() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    found = constraint_of(CHAT, tools=tools_of(CHAT), response_format=form)
    assert found is not None
    assert allows(found, '{"a":1}') and allows(found, RIGHT)
    assert not any(allows(found, text) for text in ("Ahoy.", '{"a":"b"}', "", "Ahoy." + RIGHT, *WRONG))
    asked_for = [{"role": "user", "content": "As json, please."}]
    found = constraint_of(CHAT, tools=tools_of(CHAT), response_format={"type": "json_object"}, messages=asked_for)
    assert found is not None
    assert allows(found, '{"b":[]}') and allows(found, RIGHT) and not allows(found, "Ahoy.")


@pytest.mark.parametrize(
    ("api", "fields", "says"),
    (
        (CHAT, {"tools": [], "tool_choice": "required"}, "tool_choice: a call is required and no tool is given"),
        (RESPONSES, {"tools": [], "tool_choice": "required"}, "tool_choice"),
        (MESSAGES, {"tools": [], "tool_choice": {"type": "any"}}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "boat"}}}, "boat"),
        (CHAT, {"tool_choice": "required", "thinking": {"type": "enabled"}}, "tool_choice"),
        (CHAT, {"parallel_tool_calls": "no"}, "parallel_tool_calls: 'no' is not legal; legal: true or false"),
        (CHAT, {"response_format": {"type": "regex", "regex": "a|b"}}, "response_format"),
        (CHAT, {"priority": -1}, "priority: -1 is not legal"),
        (CHAT, {"priority": 1.5}, "priority"),
    ),
)
def test_what_cannot_be_kept_to_is_refused_by_name(api: Api, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception) as raised:
        conversations().call(api, body_of(api, **fields), "answer")
    error = as_http(raised.value)
    assert error.status == 400
    assert says in error.message


@pytest.mark.parametrize(
    ("parameters", "says"),
    (
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf at the top of 'sh'"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"], "additionalProperties": False}, "'a'"),
        ({"type": "object", "properties": {'a"': {}}, "required": ['a"']}, "cannot be written"),
    ),
)
def test_a_schema_that_cannot_be_kept_to_is_refused_where_a_call_is_required(
    parameters: dict[str, Any], says: str
) -> None:
    tool = {"type": "function", "function": {"name": "sh", "parameters": parameters}}
    with pytest.raises(InputError, match=says):
        constraint_of(CHAT, tools=[tool], tool_choice="required")
    assert constraint_of(CHAT, tools=[tool]) is None


def test_grouped_tools_are_called_by_their_own_names() -> None:
    """Responses gathers tools in namespaces; the model sees one name of both parts, the client two."""
    depth = {"type": "function", "name": "depth", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "namespace", "name": "sea", "description": "Of the sea", "tools": [depth]}]
    call = conversations().call(RESPONSES, {"model": "rorqual", "input": "How deep?", "tools": tools}, "answer")
    tokenizer = demo_model().tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(marked("sea::depth"), add_special_tokens=False).ids
    text = "".join(events_of(call, [ids], next(iter(spelled(EOS)))))
    done = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    (item,) = (event["item"] for event in done if event["type"] == "response.output_item.done")
    assert (item["namespace"], item["name"], item["arguments"]) == ("sea", "depth", "{}")


def test_of_two_that_wait_the_lower_priority_comes_first() -> None:
    async def ask() -> None:
        async with asked({"slots": 1}) as (client, server):
            stats, order = server.worker.engine.stats, list[str]()

            async def send(path: str, body: dict[str, Any], name: str) -> None:
                assert (await client.post(path, json=body)).status_code == 200
                order.append(name)

            async def waits(count: int) -> None:
                while stats().waiting < count:
                    await asyncio.sleep(0.01)

            long = {"prompt": "A whale", "max_tokens": 3000, "ignore_eos": True}
            running = asyncio.ensure_future(client.post("/v1/completions", json=long))
            while not stats().running:
                await asyncio.sleep(0.01)
            turn, text = {"messages": ASKED, "max_tokens": 2}, {"prompt": "A ship", "max_tokens": 2}
            sent = []
            for count, (path, body, name) in enumerate(
                (
                    ("/v1/chat/completions", turn | {"priority": 7}, "patient chat"),
                    ("/v1/completions", text | {"priority": 5}, "patient text"),
                    ("/v1/messages", turn, "messages"),
                    ("/v1/completions", text, "text"),
                ),
                start=1,
            ):
                sent.append(asyncio.ensure_future(send(path, body, name)))
                await waits(count)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await asyncio.gather(*sent)
            assert order == ["messages", "text", "patient text", "patient chat"]
            assert_free(server)

    asyncio.run(ask())
