"""What a number format is: its bytes, its group, its scale rule and its tolerance (SPEC 2). Needs no torch.

A packed row is `width` element codes followed by one scale byte a group:

    row of main KV, width 512:   | 256 bytes, two E2M1 codes each | 32 E4M3 scale bytes |   = 288 bytes

E2M1/E4M3/16 (main KV) and E2M1/E8M0/32 (index keys, experts) are different formats that share an element code;
nothing here is ever called just "fp4".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Literal, NamedTuple

from rorqual.errors import FormatError

ValueType = Literal["e2m1", "e4m3", "bf16", "fp32"]
ScaleType = Literal["e4m3", "e8m0"]


class _Rule(NamedTuple):
    """One legal pairing of value and scale type."""

    bits: int
    value_max: float
    amax_floor: float
    tolerance: float


_RULES: Mapping[tuple[str, str | None], _Rule] = MappingProxyType(
    {
        ("e2m1", "e4m3"): _Rule(4, 6.0, 6 * 2.0**-9, 3 / 17),
        ("e2m1", "e8m0"): _Rule(4, 6.0, 6 * 2.0**-126, 1 / 5),
        ("e2m1", None): _Rule(4, 6.0, 0.0, 1 / 6),
        ("e4m3", "e8m0"): _Rule(8, 448.0, 1e-4, 1 / 17),
        ("bf16", None): _Rule(16, inf, 0.0, 1 / 257),
        ("fp32", None): _Rule(32, inf, 0.0, 0.0),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberFormat:
    """How `width` values become one packed row.

    Args:
        name: the format's only name, a key of `FORMATS`.
        value: element type.
        scale: type of the scale byte shared by a group; None stores the values as they are, `e2m1` clamped to +-6.
        group: neighbouring elements that share a scale; 1 without a scale.

    Raises:
        FormatError: an unknown pairing of value and scale, or a group that does not fill whole bytes.
    """

    name: str
    value: ValueType
    scale: ScaleType | None = None
    group: int = 1

    def __post_init__(self) -> None:
        if (self.value, self.scale) not in _RULES:
            legal = ", ".join(f"{value}/{scale}" for value, scale in _RULES)
            raise FormatError(f"format {self.name}: no rule for value/scale {self.value}/{self.scale}; legal: {legal}")
        if self.scale is None and self.group != 1:
            raise FormatError(f"format {self.name}: group is {self.group}, must be 1 without a scale")
        if self.scale is not None and (self.group < 2 or self.group % 2):
            raise FormatError(f"format {self.name}: group is {self.group}, must be a positive even number")

    @property
    def bits(self) -> int:
        """Bits of one element's code, its share of the scale not counted."""
        return self._rule.bits

    @property
    def value_max(self) -> float:
        """Largest element before scaling; elements saturate there. Infinite for bf16 and fp32."""
        return self._rule.value_max

    @property
    def amax_floor(self) -> float:
        """Least group maximum the scale rule sees, so that an all-zero group has a scale (SPEC 2, last column)."""
        return self._rule.amax_floor

    @property
    def tolerance(self) -> float:
        """Largest round-trip error, as a fraction of the group's largest magnitude.

        It is half the widest step over the least amax that uses that step: E2M1 steps by 2 scales above 4, E4M3 by 32
        above 256. Holds while the scale is a normal number of its type, neither floored nor saturated; for unscaled
        E2M1 the fraction is of 6 and holds within +-6; for bf16 it is of the element itself.
        """
        return self._rule.tolerance

    @property
    def width_multiple(self) -> int:
        """Every legal width is a positive multiple of this: whole groups, whole bytes."""
        return self.group if self.scale is not None else max(1, 8 // self.bits)

    def code_bytes(self, width: int) -> int:
        """Bytes of `width` element codes. Raises FormatError naming the legal multiples."""
        self._check_width(width)
        return width * self.bits // 8

    def scale_bytes(self, width: int) -> int:
        """Bytes of the scales of `width` elements, 0 without a scale. Raises FormatError as `code_bytes`."""
        self._check_width(width)
        return width // self.group if self.scale is not None else 0

    def row_bytes(self, width: int) -> int:
        """Bytes of a whole packed row. Raises FormatError as `code_bytes`.

        Worked example: main KV 512/2 + 512/16 = 288; index key 128/2 + 128/32 = 68; window slot 512 + 512/32 = 528.
        """
        return self.code_bytes(width) + self.scale_bytes(width)

    def width_of(self, row_bytes: int) -> int:
        """Inverse of `row_bytes`. Raises FormatError where no legal width gives `row_bytes`."""
        unit = self.row_bytes(self.width_multiple)
        if row_bytes <= 0 or row_bytes % unit:
            raise FormatError(f"{row_bytes} bytes are no row of {self.name}: must be a positive multiple of {unit}")
        return row_bytes // unit * self.width_multiple

    @property
    def _rule(self) -> _Rule:
        return _RULES[self.value, self.scale]

    def _check_width(self, width: int) -> None:
        if width <= 0 or width % self.width_multiple:
            raise FormatError(
                f"width {width} does not fit {self.name}: must be a positive multiple of {self.width_multiple}"
            )


E2M1_E4M3_16 = NumberFormat(name="e2m1_e4m3_16", value="e2m1", scale="e4m3", group=16)
"""Main KV. The element and block scale of NVFP4, without its second-level global scale."""

E2M1_E8M0_32 = NumberFormat(name="e2m1_e8m0_32", value="e2m1", scale="e8m0", group=32)
"""Index keys, index queries, routed experts. OCP MXFP4."""

E4M3_E8M0_32 = NumberFormat(name="e4m3_e8m0_32", value="e4m3", scale="e8m0", group=32)
"""Window KV, GEMM activations, Engram rows. OCP MXFP8."""

BF16 = NumberFormat(name="bf16", value="bf16")
FP32 = NumberFormat(name="fp32", value="fp32")

E2M1_UNSCALED = NumberFormat(name="e2m1_unscaled", value="e2m1")
"""Values clamped to +-6 and rounded, no scale bytes: the ablation that shows what a scale buys."""

FORMATS: Mapping[str, NumberFormat] = MappingProxyType(
    {fmt.name: fmt for fmt in (E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, BF16, FP32, E2M1_UNSCALED)}
)
"""Every selectable format by name, as `CacheFormats` spells them."""
