"""Verbs as processes: alone, and in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-c", "import sys; from rorqual.cli import main; sys.exit(main(sys.argv[1:]))"]
PATIENCE = 60.0
"""Seconds after which a process is taken to hang."""


class Terminal:
    """A process that believes to be in a terminal."""

    def __init__(self, arguments: list[str]) -> None:
        self.ours, theirs = pty.openpty()
        self.child = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm"},  # the gate's own may be one that cannot move its cursor
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_claim,
        )
        os.close(theirs)
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self.ours)

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def interrupt_at_prompt(self, pattern: str) -> str:
        """Ctrl-C until what it makes a prompt print is there.

        One that comes after the prompt is written and before Python waits for a key is noticed with the next key.
        """
        for _ in range(int(PATIENCE / 5)):
            self.type("\x03")
            end = time.monotonic() + 5
            while not re.search(pattern, self.seen, re.DOTALL) and time.monotonic() < end:
                self.seen += self._read(end)
            if re.search(pattern, self.seen, re.DOTALL):
                break
        return self.wait_for(pattern)

    def wait_for(self, pattern: str) -> str:
        """Read until it was printed; what was printed since the last call."""
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, self.seen, re.DOTALL):
            read = self._read(deadline)
            assert read, f"{pattern!r} never came; it printed {self.seen!r}"
            self.seen += read
        found, self.seen = self.seen, ""
        return found

    def end(self) -> int:
        """Its exit code, once it has nothing more to print."""
        deadline = time.monotonic() + PATIENCE
        while read := self._read(deadline):
            self.seen += read
        return self.child.wait(timeout=PATIENCE)

    def _read(self, deadline: float) -> str:
        """Nothing where the process has ended, or is too slow."""
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self.ours], [], [], left)[0]:
            return ""
        with suppress(OSError):
            return os.read(self.ours, 4096).decode(errors="replace")
        return ""


def _claim() -> None:
    """Make standard input the terminal that controls this session, so that Ctrl-C reaches it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
