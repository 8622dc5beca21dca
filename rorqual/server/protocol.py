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
from rorqual.server.reply import Making
from rorqual.server.settings import ServerSettings
from rorqual.server.tool_use import ToolUse, answer_constraint, tool_use
from rorqual.training.data.tokens import DSML, END_THINK, IN_TEXTS, SPECIAL_TOKENS, plain_ids, token_id

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
    """What a body asks of the engine. ids: the prompt, one image token an image. sources: its images, in order."""

    api: Api
    id: str
    model: str
    ids: list[int]
    sources: list[Any]
    params: SamplingParams
    limit: Callable[[int, int], int]
    making: Making
    stream: bool
    salt: str
    speculative: bool | None
    priority: int

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
        self._special = {
            token: own.content
            for token, own in self._plain.get_added_tokens_decoder().items()
            if own.special or own.content in SPECIAL_TOKENS
        }
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
        salt, priority = fields.text(body, "cache_salt"), fields.priority(body)
        speculative = None if body.get("speculative") is None else fields.flag(body, "speculative")
        if api is CHAT and body.get("max_completion_tokens") is not None:
            body["max_tokens"] = body["max_completion_tokens"]
        ours = {*EXTENSIONS, "cache_salt", "speculative", "max_completion_tokens", "priority"}
        body = {field: value for field, value in body.items() if field not in ours}
        self._check(api, body, given)
        body, use = with_arguments(body), tool_use(body)
        effort = self._effort(body)
        parsed = api.request(json.dumps(body))
        model = parsed.model
        finishing = self._finishing(api, parsed)
        converted = parsed.convert(self._options)
        constraint = answer_constraint(converted, use, self._plain, after=END_THINK if thinks(converted) else None)

        def generator() -> Any:
            return finishing(api.request.chunk_generator(converted, name, model))

        return Call(
            api=api,
            id=name,
            model=model,
            ids=self._ids(converted.conversation, effort),
            sources=list(self._encoding.render_conversation(converted.conversation).image_sources),
            params=_sampling(given, converted.inference_options, constraint),
            limit=converted.resolve_max_tokens,
            making=self._making(converted, use, generator),
            stream=converted.stream,
            salt=salt,
            speculative=speculative,
            priority=priority,
        )

    def _finishing(self, api: Api, parsed: Any) -> Callable[[Any], Any]:
        """What is added to a generator of chunks: Responses repeat settings, and part the names of grouped tools."""
        if api is not RESPONSES:
            return lambda generator: generator
        echo, names = parsed.echo(), parsed.namespace_tool_map(self._options)
        return lambda generator: generator.with_echo(echo).with_namespace_tool_map(names)

    def _making(self, converted: Any, use: ToolUse, generator: Callable[[], Any]) -> Making:
        """How its answers become chunks. generator: makes one of the API's."""
        parsing = converted.parsing_options
        told = IN_TEXTS | ({DSML} if parsing.parse_tool_calls else frozenset())

        def parser(generator: Any) -> Any:
            return recipe.StreamProcessor(generator, parsing, self.tokenizer)

        def checker() -> Any:
            return parser(CHAT.request.chunk_generator(converted, "", ""))

        return Making(
            processor=lambda: parser(generator()),
            checker=checker if parsing.parse_tool_calls else None,
            offered=frozenset(tool.name for tool in _offered(converted.conversation)),
            several=use.several,
            hidden=frozenset(token for token, spelling in self._special.items() if spelling not in told),
            end_think=self._plain.token_to_id(END_THINK) if thinks(converted) else None,
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


def _sampling(given: dict[str, Any], options: Any, constraint: Constraint | None) -> SamplingParams:
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
        constraint=constraint,
        max_tokens=max(1, extra.get("min_tokens", 1)),
        **extra,
    )


def thinks(converted: Any) -> bool:
    """An answer begins with thought; one that goes on with what was said before may be past it."""
    stage = converted.parsing_options.thinking_initial_stage
    return stage is not None and stage.starts_in_reasoning()


def _offered(conversation: Any) -> list[Any]:
    """Tools of a conversation, those that came later included."""
    return [*conversation.tools, *(tool for message in conversation.messages for tool in _told_later(message))]


def _told_later(message: Any) -> list[Any]:
    return list(message.tools or ()) if isinstance(message, recipe.SystemMessage) else []


def joined(parts: Iterable[Any], call: Call, usage: tuple[int, int], created: int) -> str:
    """The whole answer, of all chunks of one completion."""
    response = call.api.response(call.id, call.model, created, *usage)
    for part in parts:
        response.accumulate(part)
    text: str = response.to_json()
    return text
