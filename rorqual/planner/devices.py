"""Devices as their makers publish them: memory, its bandwidth, and dense rates. What a maker does not publish is None.

Sizes are decimal, as the data sheets write them ("141 GB" is 141 x 10^9 bytes). Some drivers report more than that:
`--memory` then plans with what the machine says. Rates are dense: where a data sheet gives them with 2:4 sparsity only,
the half of it is taken, and the source says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from rorqual.errors import InputError
from rorqual.planner.table import Table

GB, TB, TFLOPS = 10**9, 10**12, 10**12


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device.

    memory: bytes. bandwidth: bytes a second of that memory. bf16, fp8, fp4: dense FLOP/s with fp32 accumulation.
    unified: the device's memory is the host's, so nothing can be moved from one to the other.
    source: the document, by title and year.
    """

    name: str
    title: str
    memory: int | None
    bandwidth: int | None
    bf16: int | None
    fp8: int | None
    fp4: int | None
    source: str
    unified: bool = False

    @property
    def has_bandwidth(self) -> bool:
        """Whether memory bandwidth is known, without which there is no roofline."""
        return self.bandwidth is not None


_H100 = "data sheet 'NVIDIA H100 Tensor Core GPU' (2023); rates given with sparsity, halved"
_H200 = "data sheet 'NVIDIA H200 Tensor Core GPU' (2024); rates given with sparsity, halved"
_B200 = (
    "data sheet 'NVIDIA DGX B200' (2024), an eighth of the system; rates of 'NVIDIA Blackwell Architecture Technical "
    "Brief' (2024), given with sparsity, halved"
)
_GB300 = (
    "one GPU of a GB300: 'Inside NVIDIA Blackwell Ultra', NVIDIA technical blog (2025); FP8 and BF16 of data sheet "
    "'NVIDIA GB300 NVL72' (2025), a 72nd, given with sparsity, halved"
)
_MI300X = "data sheet 'AMD Instinct MI300X Accelerator' (2023)"
_MI350X = "data sheet 'AMD Instinct MI350X GPU' (2025)"
_RTX = "whitepaper 'NVIDIA RTX Blackwell GPU Architecture' (2025); FP8 and BF16 with fp32 accumulation"
_M3 = "'Mac Studio (2025) - Technical Specifications', Apple (2025); largest option; no tensor rates are published"


def _device(
    name: str,
    title: str,
    memory: int | None,
    bandwidth: int | None,
    rates: tuple[int | None, int | None, int | None],
    source: str,
    unified: bool = False,
) -> Device:
    bf16, fp8, fp4 = rates
    return Device(
        name=name,
        title=title,
        memory=memory,
        bandwidth=bandwidth,
        bf16=bf16,
        fp8=fp8,
        fp4=fp4,
        source=source,
        unified=unified,
    )


_NONE = (None, None, None)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            _device("h100", "H100 SXM", 80 * GB, 3350 * GB, (989 * TFLOPS, 1979 * TFLOPS, None), _H100),
            _device("h200", "H200 SXM", 141 * GB, 4800 * GB, (989 * TFLOPS, 1979 * TFLOPS, None), _H200),
            _device("b200", "B200", 180 * GB, 8 * TB, (2250 * TFLOPS, 4500 * TFLOPS, 9000 * TFLOPS), _B200),
            _device("gb300", "GB300", 288 * GB, 8 * TB, (2500 * TFLOPS, 5000 * TFLOPS, 15_000 * TFLOPS), _GB300),
            _device("mi300x", "MI300X", 192 * GB, 5300 * GB, (1307 * TFLOPS, 2614 * TFLOPS, None), _MI300X),
            _device("mi350x", "MI350X", 288 * GB, 8 * TB, (2300 * TFLOPS, 4600 * TFLOPS, 9200 * TFLOPS), _MI350X),
            _device("rtx5090", "RTX 5090", 32 * GB, 1792 * GB, (209 * TFLOPS, 419 * TFLOPS, 1676 * TFLOPS), _RTX),
            _device("m3ultra", "M3 Ultra", 512 * GB, 819 * GB, _NONE, _M3, unified=True),
            _device("cpu", "CPU", None, None, _NONE, "the user's own figures", unified=True),
        )
    }
)
"""By the name that `--device` takes."""


def find_device(
    name: str, *, memory: int | None = None, bandwidth: int | None = None, bf16: int | None = None
) -> Device:
    """The device of a name, with the user's own figures in place of the published ones.

    memory: bytes. bandwidth: bytes a second. bf16: dense BF16 FLOP/s; FP8 and FP4 are then taken to run no faster,
    unless published.

    >>> find_device("h200").memory, find_device("h200", memory=150 * 10**9).memory
    (141000000000, 150000000000)
    >>> find_device("cpu", memory=64 * 2**30, bandwidth=80 * 10**9).bandwidth
    80000000000

    Source: `DEVICES`. Raises InputError for an unknown name, a figure that is not above 0, or a CPU without `memory`.
    """
    if name.lower() not in DEVICES:
        raise InputError(f"--device must be one of {', '.join(DEVICES)}; got {name!r}")
    given = {"memory": memory, "bandwidth": bandwidth, "bf16": bf16}
    for figure, value in given.items():
        if value is not None and value <= 0:
            raise InputError(f"--{'flops' if figure == 'bf16' else figure} must be above 0; got {value}")
    stated = {figure: value for figure, value in given.items() if value is not None}
    device: Device = replace(DEVICES[name.lower()], **stated)  # type: ignore[arg-type]
    if device.memory is None:
        raise InputError(f"--device {device.name} has no published size; give --memory, such as 64GiB")
    return device


def rate(device: Device, precision: str) -> int | None:
    """FLOP/s at which products of "fp4", "fp8" or "bf16" run: a device without a width runs the next wider one.

    >>> rate(DEVICES["b200"], "fp4"), rate(DEVICES["h200"], "fp4"), rate(DEVICES["m3ultra"], "fp8")
    (9000000000000000, 1979000000000000, None)

    Source: `DEVICES`; None where no rate is published.
    """
    wider = {"fp4": (device.fp4, device.fp8, device.bf16), "fp8": (device.fp8, device.bf16), "bf16": (device.bf16,)}
    return next((value for value in wider[precision] if value is not None), None)


def device_table() -> Table:
    """The devices with their sources, sizes in bytes and rates in FLOP/s.

    >>> device_table().rows[1][:4]
    ('h200', 'H200 SXM', 141000000000, 4800000000000)

    Source: the last column.
    """
    return Table(
        name="devices",
        title="devices, as published",
        columns=(
            "device",
            "title",
            "memory [B]",
            "bandwidth [B/s]",
            "dense BF16 [FLOP/s]",
            "dense FP8 [FLOP/s]",
            "dense FP4 [FLOP/s]",
            "source",
        ),
        rows=tuple((d.name, d.title, d.memory, d.bandwidth, d.bf16, d.fp8, d.fp4, d.source) for d in DEVICES.values()),
        note="`-`: not published, or the user's to give. FP4 products run at the FP8 rate where there is none for FP4.",
    )
