"""Tool calls that an assistant made earlier, as clients send them back: all spellings of their arguments as one."""

from __future__ import annotations

import json
from typing import Any

from rorqual.errors import InputError


def with_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """A body whose earlier tool calls have their arguments as the text of a JSON object.

    Clients send none, null, an empty text or the object itself; the conversion takes a text alone and looks into it no
    further, so what is no object would be shown to the model as it is.

    >>> with_arguments({"messages": [{"tool_calls": [{"function": {"name": "f", "arguments": None}}]}]})
    {'messages': [{'tool_calls': [{'function': {'name': 'f', 'arguments': '{}'}}]}]}

    Raises:
        InputError: arguments that are no JSON object, with their place.
    """
    found = dict(body)
    if isinstance(body.get("messages"), list):
        found["messages"] = [_message(one, f"messages.{at}") for at, one in enumerate(body["messages"])]
    if isinstance(body.get("input"), list):
        found["input"] = [_item(one, f"input.{at}") for at, one in enumerate(body["input"])]
    return found


def _message(message: Any, where: str) -> Any:
    """Chat's calls stand beside the content, Messages' within it."""
    if not isinstance(message, dict):
        return message
    found = dict(message)
    if isinstance(message.get("tool_calls"), list):
        found["tool_calls"] = [_call(one, f"{where}.tool_calls.{at}") for at, one in enumerate(message["tool_calls"])]
    if isinstance(message.get("content"), list):
        found["content"] = [_block(one) for one in message["content"]]
    return found


def _call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    text = _text(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": text}}


def _block(block: Any) -> Any:
    if isinstance(block, dict) and block.get("type") == "tool_use" and block.get("input") is None:
        return {**block, "input": {}}
    return block


def _item(item: Any, where: str) -> Any:
    if isinstance(item, dict) and item.get("type") == "function_call":
        return {**item, "arguments": _text(item.get("arguments"), f"{where}.arguments")}
    return item


def _text(arguments: Any, where: str) -> str:
    if arguments is None or arguments == "":
        return "{}"
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    try:
        is_object = isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise InputError(f"{where}: {str(arguments)[:40]!r} is not legal; legal: a JSON object, or none")
    return str(arguments)
