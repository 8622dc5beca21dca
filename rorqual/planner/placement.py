"""What a checkpoint's weights weigh, by part and by format, and which part lives where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.inventory.names import PARTS, TensorSpec, expected_tensors
from rorqual.inventory.parameters import parameter_count
from rorqual.planner.counts import few_experts

Home = Literal["device", "host", "disk"]
ENGRAM_HOMES = ("device", "host", "disk", "off")
FORMATS: Mapping[str, str] = MappingProxyType(
    {"I8": "FP4 codes", "F8_E4M3": "FP8 codes", "F8_E8M0": "scales", "BF16": "BF16", "F32": "FP32"}
)
"""Dtype as a checkpoint spells it -> what it is called here. A byte of I8 holds two FP4 codes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKind:
    """Tensors that are alike: `count` of them, each as `spec` says, whose name is only the last parts of theirs."""

    spec: TensorSpec
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.spec.nbytes

    @property
    def parameters(self) -> int:
        """Values, scales left out: an FP4 byte holds two."""
        return self.count * parameter_count(self.spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the optional parts live.

    engram: "device"; "host" (one copy in shared memory a host); "disk" (rows read in place from the checkpoint); "off"
    leaves the tables and their projections out, which is another model. drafts, vision: loaded or left out.
    """

    engram: str = "device"
    drafts: bool = True
    vision: bool = True

    def __post_init__(self) -> None:
        if self.engram not in ENGRAM_HOMES:
            raise InputError(f"--engram must be one of {', '.join(ENGRAM_HOMES)}; got {self.engram!r}")


@lru_cache(maxsize=16)
def tensor_kinds(config: ModelConfig) -> tuple[TensorKind, ...]:
    """The tensors of a checkpoint, alike ones counted together: 96,085 become a few dozen.

    >>> from rorqual.config import presets
    >>> sum(kind.count for kind in tensor_kinds(presets.load("v4.1-flash")))
    96085

    Unit: tensors. Source: `inventory.expected_tensors`, the table that a checkpoint is read and written by. Routed
    experts are all alike, so it is asked for a few, and their number and the router's rows are put in afterwards.
    """
    few, experts = few_experts(config), config.n_routed_experts
    counts = Counter(
        TensorSpec(_leaf(name), spec.shape, spec.dtypes, spec.part) for name, spec in expected_tensors(few).items()
    )
    kinds = []
    for spec, count in counts.items():
        if spec.part == "router":
            spec = spec._replace(shape=(experts, *spec.shape[1:]))
        if spec.part == "experts":
            count = count * experts // few.n_routed_experts
        kinds.append(TensorKind(spec=spec, count=count))
    return tuple(kinds)


def weight_bytes(config: ModelConfig) -> Mapping[str, int]:
    """Bytes of weights by part, scales included, in the order of `inventory.names.PARTS`.

    >>> from rorqual.config import presets
    >>> by_part = weight_bytes(presets.load("v4.1-flash"))
    >>> sum(by_part.values()), by_part["experts"], by_part["engram_tables"]
    (510286023000, 288777830400, 202758032400)

    Source: the config's shapes and formats; the sum is the released checkpoint's, file headers left out.
    """
    sums = dict.fromkeys(PARTS, 0)
    for kind in tensor_kinds(config):
        sums[kind.spec.part] += kind.nbytes
    return {part: count for part, count in sums.items() if count}


def format_bytes(config: ModelConfig) -> Mapping[str, Mapping[str, int]]:
    """Bytes of weights by part and then by format, the names of `FORMATS`.

    >>> from rorqual.config import presets
    >>> format_bytes(presets.load("v4.1-flash"))["experts"]
    {'FP4 codes': 271790899200, 'scales': 16986931200}

    Source: as `weight_bytes`. 40 x 384 x 35,389,440 parameters / 2 a byte, and one scale byte for 32 of them.
    """
    sums: dict[str, dict[str, int]] = {}
    for kind in tensor_kinds(config):
        row = sums.setdefault(kind.spec.part, {})
        name = FORMATS[kind.spec.dtypes[0]]
        row[name] = row.get(name, 0) + kind.nbytes
    return {part: sums[part] for part in PARTS if part in sums}


def placed(config: ModelConfig, placement: Placement) -> ModelConfig:
    """The config of what is loaded: parts that are left out are turned off in it.

    >>> from rorqual.config import presets
    >>> release = presets.load("v4.1-flash")
    >>> sum(weight_bytes(placed(release, Placement(drafts=False))).values()) - 510_286_023_000
    -7932874632

    Unit: none. Source: `ModelConfig.without`. Without drafts, 713,428,872 + 7,219,445,760 bytes less.
    """
    off = [name for name, on in (("drafts", placement.drafts), ("vision", placement.vision)) if not on]
    off += ["engram"] if placement.engram == "off" else []
    return config.without(*off) if off else config


def home(part: str, placement: Placement) -> Home:
    """Where a part lives. Everything but Engram's tables is used whole by every step, and lives on the device.

    >>> home("experts", Placement()), home("engram_tables", Placement(engram="host"))
    ('device', 'host')

    Unit: none. Source: a token reads 48 rows of 264 bytes from tables of 203 GB in the release.
    """
    if part == "engram_tables" and placement.engram in ("host", "disk"):
        return "host" if placement.engram == "host" else "disk"
    return "device"


def _leaf(name: str) -> str:
    """The end of a tensor's name that says what it is, without the layer or expert."""
    stem, _, last = name.rpartition(".")
    owner = stem.rpartition(".")[2]
    return f"{owner}.{last}" if owner and not owner.isdigit() else last
