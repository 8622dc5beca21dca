"""What a worker's process holds, by the cluster's config."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rorqual.disagg.cluster.config import ClusterConfig, WorkerSection
from rorqual.disagg.cluster.copies import Copies
from rorqual.disagg.cluster.job import Facts
from rorqual.disagg.prefill import PrefillWorker
from rorqual.disagg.transport import Ticket, Transport
from rorqual.engine.engine import Engine
from rorqual.engine.output import Counts
from rorqual.engine.stats import EngineStats, bytes_by_group
from rorqual.errors import InputError
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.planner.units import parse_bytes


def engine_of(config: ClusterConfig, name: str, master: str) -> Engine:
    """The engine of a decode worker."""
    own = config.decode
    return Engine(
        _model(config, own, "all"),
        memory=own.memory or None,
        slots=own.slots,
        replay=config.model.replay,
        max_model_len=config.model.max_model_len or None,
    )


def prefill_worker_of(config: ClusterConfig, transport: Transport) -> PrefillWorker:
    """A prefill worker; without decoder weights where the hand-over needs none of them."""
    own = config.prefill
    return PrefillWorker(
        _model(config, own, "all" if config.handover.mode == "rings" else "encoder"),
        transport,
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
    if config.handover.transport != "ray":
        raise InputError("cluster config: handover.transport: 'mooncake' is not built in; legal: ray")
    copies = Copies(parse_bytes(config.handover.bytes, "handover.bytes"))
    return Sender(transport=copies, answer=copies.take, release=copies.release, kept=lambda: copies.out_bytes)


def receiver_of(config: ClusterConfig) -> Callable[[Any, float], Any]:
    """What makes the bytes of a parcel out of a sender's answer, in so many seconds."""
    return lambda answer, seconds: answer


def facts_of(worker: Engine | PrefillWorker, name: str, role: str, slots: int) -> Facts:
    """Of a worker that is ready in this process."""
    config = worker.model.config
    return Facts(
        name=name,
        role=role,
        incarnation=uuid.uuid4().hex,
        pid=os.getpid(),
        node=socket.gethostname(),
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
