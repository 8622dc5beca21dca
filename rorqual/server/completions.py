"""`/v1/completions`: prompts as they are, without any conversation around them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from rorqual.engine.output import Delta, RequestOutput
from rorqual.engine.prompts import encode
from rorqual.errors import InputError
from rorqual.server import completion_body
from rorqual.server.access import Server
from rorqual.server.completion_text import CompletionText, Spelling, joined
from rorqual.server.errors import HttpError
from rorqual.server.protocol import salted
from rorqual.server.worker import Ticket

Piece = tuple[int, str, dict[str, Any] | None, str | None]
"""(choice, text, log-probabilities, why it ended)."""


@dataclass(slots=True)
class _Prompt:
    """One prompt that runs. text: echoed in front of it."""

    ticket: Ticket
    output: RequestOutput
    text: str
    offsets: list[int]


class Completions:
    """The work of one body.

    Raises:
        InputError: what is not legal in it.
    """

    def __init__(self, server: Server, body: dict[str, Any], tenant: str) -> None:
        self.asked = completion_body.read(body, server.settings)
        self._server, self._model = server, str(body["model"])
        self._salt = salted(tenant, self.asked.salt)
        self._spelling = Spelling(server.tokenizer, self.asked.as_ids)
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._prompts: list[_Prompt] = []

    async def begin(self) -> None:
        """Submit every prompt; where one is refused, none runs.

        Raises:
            InputError, CapacityError, EngineStopped: as the engine does.
        """
        try:
            # All are checked before the first is queued.
            for ids, budget in [self._fitted(prompt) for prompt in self.asked.prompts]:
                await self._submit(ids, budget)
        except BaseException:
            await asyncio.shield(self.abort())
            raise

    def _fitted(self, prompt: str | list[int]) -> tuple[list[int], int]:
        """Ids of a prompt, and how many tokens it may have."""
        worker, asked = self._server.worker, self.asked
        ids = encode(worker.engine.model, prompt).tolist() if isinstance(prompt, str) else prompt
        if not ids:
            raise InputError("prompt: empty; give at least one token")
        limit, new = worker.engine.max_model_len, max(1, asked.new_tokens or 1)
        if len(ids) + new > limit:
            raise InputError(
                f"max_tokens: {len(ids)} tokens of the prompt and {new} new ones are more than the limit of {limit}"
            )
        least = max(1, asked.params.min_tokens)
        return ids, max(least, min(asked.params.max_tokens, limit - len(ids)))

    async def _submit(self, ids: list[int], budget: int) -> None:
        worker, asked = self._server.worker, self.asked
        drafts = None if worker.engine.speculator is None and asked.speculative else asked.speculative
        params = replace(asked.params, max_tokens=budget)
        ticket = await worker.submit(ids, params, salt=self._salt, speculative=drafts, priority=asked.priority)
        assert ticket.output is not None
        text, offsets = self._spelling.prompt(ids) if asked.echo else ("", [])
        self._prompts.append(_Prompt(ticket, ticket.output, text, offsets))

    @property
    def ended(self) -> bool:
        return all(prompt.output.finished for prompt in self._prompts)

    async def abort(self) -> None:
        """End what has not ended; its pages are free when this returns."""
        for prompt in self._prompts:
            await prompt.ticket.abort()

    async def pieces(self) -> AsyncIterator[Piece]:
        """What is added to choices, as it comes."""
        queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

        async def follow(at: int, prompt: _Prompt) -> None:
            try:
                async for delta in prompt.ticket:
                    queue.put_nowait((at, delta))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        readers = [asyncio.ensure_future(follow(at, prompt)) for at, prompt in enumerate(self._prompts)]
        texts: dict[int, CompletionText] = {}
        left = len(readers)
        try:
            while left:
                match await queue.get():
                    case None:
                        left -= 1
                    case Exception() as error:
                        raise error
                    case (at, delta):
                        for piece in self._pieces(at, delta, texts):
                            yield piece
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.shield(self.abort())

    def _pieces(self, at: int, delta: Delta, texts: dict[int, CompletionText]) -> list[Piece]:
        asked, prompt = self.asked, self._prompts[at]
        if delta.finish_reason == "error":
            raise HttpError(500, str(delta.stopped_by))
        choice, found = at * asked.n + delta.index, []
        nothing_new = asked.new_tokens == 0
        if choice not in texts:
            texts[choice] = CompletionText(self._spelling, asked.logprobs is not None, len(prompt.text))
            if asked.echo:
                found.append((choice, prompt.text, self._echoed(prompt), "length" if nothing_new else None))
        if not nothing_new:
            text, logprobs = texts[choice].piece(delta)
            if text or delta.finish_reason is not None or (logprobs and logprobs["tokens"]):
                found.append((choice, text, logprobs, delta.finish_reason))
        return found

    def _echoed(self, prompt: _Prompt) -> dict[str, Any] | None:
        output = prompt.output
        if self.asked.logprobs is None or output.prompt_logprobs is None:
            return None
        return self._spelling.echoed(output.prompt_token_ids, output.prompt_logprobs, prompt.offsets)

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        choices: list[list[Piece]] = [[] for _ in range(len(self._prompts) * self.asked.n)]
        async for piece in self.pieces():
            choices[piece[0]].append(piece)
        whole: list[Piece] = [
            (at, "".join(own[1] for own in pieces), joined([own[2] for own in pieces]), pieces[-1][3])
            for at, pieces in enumerate(choices)
        ]
        return {**self._head(), "choices": [_choice(one) for one in whole], "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """The stream as server-sent events; usage comes last, where it is asked for, and on no other event."""
        async for piece in self.pieces():
            yield _event({**self._head(), "choices": [_choice(piece)]})
        if self.asked.usage:
            yield _event({**self._head(), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}

    def _usage(self) -> dict[str, Any]:
        counts = [prompt.output.counts for prompt in self._prompts]
        prompt, hit = sum(own.prompt for own in counts), sum(own.hit for own in counts)
        new = 0 if self.asked.new_tokens == 0 else sum(own.new for own in counts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": hit},
            "prompt_cache_hit_tokens": hit,
            "prompt_cache_miss_tokens": prompt - hit,
        }


def _choice(piece: Piece) -> dict[str, Any]:
    at, text, logprobs, reason = piece
    return {"index": at, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _event(found: dict[str, Any]) -> str:
    return f"data: {json.dumps(found, ensure_ascii=False)}\n\n"
