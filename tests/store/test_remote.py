"""The remote tier against a real Mooncake master on loopback: what is put comes back, and nothing else ever does."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mooncake_here import needs_mooncake
from stopping import stop

from rorqual.errors import InputError
from rorqual.store.checksum import CHECK_BYTES, page_check
from rorqual.store.interface import StoreIdentity
from rorqual.store.local_pool import LocalPool
from rorqual.store.remote import RemoteOptions, RemoteStore

pytestmark = needs_mooncake

IDENTITY = StoreIdentity(fingerprint="model", page_tokens=128, page_bytes=113_920)
POOL_BYTES = 64 << 20
DEADLINE_S = 1.0
PATIENCE_S = 60.0
"""For what comes about at some time: a master that starts, a client that finds it again."""


def page(seed: int) -> bytes:
    return hashlib.shake_128(seed.to_bytes(4, "little")).digest(IDENTITY.page_bytes)


def key(seed: int, tenant: str = "") -> bytes:
    return hashlib.sha256(f"{tenant} {seed}".encode()).digest()


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(POOL_BYTES) as pool:
        yield pool


@pytest.fixture(scope="module")
def shared(pool: LocalPool) -> Iterator[RemoteStore]:
    store = RemoteStore(IDENTITY, RemoteOptions(master=pool.master, deadline_s=PATIENCE_S))
    yield store
    store.close()


@pytest.fixture
def store(shared: RemoteStore) -> Iterator[RemoteStore]:
    yield shared
    for seed in range(64):
        shared.delete(key(seed))


def test_what_is_put_comes_back_until_it_is_deleted(store: RemoteStore) -> None:
    before = store.stat()
    assert store.get(key(0)) is None
    assert (
        store.put(key(0), page(0)) and store.put(key(1), memoryview(page(1))) and store.put(key(2), bytearray(page(2)))
    )
    assert store.put(key(0), page(0)), "it is there already"
    assert [store.get(key(seed)) for seed in range(3)] == [page(seed) for seed in range(3)]
    assert store.delete(key(1)) and not store.delete(key(1))
    assert store.get(key(1)) is None
    after = store.stat()
    assert (after.puts - before.puts, after.gets - before.gets, after.hits - before.hits) == (4, 5, 3)
    assert (after.dropped, after.damaged) == (before.dropped, before.damaged)


def test_match_counts_the_leading_pages(store: RemoteStore) -> None:
    for seed in (0, 1, 2, 4):
        store.put(key(seed), page(seed))
    assert store.match([key(seed) for seed in range(5)]) == 3
    assert store.match([key(4)]) == 1
    assert store.match([key(3), key(4)]) == 0
    assert store.match([]) == 0


def test_another_process_finds_it(store: RemoteStore, pool: LocalPool) -> None:
    store.put(key(0), page(0))
    script = (
        "import sys, hashlib\n"
        "from rorqual.store.interface import StoreIdentity\n"
        "from rorqual.store.remote import RemoteOptions, RemoteStore\n"
        f"store = RemoteStore({IDENTITY!r}, RemoteOptions(master={pool.master!r}, deadline_s={PATIENCE_S}))\n"
        f"print(hashlib.sha256(store.get({key(0)!r})).hexdigest())\n"
        f"print(store.put({key(1)!r}, bytes({IDENTITY.page_bytes})))\n"
        "store.close()\n"
        "print([name for name in ('torch', 'numba') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split("\n") == [hashlib.sha256(page(0)).hexdigest(), "True", "[]", ""], done.stderr
    assert store.get(key(1)) == bytes(IDENTITY.page_bytes)


@pytest.mark.parametrize("change", [{"fingerprint": "other"}, {"page_tokens": 256}, {"page_bytes": 113_921}])
def test_another_identity_sees_nothing(change: dict[str, object], store: RemoteStore, pool: LocalPool) -> None:
    store.put(key(0), page(0))
    other = RemoteStore(replace(IDENTITY, **change), RemoteOptions(master=pool.master, deadline_s=PATIENCE_S))
    assert other.match([key(0)]) == 0 and other.get(key(0)) is None
    own = bytes(other.identity.page_bytes)
    assert other.put(key(0), own) and other.get(key(0)) == own
    assert store.get(key(0)) == page(0)
    assert other.delete(key(0)) and store.match([key(0)]) == 1
    other.close()


def blob_of(store: RemoteStore, seed: int) -> bytes:
    return page(seed) + page_check(store._name(key(seed)).encode(), page(seed))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "first bit": lambda blob: bytes([blob[0] ^ 1]) + blob[1:],
    "middle bit": lambda blob: blob[:50_000] + bytes([blob[50_000] ^ 128]) + blob[50_001:],
    "last bit of the check": lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]),
    "cut off": lambda blob: blob[:-1],
    "only a check": lambda blob: blob[-CHECK_BYTES:],
    "one byte": lambda blob: blob[:1],
    "longer": lambda blob: blob + b"\0",
    "zeros": lambda blob: bytes(len(blob)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_wrong_bytes_are_never_served_and_make_room_for_right_ones(damage: str, store: RemoteStore) -> None:
    before = store.stat().damaged
    assert store._client.put(store._name(key(0)), DAMAGE[damage](blob_of(store, 0))) == 0
    assert store.get(key(0)) is None
    assert store.stat().damaged == before + 1
    assert store.match([key(0)]) == 0
    assert store.put(key(0), page(0)) and store.get(key(0)) == page(0)


def test_a_right_page_under_a_wrong_name_is_not_served(store: RemoteStore) -> None:
    assert store._client.put(store._name(key(0)), blob_of(store, 1)) == 0
    assert store.get(key(0)) is None
    assert store._client.put(store._name(key(1)), blob_of(store, 1)) == 0
    assert store.get(key(1)) == page(1), "the same blob is right where it belongs"


def test_more_than_it_holds_is_dropped_or_evicts_and_nothing_else(pool: LocalPool, store: RemoteStore) -> None:
    count, kinds = 2 * POOL_BYTES // IDENTITY.page_bytes, 7
    before = store.stat()
    pages = [page(seed) for seed in range(kinds)]
    kept = [store.put(key(seed, "many"), pages[seed % kinds]) for seed in range(count)]
    found = [store.get(key(seed, "many")) for seed in range(count)]
    lost = [got is None for got in found]
    assert all(got in (None, pages[seed % kinds]) for seed, got in enumerate(found))
    assert count // 4 < sum(lost) < count
    assert all(gone for gone, took in zip(lost, kept, strict=True) if not took)
    after = store.stat()
    assert (after.dropped - before.dropped, after.damaged) == (kept.count(False), before.damaged)
    store._client.remove_all(True)
    assert store.put(key(0), page(0)) and store.get(key(0)) == page(0)


def test_a_closed_store_finds_and_keeps_nothing(pool: LocalPool) -> None:
    store = RemoteStore(IDENTITY, RemoteOptions(master=pool.master, deadline_s=PATIENCE_S))
    assert store.put(key(60), page(60))
    store.flush()
    store.close()
    store.close()
    assert store.get(key(60)) is None and store.match([key(60)]) == 0
    assert not store.put(key(61), page(61)) and not store.delete(key(60))


def test_the_master_dies_and_comes_back() -> None:
    with LocalPool(POOL_BYTES) as first:
        store = RemoteStore(
            IDENTITY, RemoteOptions(master=first.master, memory_bytes=POOL_BYTES, deadline_s=DEADLINE_S)
        )
        assert eventually(lambda: store.put(key(0), page(0)) and store.get(key(0)) == page(0))
        os.kill(first.master_pid, signal.SIGKILL)
        assert eventually(lambda: not first.alive()), "the process beside it ends with it"
    begun = time.monotonic()
    for _ in range(500):
        assert store.get(key(0)) is None and store.match([key(0)]) == 0 and not store.put(key(1), page(1))
    # Mooncake tries for seconds in every call; one caller waits for the deadline, the others not at all.
    assert time.monotonic() - begun < PATIENCE_S
    port = int(first.master.rpartition(":")[2])
    with LocalPool(POOL_BYTES, port=port):
        assert eventually(lambda: store.put(key(2), page(2)) and store.get(key(2)) == page(2))
        assert store.get(key(0)) is None, "the new master knows of nothing"
        store.close()


def test_a_master_that_hangs_costs_a_deadline_and_is_found_again(caplog: pytest.LogCaptureFixture) -> None:
    with LocalPool(POOL_BYTES) as pool, caplog.at_level(logging.INFO, "rorqual"):
        store = RemoteStore(IDENTITY, RemoteOptions(master=pool.master, deadline_s=DEADLINE_S))
        assert eventually(lambda: store.put(key(0), page(0)))
        stop(pool.master_pid)
        begun = time.monotonic()
        for _ in range(1000):
            assert store.get(key(0)) is None and store.match([key(0)]) == 0
        # Mooncake itself would have waited 30 s in every single call.
        assert time.monotonic() - begun < PATIENCE_S
        os.kill(pool.master_pid, signal.SIGCONT)
        assert eventually(lambda: store.get(key(0)) == page(0))
        store.close()
    text = [record.getMessage() for record in caplog.records if record.name == "rorqual"]
    assert any("no answer by way of" in line for line in text) and "answers again" in text[-1]


HOLDER = """
import sys, time
from rorqual.store.interface import StoreIdentity
from rorqual.store.remote import RemoteOptions, RemoteStore
store = RemoteStore({identity!r}, RemoteOptions(master={master!r}, memory_bytes={memory}, deadline_s=60))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_machine_that_dies_takes_its_pages_and_nobody_else(pool: LocalPool) -> None:
    """Two lend memory; after one is gone, every page is either right or not there, and puts find a place again."""
    with LocalPool(POOL_BYTES, forget_s=2) as own:
        script = HOLDER.format(identity=IDENTITY, master=own.master, memory=POOL_BYTES)
        holder = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
            store = RemoteStore(IDENTITY, RemoteOptions(master=own.master, deadline_s=PATIENCE_S))
            put = [seed for seed in range(60) if store.put(key(seed), page(seed))]
            assert [store.get(key(seed)) for seed in put] == [page(seed) for seed in put]
            holder.kill()
            holder.wait()
            found = [store.get(key(seed)) for seed in put]
            assert all(got in (None, page(seed)) for seed, got in zip(put, found, strict=True))
            assert None in found and any(found), "both machines held some"
            assert eventually(lambda: all(store.put(key(seed, "new"), page(seed)) for seed in range(3)))
            assert store.get(key(0, "new")) == page(0)
            store.close()
        finally:
            holder.kill()
            holder.communicate()


