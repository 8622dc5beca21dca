"""Tool calls as a grammar: a model that writes by it calls a tool that there is, with arguments of its schema.

    <|DSML| invoke name="sh">
    <|DSML| parameter name="cmd" string="true">ls</|DSML| parameter>
    </|DSML| invoke>

|DSML| is one special token, which no text can hold: what comes before it, however it ends, is told apart by it alone.
Each literal takes in the `<` or `</` before the next such token, as a lexer that has to choose would take the longer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rorqual.errors import InputError

Schema = Mapping[str, Any]

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""JSON without free white space, as in every other answer that has to be JSON."""
BEYOND = (
    *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
"""At the top of a tool's parameters these ask for more than its parameters one by one."""
NARROWED = frozenset(
    ["enum", "const", "pattern", "format", "minLength", "maxLength", "anyOf", "oneOf", "allOf", "not", "if", "$ref"]
)
"""A text with one of these is not any text."""


def calls_grammar(
    tools: Iterable[Schema], marker: int, *, several: bool, opened: bool = False, answer: str | Schema | None = None
) -> str:
    """A Lark grammar of a block of calls.

    Args:
        tools: function tools as in Chat Completions; parameters come in the order of their schema.
        marker: id of the special token.
        several: more than one call is legal.
        opened: the prompt ends with the block's opening tag.
        answer: what may come instead of a call: "text", before a call too, or JSON of a schema.

    Raises:
        InputError: a schema that cannot be kept to, by tool and keyword.
    """
    mark = f"<[{marker}]>"
    rules = [rule for at, tool in enumerate(tools) for rule in _call(f"t{at}", tool["function"], mark)]
    each = " | ".join(rule.partition(":")[0] for rule in rules if re.match(r"t\d+:", rule))
    more = ' ("\\n<" call)*' if several else ""
    rules += [f"call: {each}", f'calls: "<" call{more} "\\n</" {mark} " calls>"', "ANY: /(?s:.*)<\\//"]
    block = f'{mark} " calls>\\n" calls'
    if opened:
        start = "calls"
    elif answer == "text":
        start = f"TEXT | LEAD {block}"
        rules += ["TEXT: /(?s:.*)/", "LEAD: /(?s:.*)</"]
    else:
        start = f'"\\n\\n<" {block}' + (" | answer" if answer is not None else "")
    if isinstance(answer, Mapping):
        rules.append(f"answer: {_json(answer, {})}")
    return "\n".join([f"start: {start}", *rules])


def _call(rule: str, function: Schema, mark: str) -> list[str]:
    """Rules of one tool, behind the `<` of its first tag."""
    name, parameters = function["name"], function.get("parameters") or {}
    for keyword in BEYOND:
        if keyword in parameters:
            raise InputError(
                f"tools: {keyword} at the top of {name!r}'s parameters cannot be kept to; legal there: properties, "
                "required, additionalProperties, $defs"
            )
    needed = list(parameters.get("required") or ())
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    parts, rules = [], []
    for at, (key, schema) in enumerate(_properties(name, parameters, needed).items()):
        own = f"{rule}p{at}"
        is_text, values, more = _value(own, schema, definitions)
        tag = json.dumps(f' parameter name="{key}" string="{"true" if is_text else "false"}">', ensure_ascii=False)
        rules += [f'{own}: "<" {mark} {tag} {values} {mark} " parameter>\\n"', *more]
        parts.append(own if key in needed else f"{own}?")
    opening = json.dumps(f' invoke name="{name}">\n')
    return [f'{rule}: {mark} {opening} {" ".join(parts)} "</" {mark} " invoke>"', *rules]


def _properties(tool: str, parameters: Schema, needed: Iterable[str]) -> dict[str, Any]:
    """Parameter -> schema: all that are declared, and those that are only required."""
    others = parameters.get("additionalProperties", True)
    found = {key: schema for key, schema in (parameters.get("properties") or {}).items() if schema is not False}
    found |= {key: others for key in needed if key not in found}
    for key, schema in list(found.items()):
        if re.fullmatch(r'[^"<>\n]+', key) and schema is not False:
            continue
        if key in needed:
            raise InputError(f"tools: parameter {key!r} of {tool!r} is required and cannot be written")
        del found[key]
    return found


def _value(rule: str, schema: Any, definitions: Schema) -> tuple[bool, str, list[str]]:
    """(whether it is written as it is and not as JSON, what stands for it with the `</` behind it, further rules)."""
    schema = {} if schema is True else schema
    if schema.get("type") == "string":
        narrowed = NARROWED & schema.keys()
        if not narrowed:
            return True, "ANY", []
        choices = schema.get("enum", [schema.get("const")])
        if len(narrowed) == 1 and narrowed <= {"enum", "const"} and all(isinstance(one, str) for one in choices):
            return True, f"{rule}v", [f"{rule}v: {' | '.join(_literal(one + '</') for one in choices)}"]
    return False, f'{rule}v "</"', [f"{rule}v: {_json(schema, definitions)}"]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Schema, definitions: Schema) -> str:
    return f"%json {json.dumps({**definitions, **schema, **COMPACT})}"
