"""What a text is in tokens, and back: `/tokenize`, `/detokenize`, `/tokenizer_info`, and Anthropic's `count_tokens`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from rorqual.engine.prompts import checked_tokenizer
from rorqual.engine.text_model import TextModel
from rorqual.errors import InputError
from rorqual.server import fields
from rorqual.server.access import Server
from rorqual.server.answering import Handler, guarded
from rorqual.server.images import with_images
from rorqual.server.protocol import CHAT, MESSAGES, Api

Routes = list[tuple[str, str, Handler]]
OF_CONVERSATION = frozenset(["messages", "tools", "tool_choice", "thinking", "reasoning_effort", "system"])


def routes(server: Server) -> Routes:
    """(method, path, handler) of each."""
    return [
        ("POST", "/tokenize", guarded(tokenize(server))),
        ("POST", "/detokenize", guarded(detokenize(server))),
        ("GET", "/tokenizer_info", guarded(tokenizer_info(server))),
        ("POST", "/v1/messages/count_tokens", guarded(count_tokens(server), anthropic=True)),
    ]


def tokenize(server: Server) -> Handler:
    """Of `prompt`, a text, or of `messages`, a conversation; as vLLM answers."""

    async def handle(request: Request) -> Response:
        server.tenant(request)
        body = server.known(await server.body(request))
        if "messages" in body:
            asked = {name: value for name, value in body.items() if name in OF_CONVERSATION or name == "model"}
            ids = await conversation_ids(server, CHAT, asked)
        else:
            if not isinstance(body.get("prompt"), str):
                raise InputError("prompt: missing; give a text, or messages")
            ids = text_ids(server.worker.engine.model, body["prompt"], fields.flag(body, "add_special_tokens", True))
        limit = server.worker.engine.max_model_len
        found: dict[str, Any] = {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None}
        if fields.flag(body, "return_token_strs"):
            found["token_strs"] = [server.tokenizer.id_to_token(token) for token in ids]
        return JSONResponse(found)

    return handle


def detokenize(server: Server) -> Handler:
    """The text of `tokens`, special tokens spelled."""

    async def handle(request: Request) -> Response:
        server.tenant(request)
        body = server.known(await server.body(request))
        ids, vocabulary = fields.ids(body.get("tokens"), "tokens"), server.worker.engine.model.config.vocab_size
        for token in ids:
            if token >= vocabulary:
                raise InputError(f"tokens: id {token} is outside the vocabulary; legal: 0..{vocabulary - 1}")
        return JSONResponse({"prompt": server.tokenizer.decode(ids, skip_special_tokens=False)})

    return handle


def tokenizer_info(server: Server) -> Handler:
    """The special tokens by their spelling, and a request's length: lm-eval looks here before it uses `/tokenize`."""

    async def handle(request: Request) -> Response:
        server.tenant(request)
        engine = server.worker.engine
        config, spelled = engine.model.config, server.tokenizer.id_to_token
        found = {
            "bos_token": spelled(config.bos_token_id),
            "eos_token": spelled(config.eos_token_id),
            "model_max_length": engine.max_model_len,
            "vocab_size": config.vocab_size,
        }
        return JSONResponse(found)

    return handle


def count_tokens(server: Server) -> Handler:
    """Tokens of a prompt of Anthropic's Messages, images with all of theirs."""

    async def handle(request: Request) -> Response:
        server.tenant(request)
        body = server.known(await server.body(request))
        ids = await conversation_ids(server, MESSAGES, {**body, "max_tokens": 1})
        return JSONResponse({"input_tokens": len(ids)})

    return handle


def text_ids(model: TextModel, text: str, special: bool = True) -> list[int]:
    """Ids of a text as a prompt has them. special: bos stands in front, unless the text spells it there itself.

    Raises:
        InputError: a text that the tokenizer cannot take.
    """
    ids: list[int] = checked_tokenizer(model, text).encode(text, add_special_tokens=False).ids
    bos = model.config.bos_token_id
    return ids if not special or ids[:1] == [bos] else [bos, *ids]


async def conversation_ids(server: Server, api: Api, body: dict[str, Any]) -> list[int]:
    """Ids of a conversation's prompt as the engine would have them."""
    fields.check(api.fields, body)
    call = server.conversations.call(api, body, "count")
    model = server.worker.engine.model
    prompt, _ = await asyncio.to_thread(with_images, model, call.ids, call.sources, server.settings)
    found: list[int] = prompt.tolist()
    return found
