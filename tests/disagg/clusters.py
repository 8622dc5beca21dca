"""Workers of a cluster in this process: the same actors without Ray, which die and begin anew when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

from rorqual.disagg.cluster.actors import ROLES
from rorqual.disagg.cluster.config import ClusterConfig
from rorqual.disagg.cluster.front import Front
from rorqual.disagg.cluster.placing import Post
from rorqual.engine.llm import LLM
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.engine.text_model import WithoutWeights

SECONDS = 120.0
"""What nothing in these tests takes."""
PROMPTS = ("The whale", "It was a dark and stormy night; ", "In the beginning ")


class Here:
    """A `Handle` of an actor on an event loop of its own. deaf: methods that are never answered, `risen`: from its next
    life on.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.actor: Any = make()
        self.deaf: frozenset[str] = frozenset()
        self.risen: frozenset[str] = frozenset()
        self.dead, self.kills = False, 0
        self.calls = Counter[str]()
        self._open: set[Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def call(self, method: str, *args: Any) -> Future[Any]:
        outer: Future[Any] = Future()
        self.calls[method] += 1
        if self.dead:
            outer.set_exception(RuntimeError("the worker is dead"))
            return outer
        self._open.add(outer)
        if method not in self.deaf:
            # As between processes; what is awaited there stays what it is.
            sent = [arg if isinstance(arg, list) else pickle.loads(pickle.dumps(arg)) for arg in args]
            inner = asyncio.run_coroutine_threadsafe(getattr(self.actor, method)(*sent), self._loop)
            inner.add_done_callback(lambda done: self._pass_on(done, outer))
        return outer

    def begin(self, method: str, *args: Any) -> Later:
        return Later(self.call(method, *args))

    def kill(self) -> None:
        """As kill -9 and a supervisor that is quick."""
        self.kills += 1
        self.die()
        self.rise()

    def die(self) -> None:
        self.dead = True
        self._cancel()
        for future in list(self._open):
            with contextlib.suppress(Exception):
                future.set_exception(RuntimeError("the worker died"))

    def rise(self) -> None:
        self.actor = self._make()
        self.dead, self.deaf = False, self.risen

    def close(self) -> None:
        self._cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _cancel(self) -> None:
        """Its thread and its tasks end."""
        self.actor.close()

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(SECONDS)

    def _pass_on(self, done: Future[Any], outer: Future[Any]) -> None:
        self._open.discard(outer)
        if outer.done():
            return
        if done.cancelled() or done.exception() is not None:
            outer.set_exception(RuntimeError("cancelled") if done.cancelled() else done.exception())
        else:
            outer.set_result(pickle.loads(pickle.dumps(done.result())))


class Later:
    """An answer that another worker awaits."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._future).__await__()


@contextlib.contextmanager
def here(text: str, master: str = "") -> Iterator[tuple[Front, dict[str, Here]]]:
    """A front over the workers of a config, all in this process. master: of their store, where they have one."""
    config = ClusterConfig.parse(text)
    handles = {
        name: Here(lambda role=role, name=name: ROLES[role](config, name, master)) for name, role, _ in config.workers
    }
    posts = [Post(name=name, role=role, handle=handles[name]) for name, role, _ in config.workers]
    model = WithoutWeights.read(Path(config.model.path) if config.model.path else None)
    front = Front(model, posts, config.deadlines)
    try:
        yield front, handles
    finally:
        front.close()
        for handle in handles.values():
            handle.close()


def run(front: Front, *names: str, seconds: float = SECONDS) -> list[RequestOutput]:
    """Step until these requests have ended."""
    outputs = [front.output(name) for name in names]
    until(front, lambda: all(output.finished for output in outputs), seconds)
    return outputs


def until(front: Front, condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Step until something is so; fails when it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        front.step()


def assert_nothing_held(front: Front, seconds: float = SECONDS) -> None:
    """Every worker passes its audit, and has no page or slot in use."""
    assert front.live == []
    for post in front.posts:
        end = time.monotonic() + seconds
        while True:
            stats = post.handle.call("audit").result(seconds)
            if (stats.pages_used, stats.slots_free, stats.running, stats.waiting) == (0, stats.slots, 0, 0):
                break
            assert time.monotonic() < end, f"{post.name}: {stats}"
            time.sleep(0.02)


@cache
def alone() -> LLM:
    """What the texts are compared with: one engine that does everything itself, exactly."""
    return LLM(slots=4, replay="exact", kernels="fast")


def right(prompt: str, params: SamplingParams, **options: Any) -> RequestOutput:
    return alone().generate(prompt, params, **options)[0]