@pytest.mark.parametrize("closed", [False, pytest.param(True, marks=pytest.mark.full)], ids=["open", "closed"])
def test_a_process_ends_in_order_though_the_master_hangs(closed: bool) -> None:
    with LocalPool(POOL_BYTES) as pool:
        script = (
            "import sys\n"
            "from rorqual.store.interface import StoreIdentity\n"
            "from rorqual.store.remote import RemoteOptions, RemoteStore\n"
            f"store = RemoteStore({IDENTITY!r}, RemoteOptions(master={pool.master!r}, deadline_s=0.2))\n"
            "print('ready', flush=True)\n"
            "sys.stdin.readline()\n"
            f"print(store.get({key(0)!r}))\n" + "store.close()\n" * closed
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", script], **pipes)  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "ready\n"
            stop(pool.master_pid)
            told, complained = process.communicate("go\n", timeout=PATIENCE_S)
        finally:
            process.kill()
            os.kill(pool.master_pid, signal.SIGCONT)
        assert (told, process.returncode) == ("None\n", 0), complained


def test_no_process_is_left_when_the_owner_of_a_pool_is_killed() -> None:
    script = (
        "import sys\n"
        "from rorqual.store.local_pool import LocalPool\n"
        f"pool = LocalPool({POOL_BYTES})\n"
        "print(pool.pid, pool.master_pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2 and all(runs(pid) for pid in pids)
    owner.kill()
    owner.communicate()
    assert eventually(lambda: not any(runs(pid) for pid in pids))


def runs(pid: int) -> bool:
    """A process that has ended may stay in the table until somebody asks for its status."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(") ")[2][0] != "Z"


def test_somebody_else_at_the_address_is_found_out_within_a_bound() -> None:
    """A port that is open and says nothing."""
    script = (
        "import socket\n"
        "from rorqual.errors import InputError\n"
        "from rorqual.store import remote\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "master = '127.0.0.1:%d' % listener.getsockname()[1]\n"
        "try:\n"
        f"    remote.RemoteStore(remote.{IDENTITY!r}, remote.RemoteOptions(master=master))\n"
        "except InputError as error:\n"
        "    print(str(error).replace(master, 'there'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "remote store: no part to take by master there as host 127.0.0.1 (code -1)\n", done.stderr
    assert done.returncode == 0


def test_what_cannot_be_had_is_refused_by_name(pool: LocalPool) -> None:
    with pytest.raises(InputError, match=r"no Mooncake master answers at 127\.0\.0\.1:1$"):
        RemoteStore(IDENTITY, RemoteOptions(master="127.0.0.1:1"))
    with pytest.raises(InputError, match="'nowhere' is not legal; legal: host:port"):
        RemoteStore(IDENTITY, RemoteOptions(master="nowhere"))
    with pytest.raises(InputError, match="buffer_bytes 1000 hold no page of 113920"):
        RemoteStore(IDENTITY, RemoteOptions(master=pool.master, buffer_bytes=1000))
    with pytest.raises(InputError, match="memory_bytes 0 is not legal"):
        LocalPool(0)
