"""A server for tests: the shipped model behind uvicorn on a free port, and engines that say what a test wants."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar
from unittest import mock

import torch
import uvicorn
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.engine import intake
from rorqual.engine.engine import Engine
from rorqual.engine.sampler import Sampler
from rorqual.engine.stats import EngineStats
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.server.app import create_app
from rorqual.server.serving import configured
from rorqual.server.settings import ServerSettings
from rorqual.training.data.tokens import EOS, SPECIAL_TOKENS, token_id

Answer = TypeVar("Answer")
SECONDS = 60.0
"""What nothing in these tests takes."""


class Served:
    """A running server. url: its root. engine: looked at through `ask` alone, as its thread owns it."""

    def __init__(self, model: Transformer, settings: ServerSettings, **options: Any) -> None:
        self.model, self.engine = model, Engine(model, **options)
        self.app = create_app(self.engine, settings)
        self.worker = self.app.state.server.worker
        self._server = uvicorn.Server(configured(self.app, host="127.0.0.1", port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def ask(self, command: Callable[[Engine], Answer]) -> Answer:
        """What the engine's thread answers between two steps."""
        found: Answer = asyncio.run(self.worker.call(lambda: command(self.engine)))
        return found

    def stats(self) -> EngineStats:
        return self.ask(Engine.stats)

    def assert_clean(self) -> None:
        """No request is left, and nothing is held once the index is emptied."""
        until(lambda: not self.ask(lambda engine: engine.live))
        self.ask(Engine.check_integrity)
        self.ask(Engine.drop_cached)
        stats = self.stats()
        assert (stats.pages_free, stats.slots_free) == (stats.pages, stats.slots)
        assert (stats.running, stats.waiting) == (0, 0)
        until(lambda: not +self.app.state.server.running)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(SECONDS)


@cache
def demo_model() -> Transformer:
    return load(None, kernels="fast")


@cache
def demo_server() -> Served:
    """Without keys; once a session."""
    served = Served(demo_model(), ServerSettings(), slots=4)
    atexit.register(served.close)
    return served


def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait for something that comes in another thread; fails when it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


@contextlib.contextmanager
def scripted(ids: Sequence[int]) -> Iterator[None]:
    """Requests that begin meanwhile say these tokens, whatever the model thinks of them, and then eos for ever."""
    said = list(ids)

    class Scripted(Sampler):
        @property
        def plain(self) -> bool:
            return False

        def weights(self, logits_V: Tensor) -> Tensor:
            weights = torch.zeros(logits_V.shape[0], dtype=torch.float64)
            weights[said[self.count] if self.count < len(said) else said[-1]] = 1
            return weights

        def choose(self, weights_V: Tensor, *_: Any, **__: Any) -> int:
            return int(weights_V.argmax())

    with mock.patch.object(intake, "Sampler", Scripted):
        yield


def pieces(text: str) -> list[str]:
    """Its characters; a special token's spelling is one piece.

    >>> pieces("a｜DSML｜b")
    ['a', '｜DSML｜', 'b']
    """
    found, at = [], 0
    while at < len(text):
        special = next((one for one in SPECIAL_TOKENS if text.startswith(one, at)), text[at])
        found.append(special)
        at += len(special)
    return found


def spelled_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text, one character at a time, and eos."""
    each = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces(text)]
    return [*(token for ids in each for token in ids), token_id(tokenizer, EOS)]
