"""Stores for engines under test: a dict, and one that is as unreliable as a store may be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from engines import engine_of

from rorqual.engine.engine import Engine
from rorqual.engine.fetch import Fetch, Fetcher
from rorqual.engine.identity import store_identity
from rorqual.model.transformer import Transformer
from rorqual.store.interface import PageBytes, StoreIdentity, StoreStat


class DictStore:
    """Keeps everything. asked: keys that `get` was called with. before_get: called first, in the fetcher's thread."""

    def __init__(self, model: Transformer) -> None:
        self._identity = store_identity(model)
        self.pages: dict[bytes, bytes] = {}
        self.asked: list[bytes] = []
        self.before_get: Callable[[], object] = lambda: None

    @property
    def identity(self) -> StoreIdentity:
        return self._identity

    def put(self, key: bytes, page: PageBytes) -> bool:
        assert len(page) == self._identity.page_bytes
        self.pages.setdefault(key, bytes(page))
        return True

    def get(self, key: bytes) -> bytes | None:
        self.before_get()
        self.asked.append(key)
        return self.pages.get(key)

    def match(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.pages), len(keys))

    def delete(self, key: bytes) -> bool:
        return self.pages.pop(key, None) is not None

    def stat(self) -> StoreStat:
        return StoreStat(pages=len(self.pages), bytes=sum(map(len, self.pages.values())), gets=len(self.asked))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.pages.clear()


class Unreliable(DictStore):
    """Takes some pages, loses some before its look-up, and some (or finds their bytes wrong) after it."""

    def __init__(self, model: Transformer, seed: int) -> None:
        super().__init__(model)
        self.draw = Random(seed)

    def put(self, key: bytes, page: PageBytes) -> bool:
        return self.draw.random() < 0.9 and super().put(key, page)

    def match(self, keys: Sequence[bytes]) -> int:
        if self.pages and self.draw.random() < 0.1:
            self.delete(self.draw.choice(sorted(self.pages)))
        return super().match(keys)

    def get(self, key: bytes) -> bytes | None:
        return None if self.draw.random() < 0.1 else super().get(key)


class Turns(Fetcher):
    """Without a thread: a few turns whenever somebody looks, so that a seed decides when pages arrive."""

    draw: Random

    def _wake(self) -> None:
        pass

    def order(self, fetches: Sequence[Fetch]) -> None:
        super().order(fetches)
        for _ in range(self.draw.randrange(6)):
            self.turn()

    def wait(self, fetches: Sequence[Fetch], seconds: float) -> None:
        pass


def over(store: DictStore, model: Transformer, **options: Any) -> Engine:
    """An engine over poisoned pages that waits for its store as long as it takes."""
    engine = engine_of(model, store=store, **options)
    assert engine.restorer is not None
    engine.restorer.patience = 600.0
    return engine


def in_turns(engine: Engine, seed: int, held_pages: int = 64) -> None:
    """Let an engine's fetcher have no thread."""
    assert engine.restorer is not None
    inner = engine.restorer.fetcher
    made = Turns(inner.store, inner.page_bytes, held_pages * inner.page_bytes)
    made.draw = Random(seed)
    engine.restorer.fetcher = made


class Gate:
    """Holds every `get` of a store until it is opened."""

    def __init__(self, store: DictStore) -> None:
        self._opened, self.entered = threading.Event(), threading.Event()
        store.before_get = self._pass

    def open(self) -> None:
        self._opened.set()

    def _pass(self) -> None:
        self.entered.set()
        assert self._opened.wait(60)
