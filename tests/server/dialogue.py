"""What a model might say, what a server then tells its clients, and how a client puts it together again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from serving import demo_model

from rorqual.engine.output import Completion, Counts, Delta, RequestOutput, Times, TokenLogprob, compact
from rorqual.server.exchange import Exchange
from rorqual.server.protocol import CHAT, MESSAGES, Api, Call, Conversations
from rorqual.server.settings import ServerSettings

PARAMETERS = {
    "type": "object",
    "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["cmd"],
}
TOOL = {"name": "sh", "description": "Run a command", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": TOOL}
ASKED = [{"role": "user", "content": "List the files."}]
COMMAND = 'ls "a b" 😀漢 <x> 2>&1'
"""Ends as markup might begin."""
MARKED = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="sh">\n'
    f'<｜DSML｜ parameter name="cmd" string="true">{COMMAND}</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="n" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
"""A call as the release's prompt asks for it."""


def body_of(api: Api, **fields: Any) -> dict[str, Any]:
    """A request with one tool, of either API."""
    tool: dict[str, Any] = CHAT_TOOL
    if api is MESSAGES:
        tool = {"name": "sh", "description": "Run a command", "input_schema": PARAMETERS}
    elif api is not CHAT:
        tool = {"type": "function", **TOOL}
    about = {"input": "List the files."} if api not in (CHAT, MESSAGES) else {"messages": ASKED, "max_tokens": 400}
    return {"model": "rorqual", "tools": [tool], **about, **fields}


@cache
def conversations() -> Conversations:
    tokenizer = demo_model().tokenizer
    assert tokenizer is not None
    return Conversations(tokenizer.to_str(), ServerSettings())


@dataclass(slots=True)
class Told:
    """A client's view of one answer. calls: (name, arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish: str | None = None


def of_chat(events: Sequence[dict[str, Any]]) -> Told:
    told = Told()
    for event in events:
        for choice in event.get("choices", []):
            delta = choice["delta"]
            told.content += delta.get("content") or ""
            told.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(told.calls):
                    told.calls.append([call["function"]["name"], ""])
                told.calls[call["index"]][1] += call["function"].get("arguments") or ""
            told.finish = choice.get("finish_reason") or told.finish
    return told


def of_messages(events: Sequence[dict[str, Any]]) -> Told:
    told = Told()
    for event in events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                told.calls.append([event["content_block"]["name"], ""])
            case "content_block_delta":
                delta = event["delta"]
                told.content += delta.get("text", "")
                told.reasoning += delta.get("thinking", "")
                if "partial_json" in delta:
                    told.calls[-1][1] += delta["partial_json"]
            case "message_delta":
                told.finish = event["delta"]["stop_reason"]
    return told


def of_responses(events: Sequence[dict[str, Any]]) -> Told:
    told = Told()
    for event in events:
        match event["type"]:
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                told.calls.append([event["item"]["name"], ""])
            case "response.output_text.delta":
                told.content += event["delta"]
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                told.reasoning += event["delta"]
            case "response.function_call_arguments.delta":
                told.calls[-1][1] += event["delta"]
            case "response.completed" | "response.incomplete":
                told.finish = event["response"]["status"]
    return told


def told_of(api: Api, lines: Sequence[str]) -> Told:
    """Of the server-sent events of one answer."""
    data = [line[6:] for event in lines for line in event.split("\n") if line.startswith("data: ")]
    read = of_chat if api is CHAT else of_messages if api is MESSAGES else of_responses
    return read([json.loads(one) for one in data if one != "[DONE]"])


class Saying:
    """Stands where an engine's ticket does: tokens come in the given parts, and then eos or the end of the budget."""

    def __init__(self, parts: Sequence[Sequence[int]], stopped_by: int | None, logprob: float | None = None) -> None:
        self.aborted = False
        self.output = RequestOutput(
            request="r",
            prompt_ids=compact([0]),
            completions=[Completion(index=0)],
            counts=Counts(prompt=7, hit=3),
            times=Times(arrived=0.0),
        )
        self._parts, self._stopped_by, self._logprob = parts, stopped_by, logprob

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for at, ids in enumerate(self._parts):
            last = at + 1 == len(self._parts)
            reason = None if not last else "length" if self._stopped_by is None else "stop"
            yield Delta(
                logprobs=self._logprobs(ids),
                request="r",
                index=0,
                text="",
                token_ids=tuple(ids),
                finish_reason=reason,
                stopped_by=self._stopped_by if last else None,
            )

    def _logprobs(self, ids: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
        if self._logprob is None:
            return None
        return tuple(TokenLogprob(token=one, logprob=self._logprob, top=((one, self._logprob),)) for one in ids)

    async def abort(self, reason: str = "abort") -> None:
        self.aborted = True

    @property
    def ended(self) -> bool:
        return self.aborted


def events_of(
    call: Call, parts: Sequence[Sequence[int]], stopped_by: int | None, logprob: float | None = None
) -> list[str]:
    """The stream of what was said in these parts."""

    async def read() -> list[str]:
        exchange = Exchange(call, Saying(parts, stopped_by, logprob))  # type: ignore[arg-type]
        return [piece async for piece in exchange.events()]

    # Events that come together are one piece.
    return [f"{event}\n\n" for event in "".join(asyncio.run(read())).split("\n\n") if event]


def answer_of(
    call: Call, parts: Sequence[Sequence[int]], stopped_by: int | None, logprob: float | None = None
) -> dict[str, Any]:
    """The same as one answer."""
    return asyncio.run(Exchange(call, Saying(parts, stopped_by, logprob)).answer())  # type: ignore[arg-type]
