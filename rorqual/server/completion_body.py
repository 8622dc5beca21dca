"""A text completion's body: prompts and what is asked of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rorqual.engine.params import SamplingParams
from rorqual.errors import InputError
from rorqual.server import fields
from rorqual.server.settings import ServerSettings

NEW_TOKENS = 16
"""OpenAI's default."""
MOST_LOGPROBS = 5
MOST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a body asks for.

    prompts: texts or token ids. n: completions of each. new_tokens: None where the body says nothing; 0 only with
    `echo`. logprobs: alternatives told beside each token; None tells nothing. usage: the stream ends with it.
    special: a text gets bos in front.
    """

    prompts: list[str | list[int]]
    params: SamplingParams
    n: int
    new_tokens: int | None
    echo: bool
    logprobs: int | None
    as_ids: bool
    stream: bool
    usage: bool
    salt: str
    speculative: bool | None
    priority: int
    special: bool


def read(body: Mapping[str, Any], settings: ServerSettings) -> Asked:
    """What a body asks for.

    Raises:
        InputError: a field that is not legal, by name.
    """
    n = fields.whole(body, "n", 1, settings.completions, 1)
    new = fields.whole(body, "max_tokens", 0, MOST)
    echo, logprobs = fields.flag(body, "echo"), fields.whole(body, "logprobs", 0, MOST_LOGPROBS)
    assert n is not None
    best = fields.whole(body, "best_of", 1, MOST)
    if best not in (None, n):
        raise InputError(f"best_of: {best} is not legal; legal: n, which is {n}: every completion is returned")
    if new == 0 and not echo:
        raise InputError("max_tokens: 0 is legal with echo alone; give at least 1")
    stream = fields.flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and (not isinstance(options, dict) or not stream):
        raise InputError("stream_options: not legal; legal: an object, with stream")
    speculative = fields.flag(body, "speculative") if body.get("speculative") is not None else None
    return Asked(
        prompts=_prompts(body.get("prompt"), settings.prompts),
        params=_params(body, settings, n, new, echo, logprobs),
        n=n,
        new_tokens=new,
        echo=echo,
        logprobs=logprobs,
        as_ids=fields.flag(body, "return_tokens_as_token_ids"),
        stream=stream,
        usage=fields.flag(options or {}, "include_usage"),
        salt=fields.text(body, "cache_salt"),
        speculative=speculative,
        priority=fields.priority(body),
        special=fields.flag(body, "add_special_tokens", True),
    )


def _params(
    body: Mapping[str, Any], settings: ServerSettings, n: int, new: int | None, echo: bool, logprobs: int | None
) -> SamplingParams:
    most = max(1, NEW_TOKENS if new is None else new)
    least = fields.whole(body, "min_tokens", 0, most, 0)
    seed, top_k = fields.whole(body, "seed", -(2**63), 2**63 - 1), fields.whole(body, "top_k", -1, MOST, 0)
    assert least is not None and top_k is not None
    return SamplingParams(
        temperature=fields.number(body, "temperature", 1.0),
        top_p=fields.number(body, "top_p", 1.0),
        top_k=max(0, top_k),  # vLLM's clients say -1 for every token
        min_p=fields.number(body, "min_p", 0.0),
        presence_penalty=fields.number(body, "presence_penalty", 0.0),
        frequency_penalty=fields.number(body, "frequency_penalty", 0.0),
        repetition_penalty=fields.number(body, "repetition_penalty", 1.0),
        logit_bias=fields.bias(body),
        seed=None if seed is None else seed % 2**63,
        n=n,
        max_tokens=most,
        min_tokens=least,
        stop=fields.texts(body, "stop", settings.stops),
        stop_ids=fields.ids(body.get("stop_token_ids") or [], "stop_token_ids"),
        ignore_eos=fields.flag(body, "ignore_eos"),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )


def _prompts(value: object, most: int) -> list[str | list[int]]:
    """A text, ids, or a list of either."""
    if isinstance(value, str):
        found: list[Any] = [value]
    elif isinstance(value, list) and value and not isinstance(value[0], str | list):
        found = [value]
    elif isinstance(value, list) and value:
        found = value
    else:
        raise InputError("prompt: missing or empty; give a text, token ids, or a list of either")
    if len(found) > most:
        raise InputError(f"prompt: {len(found)} are too many; the limit is {most}")
    return [one if isinstance(one, str) else fields.ids(one, "prompt") for one in found]
