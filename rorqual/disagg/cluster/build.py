"""What a worker's process holds, by the cluster's config."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rorqual.disagg.cluster.config import ClusterConfig, WorkerSection
from rorqual.disagg.cluster.job import Facts
from rorqual.engine.engine import Engine
from rorqual.engine.identity import fingerprint
from rorqual.model.load import load


def engine_of(config: ClusterConfig, own: WorkerSection, name: str, master: str) -> Engine:
    """The engine of a decode worker."""
    model = load(
        config.model.path or None,
        numerics=config.model.numerics,
        kernels=config.model.kernels,
        device="cuda" if own.gpus else "cpu",
    )
    return Engine(
        model,
        memory=own.memory or None,
        slots=own.slots,
        replay=config.model.replay,
        max_model_len=config.model.max_model_len or None,
    )


def facts_of(engine: Engine, name: str, role: str, incarnation: str) -> Facts:
    config = engine.model.config
    return Facts(
        name=name,
        role=role,
        incarnation=incarnation,
        pid=os.getpid(),
        node=socket.gethostname(),
        config=config.fingerprint(),
        fingerprint=fingerprint(engine.model),
        page_tokens=engine.plan.page_tokens,
        window=config.sliding_window,
        slots=engine.kv.slots.slots,
        pages=engine.plan.pages,
        max_model_len=engine.max_model_len,
        drafts=engine.drafts,
        resident=resident_bytes(),
    )


def resident_bytes() -> int:
    """Of this process; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
