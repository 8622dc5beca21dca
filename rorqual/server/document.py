"""What our OpenAPI document says of bodies and answers. Handlers read raw bodies; this is for readers and for tools.

The conversation APIs have more fields than are listed: those that most clients send are.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 1}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
SAMPLING: dict[str, Schema] = {
    "model": TEXT,
    "max_tokens": COUNT,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": 0},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "seed": {"type": "integer", "minimum": 0},
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
    "stream": {"type": "boolean"},
    "cache_salt": {"type": "string"},
    "priority": {"type": "integer", "minimum": 0},
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
    "required": ["role", "content"],
}
TURN: Schema = {
    "type": "object",
    "properties": {**MESSAGE["properties"], "role": {"enum": ["user", "assistant"]}},
    "required": ["role", "content"],
}


def _object(fields: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": fields, "required": list(required)}


def _several(of: Schema) -> Schema:
    return {"type": "array", "items": of, "minItems": 1}


BODIES: dict[str, Schema] = {
    "/v1/chat/completions": _object(
        {
            **SAMPLING,
            "messages": _several(MESSAGE),
            "n": COUNT,
            "logprobs": {"type": "boolean"},
            "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
            "stream_options": _object({"include_usage": {"type": "boolean"}}),
            "response_format": _object({"type": {"enum": ["text", "json_object", "json_schema"]}}, "type"),
            "tools": {"type": "array", "items": {"type": "object"}},
            "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}]},
            "parallel_tool_calls": {"type": "boolean"},
            "reasoning_effort": {"anyOf": [{"enum": ["low", "high", "max"]}, {**COUNT, "maximum": 100}]},
            "thinking": _object({"type": {"enum": ["enabled", "disabled"]}}, "type"),
        },
        "messages",
    ),
    "/v1/completions": _object(
        {
            **SAMPLING,
            "prompt": {"anyOf": [TEXT, _several(TEXT), IDS, _several(IDS)]},
            "n": COUNT,
            "echo": {"type": "boolean"},
            "logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
        },
        "prompt",
    ),
    "/v1/responses": _object(
        {
            "model": TEXT,
            "input": {"anyOf": [TEXT, {"type": "array", "items": {"type": "object"}}]},
            "instructions": {"type": "string"},
            "max_output_tokens": COUNT,
            "temperature": SAMPLING["temperature"],
            "top_p": SAMPLING["top_p"],
            "stream": {"type": "boolean"},
            "tools": {"type": "array", "items": {"type": "object"}},
        },
        "input",
    ),
    "/v1/messages": _object(
        {
            "model": TEXT,
            "messages": _several(TURN),
            "max_tokens": COUNT,
            "system": {"type": "string"},
            "temperature": {**SAMPLING["temperature"], "maximum": 1},
            "top_p": SAMPLING["top_p"],
            "stop_sequences": {"type": "array", "items": TEXT},
            "stream": {"type": "boolean"},
            "tools": {"type": "array", "items": {"type": "object"}},
        },
        "messages",
        "max_tokens",
    ),
    "/v1/messages/count_tokens": _object({"model": TEXT, "messages": _several(TURN)}, "messages"),
    "/tokenize": _object({"model": TEXT, "prompt": {"type": "string"}, "add_special_tokens": {"type": "boolean"}}),
    "/detokenize": _object({"model": TEXT, "tokens": {**IDS, "minItems": 0}}, "tokens"),
}
"""Path -> the JSON schema of its body."""

ERRORS = {
    400: "Something in the body is not legal; the message names it",
    401: "No valid API key",
    404: "No such model",
    408: "The request took too long",
    413: "The body is too large",
    429: "Too many requests; Retry-After says when",
    503: "The engine does not run, or the server shuts down",
}


def described(path: str) -> Schema:
    """What a route's document adds: its body, and the errors that it may answer with."""
    answers: Schema = {str(status): {"description": text} for status, text in ERRORS.items()}
    answers["200"] = {"description": "The answer; with `stream`, server-sent events"}
    extra: Schema = {"responses": answers}
    if path in BODIES:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": BODIES[path]}}}
    return extra
