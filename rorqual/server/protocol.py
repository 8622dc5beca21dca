"""Bodies to prompts and answers to bodies, for the three conversation APIs: `deepseek-recipe` does both.

What that library does not know of, sampling beyond temperature and top-p, n, salts, is taken from the body first
(`EXTENSIONS`), by the names that OpenAI's and vLLM's clients use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import deepseek_recipe as recipe
from tokenizers import Tokenizer

from rorqual.engine.params import Constraint, SamplingParams
from rorqual.errors import InputError
from rorqual.server import fields
from rorqual.server.history import with_arguments
from rorqual.server.settings import ServerSettings
from rorqual.training.data.tokens import END_THINK, plain_ids, token_id

EXTENSIONS = {
    "n": "n",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_ids",
}
"""Fields of a body that are sampling parameters of ours."""
MOST = 2**31 - 1
EFFORTS = range(1, 101)
EFFORT_LINE = "Reasoning Effort: "


@dataclass(frozen=True, slots=True)
class Api:
    """One conversation API. name: of its answers' ids. fields: of its bodies."""

    name: str
    request: Any
    response: Any
    fields: fields.Fields
    several: bool = False
    """`n` is legal."""


CHAT = Api("chatcmpl", recipe.ChatCompletionRequest, recipe.ChatCompletionResponse, fields.CHAT, several=True)
RESPONSES = Api("resp", recipe.ResponsesRequest, recipe.ResponsesResponse, fields.RESPONSES)
MESSAGES = Api("msg", recipe.MessagesRequest, recipe.MessagesResponse, fields.MESSAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a body asks of the engine. ids: the prompt, one image token an image. sources: its images, in order.

    processor: makes what turns tokens into chunks, for one completion each.
    """

    api: Api
    id: str
    model: str
    ids: list[int]
    sources: list[Any]
    params: SamplingParams
    limit: Callable[[int, int], int]
    processor: Callable[[], Any]
    stream: bool
    salt: str
    speculative: bool | None

    def of(self, tenant: str) -> Call:
        """In a tenant's name: two tenants never share a page, nor two salts of one."""
        return replace(self, salt=salted(tenant, self.salt))


def salted(tenant: str, salt: str) -> str:
    """The engine's salt for a tenant's.

    >>> salted("a", "b"), salted("ab", "")
    ('["a", "b"]', '["ab", ""]')
    """
    return json.dumps([tenant, salt])


class Conversations:
    """Conversion for one model.

    Args:
        tokenizer: its tokenizer.json.
        settings: names and limits.
    """

    def __init__(self, tokenizer: str, settings: ServerSettings) -> None:
        self.settings = settings
        self.tokenizer = recipe.Tokenizer.from_str(tokenizer)
        self._plain = Tokenizer.from_str(tokenizer)
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self.tokenizer)
        names = dict.fromkeys((settings.model, *settings.aliases), recipe.ModelVersion.DeepseekV41Flash)
        self._options = recipe.ConversionOptions(default_thinking_mode=settings.thinking).with_model_versions_by_name(
            names
        )

    def call(self, api: Api, body: dict[str, Any], name: str) -> Call:
        """A body's call.

        Raises:
            InputError, deepseek_recipe.ConversionError, ValueError: what is not legal in it.
        """
        body = dict(body)
        given = {ours: body.pop(theirs) for theirs, ours in EXTENSIONS.items() if body.get(theirs) is not None}
        salt = fields.text(body, "cache_salt")
        speculative = None if body.get("speculative") is None else fields.flag(body, "speculative")
        if api is CHAT and body.get("max_completion_tokens") is not None:
            body["max_tokens"] = body["max_completion_tokens"]
        ours = {*EXTENSIONS, "cache_salt", "speculative", "max_completion_tokens", "priority"}
        body = {field: value for field, value in body.items() if field not in ours}
        self._check(api, body, given)
        body = with_arguments(body)
        effort = self._effort(body)
        parsed = api.request(json.dumps(body))
        model = parsed.model
        echo = parsed.echo() if api is RESPONSES else None
        converted = parsed.convert(self._options)
        options = converted.inference_options
        thinks = converted.conversation.thinking_mode
        params = _sampling(given, options, END_THINK if thinks else None)

        def processor() -> Any:
            made = api.request.chunk_generator(converted, name, model)
            if echo is not None:
                made = made.with_echo(echo)
            return recipe.StreamProcessor(made, converted.parsing_options, self.tokenizer)

        return Call(
            api=api,
            id=name,
            model=model,
            ids=self._ids(converted.conversation, effort),
            sources=list(self._encoding.render_conversation(converted.conversation).image_sources),
            params=params,
            limit=converted.resolve_max_tokens,
            processor=processor,
            stream=converted.stream,
            salt=salt,
            speculative=speculative,
        )

    def _check(self, api: Api, body: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        limits = self.settings
        for field, most in (("messages", limits.messages), ("tools", limits.tools), ("input", limits.messages)):
            found = body.get(field)
            if isinstance(found, list) and len(found) > most:
                raise InputError(f"{field}: {len(found)} are too many; the limit is {most}")
        stops = body.get("stop") or body.get("stop_sequences")
        if isinstance(stops, list) and len(stops) > limits.stops:
            raise InputError(f"stop: {len(stops)} are too many; the limit is {limits.stops}")
        n = given.get("n", 1)
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= (limits.completions if api.several else 1):
            raise InputError(f"n: {n!r} is not legal; legal: 1..{limits.completions if api.several else 1}")

    def _effort(self, body: dict[str, Any]) -> int | None:
        """A numeric effort, which the library does not take; the body is left with one that it does."""
        for field, inner in (("reasoning_effort", None), ("reasoning", "effort"), ("output_config", "effort")):
            holder = body if inner is None else body.get(field)
            key = field if inner is None else inner
            if not isinstance(holder, dict) or not isinstance(holder.get(key), int):
                continue
            effort = holder[key]
            if isinstance(effort, bool) or effort not in EFFORTS:
                raise InputError(f"{field}: {effort!r} is not legal; legal: low, high, max, or 1..100")
            if inner is None:
                body[field] = "high"
            else:
                body[field] = {**holder, inner: "high"}
            return int(effort)
        return None

    def _ids(self, conversation: Any, effort: int | None) -> list[int]:
        """Ids of the rendered prompt; with a numeric effort, of the prompt with that number in its place."""
        if effort is None or not conversation.thinking_mode:
            return list(self._encoding.encode(conversation))
        rendered = self._encoding.render_conversation(conversation)
        text, at = rendered.prompt, rendered.prompt.index(EFFORT_LINE) + len(EFFORT_LINE)
        end = at + len(text[at:].split(" ", 1)[0])
        ids, shown = [], 0
        for start, stop in rendered.special_ranges:
            plain = text[shown:at] + str(effort) + text[end:start] if shown <= at < start else text[shown:start]
            ids += [*plain_ids(self._plain, plain), token_id(self._plain, text[start:stop])]
            shown = stop
        return ids + plain_ids(self._plain, text[shown:])


def _sampling(given: dict[str, Any], options: Any, after: str | None) -> SamplingParams:
    extra = dict(given)
    for name in extra:
        match name:
            case "logit_bias":
                extra[name] = fields.bias(extra)
            case "ignore_eos":
                extra[name] = fields.flag(extra, name)
            case "stop_ids":
                extra[name] = fields.ids(extra[name], "stop_token_ids")
            case "n" | "top_k" | "min_tokens":
                extra[name] = fields.whole(extra, name, 0, MOST)
            case _:
                extra[name] = fields.number(extra, name, 0.0)
    return SamplingParams(
        temperature=1.0 if options.temperature is None else options.temperature,
        top_p=1.0 if options.top_p is None else options.top_p,
        seed=options.seed,
        logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        constraint=_constraint(options.output_constraint, after),
        max_tokens=max(1, extra.get("min_tokens", 1)),
        **extra,
    )


def _constraint(found: Any, after: str | None) -> Constraint | None:
    if found is None or found.kind not in ("json", "regex"):
        return None
    if found.kind == "regex":
        return Constraint(kind="regex", value=found.schema, after=after)
    if found.schema:
        return Constraint(kind="json_schema", value=found.schema, after=after)
    return Constraint(kind="json_object", after=after)


def joined(parts: Iterable[Any], call: Call, usage: tuple[int, int], created: int) -> str:
    """The whole answer, of all chunks of one completion."""
    response = call.api.response(call.id, call.model, created, *usage)
    for part in parts:
        response.accumulate(part)
    text: str = response.to_json()
    return text
