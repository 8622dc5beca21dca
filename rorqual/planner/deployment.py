"""A model on devices: everything that decides a rank's memory plan, and what lies on host and disk beside it.

A pool of KV beyond the device, a prefill/decode split, and offloading take host memory and disk only: a page that comes
in is received into a page of the device's own pool. The device's bytes are the same with and without (field case 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rorqual.config import ModelConfig
from rorqual.errors import CapacityError, InputError
from rorqual.layout import PAGE_TOKENS, KVLayout
from rorqual.planner.capacity import MemoryPlan, plan_memory
from rorqual.planner.devices import Device
from rorqual.planner.mix import Mix
from rorqual.planner.parallel import Ranks, arrange, rank_bytes
from rorqual.planner.placement import Home, Placement, home, placed, weight_bytes
from rorqual.planner.storage import RowFormat, page_bytes, row_format
from rorqual.planner.units import decimal_bytes
from rorqual.planner.workspace import CHUNK_TOKENS, SAMPLED_ROWS, workspace_bytes

UTILISATION = Fraction(9, 10)
STAGING_COPIES = 2  # one chunk's pages being filled while another's are sent
MAX_HOSTS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Outside:
    """Bytes on one host's memory or on disk. meaning: how they come about."""

    name: str
    home: Home
    nbytes: int
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """Made by `deploy`. layout: of the config as placed. rows: how the cache is stored. hosts: that share the ranks.

    pool_host, pool_disk: bytes of the KV pool's tiers a host. split: prefill and decode on different devices.
    """

    layout: KVLayout
    device: Device
    ranks: Ranks
    placement: Placement
    rows: RowFormat
    utilisation: Fraction
    chunk_tokens: int
    sampled_rows: int
    hosts: int
    pool_host: int
    pool_disk: int
    split: bool

    @property
    def budget(self) -> int:
        """Bytes of a device that may be used."""
        assert self.device.memory is not None
        return int(self.device.memory * self.utilisation)

    @property
    def weights(self) -> dict[str, int]:
        """Bytes of weights on the fullest rank, by part."""
        return rank_bytes(self.layout.config, self.ranks, self.placement)

    @property
    def workspace(self) -> int:
        """Bytes that a step needs on a rank."""
        return workspace_bytes(self.layout.config, self.chunk_tokens, sampled_rows=self.sampled_rows, tp=self.ranks.tp)


def deploy(
    config: ModelConfig,
    device: Device,
    *,
    count: int = 1,
    tp: int | None = None,
    dp_attention: int | None = None,
    ep: int | None = None,
    placement: Placement | None = None,
    storage: str = "packed",
    page_tokens: int = PAGE_TOKENS,
    utilisation: Fraction = UTILISATION,
    chunk_tokens: int = CHUNK_TOKENS,
    sampled_rows: int = SAMPLED_ROWS,
    hosts: int = 1,
    pool_host: int = 0,
    pool_disk: int = 0,
    split: bool = False,
) -> Deployment:
    """Put a model on devices. Nothing is checked against their size yet: `plan` does.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.devices import find_device
    >>> eight = deploy(presets.load("v4.1-flash"), find_device("h200"), count=8)
    >>> eight.budget, sum(eight.weights.values()), eight.workspace
    (126900000000, 73875128208, 2378170368)

    Unit: bytes. Source: 0.9 x 141 GB; `parallel.rank_bytes`; `workspace.workspace_bytes`.
    Raises InputError for a setting that cannot be honoured, ConfigError for a page that the model cannot have.
    """
    if not 0 < utilisation <= 1:
        raise InputError(f"--utilisation must be above 0 and at most 1; got {float(utilisation):g}")
    if not 1 <= hosts <= MAX_HOSTS or count % hosts:
        raise InputError(f"--hosts must be a divisor of --count ({count}); got {hosts}")
    placement = placement or Placement()
    _refuse_unified(device, placement, pool_host)
    loaded = placed(config, placement)
    layout = KVLayout(loaded, page_tokens=page_tokens)
    return Deployment(
        layout=layout,
        device=device,
        ranks=arrange(loaded, count, tp=tp, dp_attention=dp_attention, ep=ep),
        placement=placement,
        rows=row_format(layout, storage),
        utilisation=utilisation,
        chunk_tokens=chunk_tokens,
        sampled_rows=sampled_rows,
        hosts=hosts,
        pool_host=pool_host,
        pool_disk=pool_disk,
        split=split,
    )


