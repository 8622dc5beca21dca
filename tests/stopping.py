"""Stopping a process for certain: SIGSTOP is delivered at some time, and to one thread after another."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stop(pid: int) -> None:
    """Every thread of it stands still when this returns."""
    os.kill(pid, signal.SIGSTOP)
    while any(state not in "TZX" for state in _states(pid)):
        time.sleep(0.005)


def _states(pid: int) -> list[str]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.append((task / "stat").read_text(encoding="ascii").rpartition(") ")[2][0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
