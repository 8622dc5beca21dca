"""Prefill and decode workers as processes of their own, to be killed: a forge loads the model once and forks them.

A worker takes an order a line, in JSON, and answers with a line:

    prefill   offer NAME IDS -> ticket    submit NAME IDS    step -> states by name
    decode    pull TICKET    done TICKET    receive IDS    step -> tokens so far
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rorqual.disagg.transport import Ticket

CASE = "fp32-dspark"
PATIENCE_S = 120.0


class Worker:
    """One of them, as the test sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rw", encoding="utf-8")
        self.pid = int(self._lines.readline())

    def send(self, *order: object) -> None:
        print(json.dumps(order), file=self._lines, flush=True)

    def answer(self) -> Any:
        return json.loads(self._lines.readline())

    def ask(self, *order: object) -> Any:
        self.send(*order)
        return self.answer()

    def stop(self) -> None:
        from stopping import stop

        stop(self.pid)

    def kill(self) -> None:
        """By SIGKILL; it is gone when this returns."""
        os.kill(self.pid, signal.SIGKILL)
        try:
            while self._lines.readline():
                pass
        except ConnectionResetError:
            pass

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()


class Forge:
    """The process that forks workers; ends, and they with it, with its block."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "forge")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(PATIENCE_S)
        self._listener.bind(path)
        self._listener.listen()
        self._workers: list[Worker] = []
        self._process = subprocess.Popen([sys.executable, __file__, path], stdin=subprocess.PIPE, text=True)

    def worker(self, role: str, **options: object) -> Worker:
        assert self._process.stdin is not None
        print(json.dumps([role, options]), file=self._process.stdin, flush=True)
        connection, _ = self._listener.accept()
        connection.settimeout(PATIENCE_S)
        self._workers.append(Worker(connection))
        return self._workers[-1]

    def __enter__(self) -> Forge:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()
        self._process.communicate()
        self._listener.close()


def main(path: str) -> None:
    tests = Path(__file__).parents[1]
    sys.path += [str(tests), str(tests / "engine")]
    from models import golden
    from splits import encoder_of

    # Loaded, not run: a fork may not come after Numba's or OpenMP's threads.
    models = {"prefill": encoder_of(CASE), "decode": golden(CASE, "fast")}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        role, options = json.loads(line)
        if os.fork() == 0:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            lines = connection.makefile("rw", encoding="utf-8")
            worker = {"prefill": _Prefill, "decode": _Decode}[role](models[role], **options)
            print(os.getpid(), file=lines, flush=True)
            for order in lines:
                name, *arguments = json.loads(order)
                print(json.dumps(getattr(worker, name)(*arguments)), file=lines, flush=True)
            os._exit(0)


class _Prefill:
    def __init__(self, model: Any, *, credit_parcels: int = 8, slots: int = 4) -> None:
        from splits import CHUNK

        from rorqual.disagg.mooncake import MooncakeTransport
        from rorqual.disagg.prefill import PrefillWorker

        transport = MooncakeTransport(credit_parcels=credit_parcels)
        self.worker = PrefillWorker(model, transport, pages=64, slots=slots, chunk_tokens=CHUNK, hold_s=PATIENCE_S)

    def submit(self, name: str, ids: list[int]) -> None:
        self.worker.submit(ids, request=name)

    def step(self) -> dict[str, str]:
        self.worker.step()
        return {name: self.worker.state(name) for name in self.worker.live}

    def offer(self, name: str, ids: list[int]) -> dict[str, Any]:
        self.submit(name, ids)
        while True:
            for offer in self.worker.step():
                assert offer.ticket is not None, offer.error
                return asdict(offer.ticket)


class _Decode:
    def __init__(self, model: Any) -> None:
        from engines import engine_of
        from splits import CHUNK

        from rorqual.disagg.decode import DecodeWorker
        from rorqual.disagg.mooncake import MooncakeTransport

        self.transport = MooncakeTransport()
        self.engine = engine_of(model, chunk_tokens=CHUNK)
        self.worker = DecodeWorker(self.engine)
        self.data: Any = None
        self.name = ""

    def pull(self, ticket: dict[str, Any]) -> int:
        self.data = self.transport.pull(Ticket(**ticket), PATIENCE_S)
        return len(self.data)

    def done(self, ticket: dict[str, Any]) -> None:
        self.transport.done(Ticket(**ticket))

    def receive(self, ids: list[int]) -> None:
        from engines import asked

        self.name = self.worker.receive(self.data, asked(8), prompt=ids)

    def step(self) -> list[int]:
        output = self.engine.output(self.name)
        self.engine.step()
        return output.token_ids


if __name__ == "__main__":
    main(sys.argv[1])
