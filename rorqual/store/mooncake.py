"""Mooncake's wheel, as far as the store and the transport share it: found or refused by name, and what it runs over.

Mooncake listens on every interface of the machine, whatever host it is given, and asks nobody who they are: its ports
belong on a network that only the cluster is on. It moves bytes over TCP, or over RDMA where the machine has devices.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from rorqual.errors import InputError

PROTOCOLS = ("tcp", "rdma")
HOST = "127.0.0.1"
HANDSHAKE = "P2PHANDSHAKE"
"""Peers tell each other what they hold; no metadata server is run."""
DEVICES = Path("/sys/class/infiniband")

ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "10",
    "MC_TCP_STATUS_TIMEOUT_SEC": "10",
    "MC_TRANSFER_TIMEOUT": "3600",
}
"""What Mooncake reads, where nothing is set. It writes to standard error past any logger of Python's. What hangs, of a
call or a transfer, ends in seconds rather than half a minute; a first call holds the interpreter meanwhile. Yet a
transfer is not to be given up as too long: bytes that still come would go into memory that is not its own any more."""


def store_module() -> Any:
    """`mooncake.store`. Raises InputError where it cannot be had."""
    _prepare()
    try:
        import mooncake.store
    except ImportError as error:
        raise _missing(error) from error
    return mooncake.store


def engine_module() -> Any:
    """`mooncake.engine`. Raises InputError where it cannot be had."""
    _prepare()
    try:
        import mooncake.engine
    except ImportError as error:
        raise _missing(error) from error
    return mooncake.engine


def master_binary() -> Path:
    """The wheel's master. Raises InputError where it cannot be had."""
    path = Path(store_module().__file__).parent / "mooncake_master"
    if not path.is_file():
        raise InputError(f"mooncake: its wheel has no {path.name}")
    return path


def check_protocol(protocol: str, devices: str) -> None:
    """Refuse what Mooncake would replace in silence by something else.

    Raises:
        InputError: no protocol of ours, RDMA without a device, or a device that is not there.
    """
    if protocol not in PROTOCOLS:
        raise InputError(f"mooncake: protocol {protocol!r} is not legal; legal: {', '.join(PROTOCOLS)}")
    if protocol == "tcp":
        return
    there = sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []
    if not there:
        raise InputError("mooncake: protocol 'rdma' is not legal here: the machine has no RDMA device; legal: tcp")
    for device in filter(None, devices.split(",")):
        if device not in there:
            raise InputError(f"mooncake: device {device!r} is not legal; legal: {', '.join(there)}")


def answers(address: str, timeout_s: float) -> bool:
    """Whether somebody listens at host:port.

    Raises:
        InputError: that is no host:port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"mooncake: master {address!r} is not legal; legal: host:port")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _prepare() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _missing(error: ImportError) -> InputError:
    return InputError(
        f"mooncake: it cannot be loaded ({error}); it takes `pip install 'rorqual[mooncake]'`, Linux, and the system's "
        "libibverbs (Debian's package libibverbs1)"
    )
