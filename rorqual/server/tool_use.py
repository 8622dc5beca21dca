"""What a body says of tool calls, and what its answer has to match because of that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from rorqual.engine.params import Constraint
from rorqual.errors import InputError
from rorqual.server import fields
from rorqual.server.tool_grammar import calls_grammar
from rorqual.training.data.tokens import DSML, token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """required: an answer is a call. several: it may be more than one. strict: arguments keep to their schema."""

    required: bool
    several: bool
    strict: bool


def tool_use(body: Mapping[str, Any]) -> ToolUse:
    """Of a body of any conversation API.

    Raises:
        InputError: a flag that is none.
    """
    several, choice = fields.flag(body, "parallel_tool_calls", True), body.get("tool_choice")
    if isinstance(choice, dict):  # Messages says there what the others say beside it
        several = several and not fields.flag(choice, "disable_parallel_tool_use")
        required = choice.get("type") in ("any", "tool", "function")
    else:
        required = choice == "required"
    return ToolUse(required=required, several=several, strict=any(map(_strict, _tools(body))))


def _tools(body: Mapping[str, Any]) -> list[Any]:
    found = body.get("tools")
    return found if isinstance(found, list) else []


def _strict(tool: Any) -> bool:
    if not isinstance(tool, dict):
        return False
    function = tool.get("function")
    return tool.get("strict") is True or (isinstance(function, dict) and function.get("strict") is True)


def answer_constraint(converted: Any, use: ToolUse, tokenizer: Tokenizer, after: str | None) -> Constraint | None:
    """What an answer has to match.

    Args:
        converted: request of `deepseek-recipe`.
        use: what the body says of calls.
        tokenizer: of the model.
        after: the token that ends the thinking; None where there is none.

    Raises:
        InputError: a call is required of no tool, or a schema cannot be kept to.
    """
    found = converted.inference_options.output_constraint
    if use.required and not converted.conversation.tools:
        raise InputError("tool_choice: a call is required and no tool is given; give tools, or leave it out")
    if found is None:
        return None
    match found.kind:
        case "regex":
            return Constraint(kind="regex", value=found.schema, after=after)
        case "json" if found.schema:
            return Constraint(kind="json_schema", value=found.schema, after=after)
        case "json":
            return Constraint(kind="json_object", after=after)
    opened = found.kind == "tool_call_required"
    answer = None if opened or use.required else _answer(converted.conversation)
    if answer == "text" and not use.strict:
        return None
    tools, marker = json.loads(found.schema), token_id(tokenizer, DSML)
    grammar = calls_grammar(tools, marker, several=use.several, opened=opened, answer=answer)
    return Constraint(kind="grammar", value=grammar, after=after)


def _answer(conversation: Any) -> str | Mapping[str, Any]:
    """What may come instead of a call."""
    match conversation.response_format:
        case "text":
            return "text"
        case "json_object":
            return {"type": "object"}
        case "json_schema" if isinstance(conversation.response_schema, dict):
            return dict(conversation.response_schema)
    raise InputError("response_format: this one is not supported together with tools; leave one of them out")
