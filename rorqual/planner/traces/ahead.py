"""A trace read in a second process, batches ahead of the one that replays it: parsing is half of the work.

The reader is `python -m rorqual.planner.traces.ahead FILE FORMAT`. It writes batches to its standard output, each a
pickle behind its length: a list of requests and how many bytes have been read, or the message of an InputError.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from rorqual.errors import InputError
from rorqual.planner.traces.formats import TraceFormat, named, requests
from rorqual.planner.traces.request import Progress, Request

BATCH = 512
LENGTH_BYTES = 8
WORTH_IT_BYTES = 1 << 26
"""A smaller file is read before a second interpreter has started."""
ROOT = str(Path(__file__).resolve().parents[3])


def requests_of(path: str, trace_format: TraceFormat, progress: Progress | None = None) -> Iterator[Request]:
    """As `formats.requests`; a large file is read in a second process where there is a second core.

    Source: the trace file.

    Raises:
        InputError: as `formats.requests`.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w") as file:
    ...     print("timestamp_s,input_tokens,output_tokens", "0,9,1", sep=chr(10), file=file, flush=True)
    ...     [request.input_tokens for request in requests_of(file.name, named("plain"))]
    [9]
    """
    try:
        large = os.path.getsize(path) >= WORTH_IT_BYTES
    except OSError:
        large = False  # the reader will say why
    if large and (os.cpu_count() or 1) > 1:
        return requests_ahead(path, trace_format, progress)
    return requests(path, trace_format, progress)


def requests_ahead(path: str, trace_format: TraceFormat, progress: Progress | None = None) -> Iterator[Request]:
    """As `formats.requests`, read in a second process, which ends when this iterator does. Source: the trace file.

    Raises:
        InputError: as `formats.requests`.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w") as file:
    ...     print("timestamp_s,input_tokens,output_tokens", "0,9,1", sep=chr(10), file=file, flush=True)
    ...     [request.input_tokens for request in requests_ahead(file.name, named("plain"))]
    [9]
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", __name__, path, trace_format.name]
    # A session of its own: an interrupt from the keyboard reaches us alone, and we end it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as reader:
        assert reader.stdout is not None
        try:
            while (batch := _received(reader.stdout)) is not None:
                found, read, total = batch
                yield from found
                if progress is not None:
                    progress(read, total)
        finally:
            reader.kill()


def _received(pipe: IO[bytes]) -> tuple[list[Request], int, int] | None:
    """The next batch, None behind the last."""
    size = int.from_bytes(pipe.read(LENGTH_BYTES), "big")
    frame = pipe.read(size)
    if not size or len(frame) < size:
        raise InputError("the process that reads the trace has died")
    message: str | tuple[list[Request], int, int] | None = pickle.loads(frame)
    if isinstance(message, str):
        raise InputError(message)
    return message


def _send(pipe: IO[bytes], message: object) -> None:
    frame = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    pipe.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
    pipe.flush()


def _main() -> None:
    """Read the trace that the arguments name and send it, batch by batch."""
    path, name = sys.argv[1:]
    gc.disable()  # requests have no cycles, and their millions would set the collector off all the time
    pipe, position = sys.stdout.buffer, (0, 0)

    def note(done: int, total: int) -> None:
        nonlocal position
        position = (done, total)

    try:
        stream = requests(path, named(name), note)
        while batch := list(islice(stream, BATCH)):
            _send(pipe, (batch, *position))
        _send(pipe, None)
    except InputError as error:
        _send(pipe, str(error))
    except BrokenPipeError:
        # Nobody wants the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())


if __name__ == "__main__":
    _main()
