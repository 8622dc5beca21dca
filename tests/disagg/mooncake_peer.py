"""The other end of Mooncake's transport, as a process: orders on standard input, one line of JSON back for each.

offer SEED NBYTES HOLD_S    settled    cancel    pull PLACE NBYTES TIMEOUT_S    done    integrity
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from rorqual.disagg.mooncake import MooncakeTransport
from rorqual.disagg.parcel import Header, Parcel
from rorqual.disagg.transport import Ticket
from rorqual.errors import HandoverError


@cache
def parcel_of(seed: int, nbytes: int) -> Parcel:
    """A parcel with about `nbytes` in two parts; another seed, other bytes all through."""
    header = Header(
        request=f"request {seed}",
        mode="replay",
        ids=tuple(range(seed, seed + 100)),
        fingerprint="model",
        page_tokens=128,
        first=0,
        write_floor=0,
        decoder_floor=0,
    )
    block = hashlib.shake_128(str(seed).encode()).digest(1 << 16)
    pages = (block * (nbytes // len(block) + 1))[:nbytes]
    return Parcel.of(
        header, {"pages": (memoryview(pages),), "tails": (memoryview(block[:100]), memoryview(block[7:77]))}
    )


class Peer:
    """The process, as its parent sees it. Ends with the block, in whatever way it is left."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, str(Path(__file__)), json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, *order: object) -> None:
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *order: object) -> Any:
        self.send(*order)
        return self.answer()

    def ticket(self, seed: int, nbytes: int, hold_s: float) -> Ticket:
        return Ticket(**self.ask("offer", seed, nbytes, hold_s))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def main() -> None:
    transport = MooncakeTransport(**json.loads(sys.argv[1]))
    tickets: list[Ticket] = []
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        print(json.dumps(_obey(transport, tickets, order, arguments)), flush=True)


def _obey(transport: MooncakeTransport, tickets: list[Ticket], order: str, arguments: list[Any]) -> Any:
    if order == "offer":
        seed, nbytes, hold_s = arguments
        ticket = transport.offer(parcel_of(seed, nbytes), hold_s)
        tickets += [ticket] if ticket else []
        return ticket and asdict(ticket)
    if order == "settled":
        return [[settled.ticket.request, settled.outcome] for settled in transport.settled()]
    if order == "cancel":
        return transport.cancel(tickets[-1])
    if order == "pull":
        tickets.append(Ticket(**arguments[0]))
        try:
            return Parcel.from_bytes(transport.pull(tickets[-1], arguments[1])).header.request
        except HandoverError as error:
            return str(error)
    if order == "done":
        return transport.done(tickets[-1])
    assert order == "integrity"
    return transport.check_integrity()


if __name__ == "__main__":
    main()