def outside(deployment: Deployment) -> tuple[Outside, ...]:
    """What a host's memory and the disk must hold; empty entries are left out.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.devices import find_device
    >>> release = presets.load("v4.1-flash")
    >>> eight = deploy(release, find_device("h200"), count=8, placement=Placement(engram="host"), split=True)
    >>> [(item.name, item.home, item.nbytes) for item in outside(eight)]
    [('Engram tables', 'host', 202758032400), ('staging', 'host', 116654080), ('checkpoint', 'disk', 510286023000)]

    Unit: bytes a host; disk counts one copy. Source: `placement.weight_bytes`; 2 x 64 pages x 113,920 x 8 ranks.
    """
    layout, weights = deployment.layout, weight_bytes(deployment.layout.config)
    where = home("engram_tables", deployment.placement)
    tables = weights.get("engram_tables", 0)
    page = page_bytes(layout, deployment.rows)
    moving = deployment.split or deployment.pool_host or deployment.pool_disk
    ranks = deployment.ranks.count // deployment.hosts
    staging = STAGING_COPIES * layout.pages(deployment.chunk_tokens) * page * ranks if moving else 0
    inside = ", the Engram tables' rows read from it in place" if where == "disk" and tables else ""
    chunk = f"a chunk of {deployment.chunk_tokens:,} tokens"
    pool_host, pool_disk = deployment.pool_host, deployment.pool_disk
    items: tuple[tuple[str, Home, int, str], ...] = (
        (
            "Engram tables",
            "host",
            tables if where == "host" else 0,
            "one copy that all ranks of a host share",
        ),
        ("KV pool", "host", pool_host, _pool_text(pool_host, page)),
        ("staging", "host", staging, f"{STAGING_COPIES} x the pages of {chunk}, each rank; estimate"),
        ("checkpoint", "disk", sum(weights.values()), f"the parts loaded{inside}"),
        ("KV pool", "disk", pool_disk, _pool_text(pool_disk, page)),
    )
    return tuple(
        Outside(name=name, home=lives, nbytes=count, meaning=meaning) for name, lives, count, meaning in items if count
    )


def plan(deployment: Deployment, mix: Mix | None, sessions: int | None = None) -> MemoryPlan:
    """One rank's memory plan. sessions: of the whole replica, shared out evenly over its attention groups.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.devices import find_device
    >>> from rorqual.planner.mix import one_context
    >>> eight = deploy(presets.load("v4.1-flash"), find_device("h200"), count=8)
    >>> cut = plan(eight, one_context(131_072))
    >>> cut.slots, cut.pages, cut.total <= eight.budget
    (422, 433151, True)

    Unit: bytes. Source: `capacity.plan_memory`. Raises CapacityError naming the devices and the shortage, InputError
    for a context above the model's positions.
    """
    config, ranks = deployment.layout.config, deployment.ranks
    if mix is not None and mix.longest > config.max_position_embeddings:
        limit = f"{config.max_position_embeddings:,} tokens (max_position_embeddings)"
        raise InputError(f"a context must be at most {limit}; got {mix.longest:,}")
    if sessions is not None and sessions < 1:
        raise InputError(f"--sessions must be 1 or more; got {sessions}")
    beside = outside(deployment)
    try:
        return plan_memory(
            deployment.layout,
            budget=deployment.budget,
            weights=sum(deployment.weights.values()),
            workspace=deployment.workspace,
            mix=mix,
            sessions=None if sessions is None else -(-sessions // ranks.dp_attention),
            rows=deployment.rows,
            host_bytes=sum(item.nbytes for item in beside if item.home == "host"),
            disk_bytes=sum(item.nbytes for item in beside if item.home == "disk"),
        )
    except CapacityError as error:
        raise CapacityError(f"{ranks.count} x {deployment.device.title}: {error}{_advice(deployment)}") from None


def _advice(deployment: Deployment) -> str:
    """What could leave the device, if anything can."""
    tables = deployment.weights.get("engram_tables", 0)
    if not tables:
        return ""
    options = "--engram disk" if deployment.device.unified else "--engram host or disk"
    return f"; {options} would free {decimal_bytes(tables)} of it"


def _refuse_unified(device: Device, placement: Placement, pool_host: int) -> None:
    """Host memory that is the device's own holds nothing beside it."""
    if device.unified and placement.engram == "host":
        raise InputError(f"--engram must be device, disk or off on {device.name}, whose memory is the host's; got host")
    if device.unified and pool_host:
        raise InputError(f"--pool-host must be 0 on {device.name}, whose memory is the host's; got {pool_host}")


def _pool_text(nbytes: int, page: int) -> str:
    return f"{nbytes // page:,} pages" if page else "no global KV to pool"
