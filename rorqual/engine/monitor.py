"""What an engine tells others while it runs: one JSON document in a file, for `rorqual top` and whoever can read.

Whoever steps the engine calls `tick` after a step; the file is written anew at most every half second, in one piece.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rorqual.engine.published import VERSION, Document, process_start, user_folder
from rorqual.log import logger

if TYPE_CHECKING:
    from rorqual.engine.engine import Engine
    from rorqual.engine.stats import EngineStats

INTERVAL = 0.5
"""Seconds between two documents, at least."""
RECENT = 64
"""Steps in a document, at most."""

_taken: set[Path] = set()


class Monitor:
    """Publishes one engine's state; leaving it as a context, or `close`, removes the file.

    A file that cannot be written (a full disk, a folder of somebody else) is logged once and tried again; it never
    fails the engine.

    Args:
        engine: whose thread this is called from.
        folder: where to write; the user's own (`rorqual.engine.published`) if not given. It is made for its user alone.
        name: of the model, for people.
        interval: seconds between two documents, at least.
        clock: seconds, of that interval.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path | None = None,
        *,
        name: str = "",
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.name, self.interval = engine, name, interval
        self.pid, self.started = os.getpid(), time.time()
        self._process_start = process_start(self.pid)
        self._own_folder, self._clock = folder is None, clock
        self.path = _free_path(user_folder() if folder is None else folder, self.pid)
        self._last = -float("inf")
        self._failed = False
        self.publish()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tick(self) -> None:
        """Publish, if the last document is old enough."""
        if self._clock() - self._last >= self.interval:
            self.publish()

    def publish(self) -> None:
        """Publish now: before the engine pauses."""
        self._last = self._clock()
        try:
            self._write(json.dumps(self.document()))
        except OSError as error:
            if not self._failed:
                logger.warning("monitor: %s cannot be written (%s); going on without", self.path, error.strerror)
            self._failed = True

    def close(self) -> None:
        """Remove the file."""
        _taken.discard(self.path)
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def document(self) -> Document:
        """What is published. Seconds of `started` and `written` are those of the epoch, all others durations."""
        engine, model = self.engine, self.engine.model
        return {
            "version": VERSION,
            "pid": self.pid,
            "process_start": self._process_start,
            "started": self.started,
            "written": time.time(),
            "model": {
                "name": self.name,
                "layers": model.config.num_hidden_layers,
                "max_model_len": engine.max_model_len,
            },
            "runs": {
                "kernels": model.backend.ops().name,
                "numerics": model.numerics.name,
                "device": str(model.device),
                "prefill": engine.prefill,
                "replay": engine.replay,
                "speculative": engine.speculative,
            },
            "stats": to_json(engine.stats()),
            "requests": [request_json(engine, request) for request in engine.live],
        }

    def _write(self, text: str) -> None:
        folder, whole = self.path.parent, self.path.with_suffix(".tmp")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._own_folder and (folder.stat().st_uid != os.getuid() or folder.is_symlink()):
            # Its name can be guessed, and anybody may have made it among temporary files.
            raise PermissionError(0, "the folder is not ours")
        try:
            whole.write_text(text, encoding="utf-8")
            os.replace(whole, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                whole.unlink(missing_ok=True)
            raise


def to_json(stats: EngineStats, recent: int = RECENT) -> dict[str, Any]:
    """Stats as JSON takes them: fields by name, with the last `recent` steps alone."""
    return dataclasses.asdict(dataclasses.replace(stats, recent=stats.recent[-recent:] if recent else ()))


def request_json(engine: Engine, request: str) -> dict[str, Any]:
    """A live request: id, state, tokens, and seconds of its phases as far as they have ended."""
    output = engine.output(request)
    counts, times = output.counts, output.times
    return {
        "id": request,
        "state": engine.state(request),
        "completions": len(output.completions),
        "prompt": counts.prompt,
        "new": counts.new,
        "hit": counts.hit,
        "restored": counts.restored,
        "queue_seconds": times.queue,
        "prefill_seconds": times.prefill,
        "token_seconds": times.per_token(max(len(own.token_ids) for own in output.completions)),
    }


def _free_path(folder: Path, pid: int) -> Path:
    """`<pid>.json`; of a process's further engines `<pid>-2.json` and so on."""
    number, path = 1, folder / f"{pid}.json"
    while path in _taken:
        number += 1
        path = folder / f"{pid}-{number}.json"
    _taken.add(path)
    return path
