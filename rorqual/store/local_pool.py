"""A Mooncake store on this machine, for one machine or for tests: a master, and a process that lends it memory.

    this process --pipe--> `python -m rorqual.store.local_pool` (lends memory) --> mooncake_master

When this process ends, in whatever way, the pipe closes and the other ends; the system ends the master with it. So
nothing is left behind. Nothing is restarted either: whoever wants that starts another pool.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rorqual.errors import InputError
from rorqual.store import mooncake

ATTEMPTS = 5
"""A free port may be taken by somebody else before the master has it."""
FORGET_S = 10
START_S = 30.0
END_S = 10.0
PR_SET_PDEATHSIG = 1
_APART: dict[str, Any] = {
    "stdin": subprocess.PIPE,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.DEVNULL,  # Mooncake's own log
    "text": True,
    "start_new_session": True,  # Ctrl-C is for the owner, who ends it when its time has come
}
TRANSFER_BUFFER = 1 << 20
"""Of the lending process, which transfers nothing itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    master: str
    master_pid: int


class LocalPool:
    """Args:
        memory_bytes: that the store may hold.
        host: that master and memory are reached at.
        port: of the master; 0 for a free one.
        forget_s: after which the master gives up a machine that lends memory and is silent.

    Raises:
        InputError: Mooncake is not installed, or does not start.
    """

    def __init__(
        self, memory_bytes: int, *, host: str = mooncake.HOST, port: int = 0, forget_s: int = FORGET_S
    ) -> None:
        mooncake.master_binary()
        if memory_bytes < 1:
            raise InputError(f"Mooncake store: memory_bytes {memory_bytes} is not legal; legal: at least 1")
        command = [sys.executable, "-m", __name__, host, str(port), str(memory_bytes), str(forget_s)]
        self._process = subprocess.Popen(command, **_APART)
        try:
            started = self._started()
        except BaseException:
            self.close()
            raise
        self.master, self.master_pid, self.pid = started.master, started.master_pid, self._process.pid

    def alive(self) -> bool:
        """Whether both processes run."""
        return self._process.poll() is None

    def close(self) -> None:
        """End both processes; what the store holds is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _started(self) -> _Started:
        assert self._process.stdout is not None
        timer = threading.Timer(START_S, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise InputError(f"Mooncake store: it did not start within {START_S:g} s")
        found = json.loads(line)
        if "error" in found:
            raise InputError(f"Mooncake store: {found['error']}")
        return _Started(**found)


def lend(host: str, port: str, memory_bytes: str, forget_s: str) -> None:
    """The other process: a master, memory for it, and an end with either the master or the pipe."""
    try:
        master, address = _start_master(host, int(port), forget_s)
        client = mooncake.store_module().MooncakeDistributedStore()
        code = client.setup(host, mooncake.HANDSHAKE, int(memory_bytes), TRANSFER_BUFFER, "tcp", "", address)
        if code != 0:
            raise InputError(f"Mooncake refuses {memory_bytes} bytes of memory at {host} (code {code})")
    except Exception as error:  # whatever it is, the parent says it
        print(json.dumps({"error": str(error)}), flush=True)
        os._exit(1)
    print(json.dumps({"master": address, "master_pid": master.pid}), flush=True)
    # Mooncake takes seconds to let go of memory that ends with the process anyway: hence no ordinary exit.
    end = threading.Thread(target=_end_with, args=(master,), daemon=True)
    end.start()
    sys.stdin.read()
    master.kill()
    end.join()


def _start_master(host: str, port: int, forget_s: str) -> tuple[subprocess.Popen[bytes], str]:
    binary = mooncake.master_binary()
    for _ in range(ATTEMPTS):
        address = f"{host}:{port or _free_port(host)}"
        command = [
            str(binary),
            f"--rpc_address={host}",
            f"--rpc_port={address.rpartition(':')[2]}",
            f"--metrics_host={mooncake.HOST}",
            f"--metrics_port={_free_port(mooncake.HOST)}",
            "--enable_metric_reporting=false",
            f"--client_ttl={forget_s}",
        ]
        nowhere = subprocess.DEVNULL
        master = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, preexec_fn=_end_with_us)
        until = time.monotonic() + START_S / ATTEMPTS
        while master.poll() is None and time.monotonic() < until:
            if mooncake.answers(address, 1.0):
                return master, address
            time.sleep(0.02)
        master.kill()
        master.wait()
    raise InputError(f"no master could be started at {host}:{port or '(any port)'}")


def _end_with(master: subprocess.Popen[bytes]) -> None:
    master.wait()
    os._exit(0)


def _end_with_us() -> None:
    # The system minds the thread that started the master; here that is the main one, which lasts.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port(host: str) -> int:
    with socket.socket() as taken:
        taken.bind((host, 0))
        port: int = taken.getsockname()[1]
        return port


if __name__ == "__main__":
    lend(*sys.argv[1:])
