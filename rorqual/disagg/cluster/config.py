"""A cluster in TOML: what runs, how many of it, where, and how long anything may take. Every key has a default.

    name = "demo"
    [prefill]
    workers = 2
    [decode]
    workers = 1

A key that is not known, or a value that is not legal, is refused by name; nothing is started.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from rorqual.engine.sequence import REPLAY_MODES
from rorqual.errors import InputError
from rorqual.model.numerics import MODES
from rorqual.planner.traffic import HANDOVERS
from rorqual.planner.units import parse_bytes

Section = TypeVar("Section")
KERNELS = ("auto", "fast", "plain")
TRANSPORTS = ("ray", "mooncake")
PROTOCOLS = ("tcp", "rdma")
STORES = ("none", "memory", "disk", "mooncake")
LOCAL, LOOPBACK = "local", "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """path: a checkpoint folder that every machine has; empty for the shipped model.

    replay: what is computed again after a prefix hit. A request that a dead worker left behind runs anew; with `exact`
    its text goes on as it was whatever was hit, with `bounded` it may be another, which ends it in an error.
    max_model_len: 0 for the model's positions.
    """

    path: str = ""
    numerics: str = "fp32"
    kernels: str = "auto"
    replay: str = "bounded"
    max_model_len: int = 0

    def __post_init__(self) -> None:
        _one_of("model.numerics", self.numerics, MODES)
        _one_of("model.kernels", self.kernels, KERNELS)
        _one_of("model.replay", self.replay, REPLAY_MODES)
        _at_least("model.max_model_len", self.max_model_len, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSection:
    """Workers of one role.

    memory: bytes of each in all, or a share of what is free, as `rorqual serve --memory`; empty for what slots need.
    slots: sequences that each runs at once. threads: of each; 0 for as many as the libraries take.
    cpus, gpus: what Ray counts each as. resource: a resource of Ray's that its machine must have, 1 of it a worker; so
    roles are kept to machines.
    """

    workers: int = 1
    memory: str = ""
    slots: int = 8
    threads: int = 0
    cpus: float = 1.0
    gpus: float = 0.0
    resource: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoverSection:
    """mode: what a prefill worker gives (`rorqual plan traffic` has the bytes). transport: what carries it: Ray's
    object store, or Mooncake's transfer engine over `protocol`, on `device` where there are several.

    bytes: of parcels that a prefill worker keeps at a time, at most.
    """

    mode: str = "streams"
    transport: str = "ray"
    protocol: str = "tcp"
    device: str = ""
    bytes: str = "256MiB"

    def __post_init__(self) -> None:
        _one_of("handover.mode", self.mode, HANDOVERS)
        _one_of("handover.transport", self.transport, TRANSPORTS)
        _one_of("handover.protocol", self.protocol, PROTOCOLS)
        parse_bytes(self.bytes, "cluster config: handover.bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSection:
    """Where pages outlive a worker. kind: `memory` and `disk` are each worker's own, `mooncake` is everybody's.

    memory: bytes of host memory a worker; of `mooncake`, what each lends to all, or all that a `local` master has.
    disk: bytes a worker. folder: on each machine's disk; a worker has a folder of its name in it. ttl: seconds after
    its last use at which a page goes; 0 for never. fsync: what was written outlasts a power failure.
    master: host:port of Mooncake's; `local` starts one, and a process that lends it memory, on loopback.
    """

    kind: str = "none"
    memory: str = "64MiB"
    disk: str = "1GiB"
    folder: str = ""
    ttl: float = 0.0
    fsync: bool = False
    master: str = LOCAL

    def __post_init__(self) -> None:
        _one_of("store.kind", self.kind, STORES)
        for name in ("memory", "disk"):
            parse_bytes(getattr(self, name), f"cluster config: store.{name}")
        _at_least("store.ttl", self.ttl, 0)
        if self.kind == "disk" and not self.folder:
            raise InputError("cluster config: store.folder: '' is not legal with kind disk; legal: a folder")
        _host_port("store.master", self.master)


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySection:
    """address: host:port of a running Ray, or `local` to start one on loopback for as long as `cluster up` runs.

    cpus, object_store: of a local one; cpus 0 for what the workers ask for.
    """

    address: str = LOCAL
    cpus: float = 0.0
    object_store: str = "256MiB"

    def __post_init__(self) -> None:
        _host_port("ray.address", self.address)
        _at_least("ray.cpus", self.cpus, 0)
        # What Ray itself refuses to start with.
        _at_least("ray.object_store", parse_bytes(self.object_store, "cluster config: ray.object_store"), 75 << 20)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineSection:
    """Seconds. start: until every worker is ready. handover: from a request's arrival at a decode worker until it has
    the parcel; then it computes the prompt itself. silent: without a word, after which the other side counts as dead.
    restart: that a request waits for some worker to be there. losses: workers that a request may lose in a row without
    getting a token; one that kills whoever takes it must not go round for ever.
    """

    start: float = 300.0
    handover: float = 30.0
    silent: float = 30.0
    restart: float = 120.0
    losses: int = 5

    def __post_init__(self) -> None:
        for name in ("start", "handover", "silent", "restart"):
            if not getattr(self, name) > 0:
                raise InputError(
                    f"cluster config: deadlines.{name}: {getattr(self, name)} is not legal; legal: above 0"
                )
        _at_least("deadlines.losses", self.losses, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """A whole cluster. name: of it on this machine and in Ray."""

    name: str = "rorqual"
    model: ModelSection = field(default_factory=ModelSection)
    prefill: WorkerSection = field(default_factory=WorkerSection)
    decode: WorkerSection = field(default_factory=WorkerSection)
    handover: HandoverSection = field(default_factory=HandoverSection)
    store: StoreSection = field(default_factory=StoreSection)
    ray: RaySection = field(default_factory=RaySection)
    deadlines: DeadlineSection = field(default_factory=DeadlineSection)

    def __post_init__(self) -> None:
        if not self.name or not all(letter.isalnum() or letter in "-_" for letter in self.name):
            raise InputError(f"cluster config: name: {self.name!r} is not legal; legal: letters, digits, - and _")
        if self.store.kind == "mooncake" and self.store.master == LOCAL != self.ray.address:
            raise InputError("cluster config: store.master: 'local' is not legal where Ray is not; legal: host:port")
        for role, own in (("prefill", self.prefill), ("decode", self.decode)):
            _at_least(f"{role}.workers", own.workers, 1)
            _at_least(f"{role}.slots", own.slots, 1)
            for name in ("threads", "cpus", "gpus"):
                _at_least(f"{role}.{name}", getattr(own, name), 0)

    @classmethod
    def read(cls, path: Path) -> ClusterConfig:
        """Of a file.

        Raises:
            InputError: a file that cannot be read, or what is not legal in it, by section and key.
        """
        try:
            return cls.parse(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cluster config: {path} cannot be read ({error})") from error

    @classmethod
    def parse(cls, text: str) -> ClusterConfig:
        """Of a text in TOML. Raises InputError."""
        try:
            stated = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"cluster config: not TOML ({error})") from error
        kinds = {own.name: own.default_factory for own in fields(cls) if own.name != "name"}
        found: dict[str, Any] = {}
        for key, value in stated.items():
            kind: Any = kinds.get(key)
            if kind is None and key != "name":
                raise InputError(f"cluster config: {key}: unknown; legal: name, {', '.join(f'[{k}]' for k in kinds)}")
            found[key] = _typed(key, value, "") if kind is None else _section(kind, key, value)
        return cls(**found)

    @property
    def workers(self) -> list[tuple[str, str, WorkerSection]]:
        """(name, role, section) of each worker."""
        roles = ("prefill", self.prefill), ("decode", self.decode)
        return [(f"{role}-{number}", role, own) for role, own in roles for number in range(own.workers)]


def _section(kind: type[Section], name: str, stated: Any) -> Section:
    if not isinstance(stated, dict):
        raise InputError(f"cluster config: {name}: {stated!r} is not legal; legal: a section [{name}]")
    defaults = {own.name: own.default for own in fields(kind)}  # type: ignore[arg-type]
    for key in stated:
        if key not in defaults:
            raise InputError(f"cluster config: {name}.{key}: unknown; legal: {', '.join(defaults)}")
    return kind(**{key: _typed(f"{name}.{key}", value, defaults[key]) for key, value in stated.items()})


def _typed(name: str, value: Any, default: Any) -> Any:
    """A value of its default's type; a whole number is a float where one is asked for."""
    wanted = type(default)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        spelled = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[wanted]
        raise InputError(f"cluster config: {name}: {value!r} is not legal; legal: {spelled}")
    return value


def _one_of(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise InputError(f"cluster config: {name}: {value!r} is not legal; legal: {', '.join(legal)}")


def _at_least(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise InputError(f"cluster config: {name}: {value} is not legal; legal: at least {least}")


def _host_port(name: str, value: str) -> None:
    host, _, port = value.rpartition(":")
    if value != LOCAL and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise InputError(f"cluster config: {name}: {value!r} is not legal; legal: {LOCAL}, or host:port")
