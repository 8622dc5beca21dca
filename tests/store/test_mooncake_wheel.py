"""What is asked of Mooncake before it is used: refused by name, also where it is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rorqual.errors import InputError
from rorqual.store import mooncake
from rorqual.store.remote import RemoteOptions

ABSENT = """
import sys
sys.modules["mooncake"] = None
from rorqual.errors import InputError
from rorqual.store.interface import StoreIdentity
from rorqual.store.local_pool import LocalPool
from rorqual.store.remote import RemoteOptions, RemoteStore
identity = StoreIdentity(fingerprint="m", page_tokens=4, page_bytes=8)
for attempt in (lambda: RemoteStore(identity, RemoteOptions(master="127.0.0.1:1")), lambda: LocalPool(1 << 20)):
    try:
        attempt()
    except InputError as error:
        print(error)
"""


def test_where_it_is_not_installed_that_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all("pip install 'rorqual[mooncake]'" in line and "libibverbs1" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "carrier"}, r"protocol 'carrier' is not legal; legal: tcp, rdma"),
        ({"memory_bytes": -1}, "memory_bytes -1 is not legal; legal: at least 0"),
        ({"buffer_bytes": 0}, "buffer_bytes 0 is not legal; legal: at least 1"),
        ({"deadline_s": 0.0}, r"deadline_s 0\.0 is not legal; legal: above 0"),
    ],
)
def test_an_illegal_option_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RemoteOptions(master="127.0.0.1:1", **options)  # type: ignore[arg-type]


def test_rdma_is_refused_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "DEVICES", tmp_path / "absent")
    with pytest.raises(InputError, match="the machine has no RDMA device; legal: tcp"):
        mooncake.check_protocol("rdma", "")
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(mooncake, "DEVICES", tmp_path)
    mooncake.check_protocol("rdma", "mlx5_0")
    with pytest.raises(InputError, match="device 'mlx5_9' is not legal; legal: mlx5_0"):
        mooncake.check_protocol("rdma", "mlx5_0,mlx5_9")
