"""What a benchmark ran on: the processor, the versions, the commit, and how busy the machine was with other things.

No host name and no path: a result may be published as it is.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import torch

USED_FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512vnni", "amx-bf16", "neon")
"""The CPU features that kernels choose their path by, and training its products."""

_ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, object]:
    """Facts about processor, memory and versions, ready for JSON."""
    import numba

    from rorqual.ops import cpu

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "kernel_threads": int(numba.get_num_threads()),
        "features": [name for name in USED_FEATURES if name in cpu.features()],
        "path": cpu.best_path(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


def cpu_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Physical memory, None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def commit() -> str:
    """The commit of the work tree this package lies in, `-dirty` when tracked files differ; else the version."""
    if _git("rev-parse", "--show-toplevel") == str(_ROOT):
        head = _git("rev-parse", "HEAD")
        if head:
            return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    return version()


def version() -> str:
    """The package's own."""
    try:
        return metadata.version("rorqual")
    except metadata.PackageNotFoundError:
        return "unknown"


def _git(*arguments: str) -> str:
    """Output of a git command that changes nothing, empty where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class OtherLoad:
    """How much of the processor others took since this was made: a share of all cores, None where unknown.

    Others are other processes and, on a virtual machine, what its host took away.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy, self._own = _busy_s(), _own_s()

    def share(self) -> float | None:
        busy, wall = _busy_s(), time.monotonic() - self._start
        if busy is None or self._busy is None or wall <= 0:
            return None
        others = (busy - self._busy) - (_own_s() - self._own)
        return max(0.0, others / (wall * (os.cpu_count() or 1)))


def _busy_s() -> float | None:
    """Seconds that all cores together were not idle since the start of the machine."""
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
    ticks = user + nice + system + irq + softirq + steal
    return ticks / float(os.sysconf("SC_CLK_TCK"))


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
