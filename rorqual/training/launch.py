"""Several processes on this machine, each with its share of the cores: `rorqual train --processes N`.

On a CPU two processes of one thread each beat one of two threads (1.2 x on two cores for the demo's recipe, LOG.md): a
small model's steps are many small operations, and each would wait for its slowest thread. `torchrun` does the same
for more machines than one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from rorqual.errors import InputError
from rorqual.training.interrupt import stopping_signals

POLL_S = 0.2
"""Between looks at the processes."""
GRACE_S = 60.0
"""What the others get to end by themselves when one has failed; they wait for it in a collective."""
_START = "import sys; from rorqual.cli.app import main; sys.exit(main())"


def inside_a_group() -> bool:
    """Whether this process was started as one of several already."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_processes(argv: Sequence[str], count: int) -> int:
    """Run `rorqual ARGV` in `count` processes of one group; the first exit code that is not 0, or 0.

    What asks to stop (`stopping_signals`) is handed on to all of them.

    Raises:
        InputError: count is not in 1..cores (2 may share one).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 1 <= count <= max(cores, 2):
        raise InputError(f"processes: {count} is not legal; legal: 1..{max(cores, 2)}")
    threads = str(max(1, cores // count))
    shared = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
    }
    started: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        for process in started:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in stopping_signals()}
    try:
        for rank in range(count):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", _START, *argv],
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    # A group of their own: a Ctrl-C would reach them twice, from the terminal and from here.
                    start_new_session=True,
                )
            )
            if asked:
                started[-1].send_signal(asked[-1])
        return _wait(started)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int:
    failed, since = 0, 0.0
    while any(process.poll() is None for process in started):
        codes = [process.returncode for process in started if process.returncode]
        if codes and not failed:
            failed, since = codes[0], time.monotonic()
        if failed and time.monotonic() - since > GRACE_S:
            for process in started:
                process.kill()
        time.sleep(POLL_S)
    codes = [process.returncode for process in started if process.returncode]
    code = failed or (codes[0] if codes else 0)
    return code if code >= 0 else 128 - code


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
