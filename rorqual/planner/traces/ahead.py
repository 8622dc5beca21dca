"""A trace read in a second process, batches ahead of the one that replays it: reading is a good half of the work.

The reader is `python -m rorqual.planner.traces.ahead FILE FORMAT PAGE_TOKENS RESIDENCE_US`. It writes messages to its
standard output, each a pickle behind its length: a batch of prompts and how many bytes have been read; last the
`Prompts` that they come from, or what an InputError says.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rorqual.errors import InputError
from rorqual.planner.traces.formats import TraceFormat, named, requests
from rorqual.planner.traces.prompts import Batch, Prompts
from rorqual.planner.traces.request import Progress

LENGTH_BYTES = 8
WORTH_IT_BYTES = 1 << 26
"""A smaller file is read before a second interpreter has started."""
ROOT = str(Path(__file__).resolve().parents[3])


def batches_of(
    path: str, trace_format: TraceFormat, prompts: Prompts, progress: Progress | None = None
) -> Iterator[Batch]:
    """The trace's batches of prompts; a large file is read in a second process where there is a second core.

    Source: the trace file.

    Args:
        prompts: a new one; it is complete once all batches have been taken.

    Raises:
        InputError: as `formats.requests`.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w") as file:
    ...     print("timestamp_s,input_tokens,output_tokens", "0,900,1", sep=chr(10), file=file, flush=True)
    ...     [batch.pages.tolist() for batch in batches_of(file.name, named("plain"), Prompts(0, 128, 10**6))]
    [[7]]
    """
    try:
        large = os.path.getsize(path) >= WORTH_IT_BYTES
    except OSError:
        large = False  # the reader will say why
    if large and (os.cpu_count() or 1) > 1:
        return batches_ahead(path, trace_format, prompts, progress)
    return prompts.batches(requests(path, trace_format, progress))


def batches_ahead(
    path: str, trace_format: TraceFormat, prompts: Prompts, progress: Progress | None = None
) -> Iterator[Batch]:
    """As `batches_of`, read in a second process, which ends when this iterator does. Source: the trace file.

    Raises:
        InputError: as `formats.requests`.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w") as file:
    ...     print("timestamp_s,input_tokens,output_tokens", "0,900,1", sep=chr(10), file=file, flush=True)
    ...     [batch.pages.tolist() for batch in batches_ahead(file.name, named("plain"), Prompts(0, 128, 10**6))]
    [[7]]
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    sizes = [str(prompts.page_tokens), str(prompts.sessions.residence_us)]
    command = [sys.executable, "-m", __name__, path, trace_format.name, *sizes]
    # A session of its own: an interrupt from the keyboard reaches us alone, and we end it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as reader:
        assert reader.stdout is not None
        try:
            while not isinstance(message := _received(reader.stdout), Prompts):
                batch, read, total = message
                yield batch
                if progress is not None:
                    progress(read, total)
            prompts.arrivals, prompts.sessions = message.arrivals, message.sessions
        finally:
            reader.kill()


def _received(pipe: IO[bytes]) -> tuple[Batch, int, int] | Prompts:
    """The next batch, or behind the last what they come from."""
    size = int.from_bytes(pipe.read(LENGTH_BYTES), "big")
    frame = pipe.read(size)
    if not size or len(frame) < size:
        raise InputError("the process that reads the trace has died")
    message: str | tuple[Batch, int, int] | Prompts = pickle.loads(frame)
    if isinstance(message, str):
        raise InputError(message)
    return message


def _send(pipe: IO[bytes], message: object) -> None:
    frame = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    pipe.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
    pipe.flush()


def _main() -> None:
    """Read the trace that the arguments name and send it, batch by batch."""
    path, name, page_tokens, residence_us = sys.argv[1:]
    trace_format = named(name)
    prompts = Prompts(trace_format.block_tokens, int(page_tokens), int(residence_us))
    gc.disable()  # requests have no cycles, and their millions would set the collector off all the time
    pipe, position = sys.stdout.buffer, (0, 0)

    def note(done: int, total: int) -> None:
        nonlocal position
        position = (done, total)

    try:
        for batch in prompts.batches(requests(path, trace_format, note)):
            _send(pipe, (batch, *position))
        _send(pipe, prompts)
    except InputError as error:
        _send(pipe, str(error))
    except BrokenPipeError:
        # Nobody wants the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())


if __name__ == "__main__":
    _main()
