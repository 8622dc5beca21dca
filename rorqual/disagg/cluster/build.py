"""What a worker's process holds, by the cluster's config."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rorqual.disagg.cluster.config import LOCAL, LOOPBACK, ClusterConfig, WorkerSection
from rorqual.disagg.cluster.copies import Copies
from rorqual.disagg.cluster.job import Facts
from rorqual.disagg.prefill import PrefillWorker
from rorqual.disagg.transport import Ticket, Transport
from rorqual.engine.engine import Engine
from rorqual.engine.identity import store_identity
from rorqual.engine.output import Counts
from rorqual.engine.stats import EngineStats, bytes_by_group
from rorqual.engine.storing import StoreOptions
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.planner.units import parse_bytes
from rorqual.store.interface import PageStore
from rorqual.store.opener import open_store

if TYPE_CHECKING:
    from rorqual.disagg.mooncake import MooncakeTransport


def engine_of(config: ClusterConfig, name: str, master: str) -> Engine:
    """The engine of a decode worker."""
    own = config.decode
    model = _model(config, own, "all")
    return Engine(
        model,
        store=_store(config, model, name, master),
        memory=own.memory or None,
        slots=own.slots,
        replay=config.model.replay,
        max_model_len=config.model.max_model_len or None,
    )


def prefill_worker_of(config: ClusterConfig, transport: Transport, name: str, master: str) -> PrefillWorker:
    """A prefill worker; without decoder weights where the hand-over needs none of them."""
    own = config.prefill
    model = _model(config, own, "all" if config.handover.mode == "rings" else "encoder")
    return PrefillWorker(
        model,
        transport,
        store=_store(config, model, name, master),
        memory=own.memory or None,
        slots=own.slots,
        replay=config.model.replay,
        hold_s=config.deadlines.handover,
    )


def _model(config: ClusterConfig, own: WorkerSection, part: str) -> Transformer:
    return load(
        config.model.path or None,
        numerics=config.model.numerics,
        kernels=config.model.kernels,
        device="cuda" if own.gpus else "cpu",
        part=part,
    )


def _store(config: ClusterConfig, model: Transformer, name: str, master: str) -> PageStore | None:
    """Of one worker; it ends with the process, which loses nothing that was written."""
    own = config.store
    ttl = own.ttl or None
    if own.kind == "memory":
        return StoreOptions(memory=own.memory, ttl=ttl).open(model)
    if own.kind == "disk":
        folder = Path(own.folder) / name
        return StoreOptions(folder=folder, memory=own.memory, disk=own.disk, ttl=ttl, fsync=own.fsync).open(model)
    if own.kind == "mooncake":
        from rorqual.store.remote import RemoteOptions, RemoteStore

        lent = 0 if own.master == LOCAL else parse_bytes(own.memory, "store.memory")
        options = RemoteOptions(
            master=master,
            host=host_of(config),
            memory_bytes=lent,
            protocol=config.handover.protocol,
            devices=config.handover.device,
        )
        identity = store_identity(model)
        return open_store(None, identity, remote=RemoteStore(identity, options))
    return None


def host_of(config: ClusterConfig) -> str:
    """Of this machine, as Ray and the other workers reach it."""
    if config.ray.address == LOCAL:
        return LOOPBACK
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The prefill side of a transport. answer: what a decode worker gets of an offer. release: nobody needs it more.
    kept: bytes that are under way.
    """

    transport: Transport
    answer: Callable[[Ticket], Any]
    release: Callable[[str], None]
    kept: Callable[[], int]


def sender_of(config: ClusterConfig) -> Sender:
    """Raises InputError where its transport is not installed."""
    credit = parse_bytes(config.handover.bytes, "handover.bytes")
    if config.handover.transport == "mooncake":
        carrier = _mooncake(config, credit)
        return Sender(
            transport=carrier,
            answer=lambda ticket: ticket,
            release=lambda run: None,  # the worker cancels what is left of it
            kept=lambda: carrier.offered_bytes,
        )
    copies = Copies(credit)
    return Sender(transport=copies, answer=copies.take, release=copies.release, kept=lambda: copies.out_bytes)


def receiver_of(config: ClusterConfig) -> Callable[[Any, float], Any]:
    """What makes the bytes of a parcel out of a sender's answer, in so many seconds."""
    if config.handover.transport == "ray":
        return lambda answer, seconds: answer
    # A receiver takes no parcel that its own credit would not hold.
    carrier = _mooncake(config, parse_bytes(config.handover.bytes, "handover.bytes"))

    def pulled(ticket: Ticket, seconds: float) -> Any:
        try:
            return carrier.pull(ticket, seconds)
        finally:
            carrier.done(ticket)

    return pulled


def _mooncake(config: ClusterConfig, credit: int) -> MooncakeTransport:
    from rorqual.disagg.mooncake import MooncakeTransport

    own = config.handover
    return MooncakeTransport(host=host_of(config), protocol=own.protocol, devices=own.device, credit_bytes=credit)


def facts_of(worker: Engine | PrefillWorker, name: str, role: str, slots: int, node: str) -> Facts:
    """Of a worker that is ready in this process."""
    config = worker.model.config
    return Facts(
        name=name,
        role=role,
        incarnation=uuid.uuid4().hex,
        pid=os.getpid(),
        node=node,
        config=config.fingerprint(),
        fingerprint=worker.fingerprint,
        page_tokens=worker.plan.page_tokens,
        window=config.sliding_window,
        slots=slots,
        pages=worker.plan.pages,
        max_model_len=worker.max_model_len if isinstance(worker, Engine) else config.max_position_embeddings,
        drafts=isinstance(worker, Engine) and worker.drafts,
        resident=resident_bytes(),
    )


def prefill_stats(worker: PrefillWorker) -> EngineStats:
    """Of a prefill worker, as far as an engine's statistics are also its own."""
    pages, slots = worker.kv.pages, worker.kv.slots
    return EngineStats(
        running=worker.scheduler.running,
        waiting=worker.scheduler.waiting,
        requests=0,
        finished=0,
        aborted=0,
        steps=0,
        preemptions=worker.scheduler.preemptions,
        evictions=pages.evictions,
        pages=pages.pages,
        pages_free=pages.free,
        pages_used=pages.used,
        pages_cached=pages.cached,
        page_bytes=worker.plan.page_bytes,
        page_tokens=worker.plan.page_tokens,
        slots=slots.slots,
        slots_free=slots.free,
        bytes_by_group=bytes_by_group(worker.cache),
        counts=Counts(),
        recent=(),
    )


def resident_bytes() -> int:
    """Of this process; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def end_process(error: BaseException) -> None:
    """Whoever supervises it starts a fresh one."""
    os._exit(1)
