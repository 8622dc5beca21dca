"""One request's way through the engine: chunks of its protocol as they come, or all of them as one answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from rorqual.engine.output import Delta
from rorqual.model.vision.image import ImageInput
from rorqual.server.errors import HttpError
from rorqual.server.images import with_images
from rorqual.server.protocol import CHAT, Call, joined
from rorqual.server.reply import Parts, Reply
from rorqual.server.settings import ServerSettings
from rorqual.server.worker import EngineWorker, Ticket

REPLAYED = "prompt_cache_replayed_tokens"
"""Beside the prompt's hit in Chat Completions' usage: how much of it was computed again for its windows."""


class Exchange:
    """A call that was submitted.

    ticket: of the engine. created: seconds of the epoch.
    """

    def __init__(self, call: Call, ticket: Ticket) -> None:
        self.call, self.ticket, self.created = call, ticket, int(time.time())
        self._replies = [Reply(call.making) for _ in range(call.params.n)]

    @classmethod
    async def begin(cls, worker: EngineWorker, call: Call, settings: ServerSettings) -> Exchange:
        """Read its images, find how many tokens it may have, submit it.

        Raises:
            InputError, CapacityError, EngineStopped, deepseek_recipe.ConversionError: nothing was queued.
        """
        prompt: Any = call.ids
        pictures: list[ImageInput] = []
        if call.sources:
            prompt, pictures = await asyncio.to_thread(
                with_images, worker.engine.model, call.ids, call.sources, settings
            )
        most = call.limit(len(prompt), worker.engine.max_model_len)
        params = replace(call.params, max_tokens=max(most, call.params.min_tokens))
        ticket = await worker.submit(
            prompt,
            params,
            images=pictures,
            salt=call.salt,
            speculative=_drafts(worker, call.speculative),
            priority=call.priority,
        )
        return cls(call, ticket)

    async def parts(self) -> AsyncIterator[tuple[int, Parts]]:
        """(completion, chunks of the protocol) as they come; ends the request when nobody reads on.

        Raises:
            HttpError: the engine failed at it.
        """
        last = None
        try:
            async for delta in self.ticket:
                if self._replies[delta.index].done:
                    continue
                found = delta.index, self._parts(delta)
                if self._said:
                    last = found
                    break
                yield found
        finally:
            if not self.over:
                await asyncio.shield(self.abort())
        # Whoever hears the last of it may count on its room.
        if last is not None:
            yield last

    async def abort(self) -> None:
        """End it where it has not ended; its pages are free when this returns."""
        # A stop text of the protocol's ends it as much as one of the engine's would.
        await self.ticket.abort("stop" if self._said else "abort")

    def _parts(self, delta: Delta) -> Parts:
        reply = self._replies[delta.index]
        found = reply.begin(*self.usage)
        ids = list(delta.token_ids)
        if delta.finish_reason == "stop" and isinstance(delta.stopped_by, int):
            ids = ids[:-1]
        found += reply.add(ids, delta.logprobs)
        if delta.finish_reason == "error":
            raise HttpError(500, str(delta.stopped_by))
        if delta.finish_reason is not None and not reply.done:
            found += reply.end(delta.finish_reason)
        return found

    @property
    def _said(self) -> bool:
        """Every completion has ended for its client."""
        return all(reply.done for reply in self._replies)

    @property
    def over(self) -> bool:
        """The engine has no part in it any more."""
        return self.ticket.ended

    @property
    def usage(self) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were found in the cache."""
        assert self.ticket.output is not None
        counts = self.ticket.output.counts
        return counts.prompt, counts.hit

    @property
    def _replayed(self) -> int:
        assert self.ticket.output is not None
        return self.ticket.output.counts.replayed

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        found: list[Parts] = [[] for _ in self._replies]
        async for index, parts in self.parts():
            found[index] += parts
        each = [json.loads(joined(parts, self.call, self.usage, self.created)) for parts in found]
        whole = each[0] if len(each) == 1 else merged(each)
        if self.call.api is CHAT:
            whole["usage"][REPLAYED] = self._replayed
        return whole

    async def events(self) -> AsyncIterator[str]:
        """The stream as server-sent events, those of one step in one piece."""
        api, usage, done = self.call.api, dict[str, Any](), self.call.api.response.sse_done_data()
        async for index, parts in self.parts():
            told = []
            for part in parts:
                name, text = api.response.sse_event_name(part), part.to_json()
                if api is CHAT and (len(self._replies) > 1 or '"usage":{' in text):
                    chunk = self._told(json.loads(text), index, usage)
                    if not chunk["choices"] and not chunk.get("usage"):
                        continue
                    text = json.dumps(chunk, ensure_ascii=False)
                told.append(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")
            if self._said and done is not None:
                told.append(f"data: {done}\n\n")
            if told:
                yield "".join(told)

    def _told(self, chunk: dict[str, Any], index: int, usage: dict[str, Any]) -> dict[str, Any]:
        """A chunk with its completion's index. Each completion tells its usage; the last one tells that of all, and how
        much of the hit was replayed.

        usage: the sum so far.
        """
        for choice in chunk["choices"]:
            choice["index"] = index
        told = chunk.get("usage")
        if told and usage:
            _add_usage(usage, told)
        elif told:
            usage.update(told)
        if told:
            usage[REPLAYED] = self._replayed
            chunk["usage"] = usage if self._said else None
        return chunk


def merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer of several completions: their choices, and the prompt counted once."""
    whole = answers[0]
    for index, other in enumerate(answers[1:], start=1):
        for choice in other["choices"]:
            whole["choices"].append({**choice, "index": index})
        _add_usage(whole["usage"], other["usage"])
    return whole


def _add_usage(whole: dict[str, Any], other: dict[str, Any]) -> None:
    """What another completion of the same prompt adds."""
    whole["completion_tokens"] += other["completion_tokens"]
    whole["total_tokens"] += other["completion_tokens"]
    details, more = (usage.get("completion_tokens_details") or {} for usage in (whole, other))
    for name, count in more.items():
        details[name] = (details.get(name) or 0) + (count or 0)


def _drafts(worker: EngineWorker, asked: bool | None) -> bool | None:
    """Where there are no drafts, asking for them changes nothing."""
    return None if not worker.engine.drafts and asked else asked
