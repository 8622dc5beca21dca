"""Which fields of a body mean something here: what asks for more than we do is refused, what is unknown is told.

The conversation bodies themselves are read by `deepseek-recipe`, which passes over what it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rorqual.errors import InputError
from rorqual.log import logger

IGNORED_HEADER = "X-Rorqual-Ignored-Fields"
SHOWN = 16
"""Unknown fields named in the header and the log, at most."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Of one route. known: have a meaning, or none that would change an answer. refused: field -> whether a value of
    it asks for what is not done here."""

    known: frozenset[str]
    refused: Mapping[str, Callable[[Any], bool]]


def check(fields: Fields, body: Mapping[str, Any]) -> dict[str, str]:
    """Headers that name the unknown fields, if there are any.

    Raises:
        InputError: a field that we know, and do not support.
    """
    for name, asks in fields.refused.items():
        if name in body and asks(body[name]):
            raise InputError(f"{name}: not supported here; leave it out")
    unknown = [name for name in body if name not in fields.known and name not in fields.refused]
    names = [name for name in unknown if re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII)][:SHOWN]
    if not unknown:
        return {}
    told = ", ".join(names) or "of unreadable names"
    logger.warning("server: %d unknown fields were ignored: %s", len(unknown), told)
    return {IGNORED_HEADER: told}


def _given(value: Any) -> bool:
    """It is there and says something: neither null, nor false, nor empty."""
    return value is not None and value is not False and value not in ([], {}, "")


def _more_than_text(value: Any) -> bool:
    return value is not None and value != ["text"]


def _not_one(value: Any) -> bool:
    return value is not None and (value != 1 or isinstance(value, bool))


def _cut(value: Any) -> bool:
    return value is not None and value != "disabled"


def _told_not(value: Any) -> bool:
    return value is False


OF_SAMPLING = frozenset(
    [
        "n",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "temperature",
        "top_p",
        "seed",
    ]
)
OF_EVERY = OF_SAMPLING | frozenset(
    ["model", "stream", "stream_options", "cache_salt", "speculative", "user", "metadata", "priority"]
)
GUIDED = dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), _given)

CHAT = Fields(
    OF_EVERY
    | frozenset(
        [
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "stop",
            "logprobs",
            "top_logprobs",
            "response_format",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "thinking",
            "reasoning_effort",
            "chat_template_kwargs",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
        ]
    ),
    {
        **dict.fromkeys(("functions", "function_call", "audio", "prediction", "web_search_options", "store"), _given),
        **dict.fromkeys(("echo", "suffix", "prompt_logprobs", "continue_final_message", "chat_template"), _given),
        **GUIDED,
        "modalities": _more_than_text,
        "best_of": _not_one,
        "use_beam_search": _given,
        "add_generation_prompt": _told_not,
    },
)
RESPONSES = Fields(
    OF_EVERY
    | frozenset(
        [
            "input",
            "instructions",
            "max_output_tokens",
            "reasoning",
            "text",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "top_logprobs",
            "include",
            "store",
            "thinking",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
        ]
    ),
    {
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "background", "store"), _given),
        **GUIDED,
        "max_tool_calls": _given,
        "truncation": _cut,
    },
)
MESSAGES = Fields(
    OF_EVERY
    | frozenset(
        [
            "messages",
            "system",
            "max_tokens",
            "stop_sequences",
            "tools",
            "tool_choice",
            "thinking",
            "output_config",
            "output_format",
            "service_tier",
        ]
    ),
    dict.fromkeys(("container", "mcp_servers", "context_management"), _given),
)
COMPLETIONS = Fields(
    OF_EVERY
    | frozenset(
        [
            "prompt",
            "max_tokens",
            "echo",
            "logprobs",
            "stop",
            "return_tokens_as_token_ids",
            "best_of",
            "add_special_tokens",
        ]
    ),
    {
        **dict.fromkeys(("suffix", "response_format", "tools", "functions", "store", "use_beam_search"), _given),
        **dict.fromkeys(("prompt_logprobs", "prompt_embeds"), _given),
        **GUIDED,
    },
)


# Readers of one field each. A wrong type is a mistake of the client's, told by the field's name.


def whole(body: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None) -> int | None:
    """An integer within its bounds, both of them legal; the default where it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(f"{name}: {_short(value)} is not legal; legal: {low}..{high}")
    return value


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    """A number; its range is the engine's to check."""
    value = body.get(name)
    if value is None:
        return default
    return float(as_number(value, name))


def as_number(value: object, name: str) -> Any:
    """An integer or float as it is; neither a boolean nor more than a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise InputError(f"{name}: {_short(value)} is not legal; legal: a number")
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"{name}: {_short(value)} is not legal; legal: true or false")
    return value


def priority(body: Mapping[str, Any]) -> int:
    """0 where it is missing. A client may let others go first, and not push in front of them."""
    found = whole(body, "priority", 0, 2**31 - 1, 0)
    assert found is not None
    return found


def text(body: Mapping[str, Any], name: str, default: str = "") -> str:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise InputError(f"{name}: {_short(value)} is not legal; legal: a text")
    return value


def texts(body: Mapping[str, Any], name: str, most: int) -> tuple[str, ...]:
    """A text or a list of them, none empty."""
    value = body.get(name)
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise InputError(f"{name}: {_short(value)} is not legal; legal: texts of at least 1 character")
    if len(found) > most:
        raise InputError(f"{name}: {len(found)} are too many; the limit is {most}")
    return tuple(found)


def ids(value: object, name: str) -> list[int]:
    """Token ids; whether the vocabulary has them is the engine's to check."""
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 2**31 for each in value):
        raise InputError(f"{name}: {_short(value)} is not legal; legal: a list of token ids")
    return value


def bias(body: Mapping[str, Any], name: str = "logit_bias") -> dict[int, float]:
    """Token id -> what is added to its logit."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{name}: {_short(value)} is not legal; legal: an object of token ids and numbers")
    found: dict[int, float] = {}
    for token, added in value.items():
        if not re.fullmatch(r"\d{1,9}", token, re.ASCII):
            raise InputError(f"{name}: {_short(token)} is not a token id")
        found[int(token)] = as_number(added, name)
    return found


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
