"""The nested parts of a ModelConfig. Each checks itself on construction, so a part that exists is legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rorqual.config.checks import Check, apply, choice, integer, number, optional, refuse

# Positions are fp32 in the rotary angle; 2^24 is the last up to which every integer is exact.
MAX_POSITIONS = 1 << 24

ROPE_SCALING_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "factor": number(1, 1e6),
        "beta_fast": number(0, 1e6, open_low=True),
        "beta_slow": number(0, 1e6, open_low=True),
        "original_max_position_embeddings": integer(1, MAX_POSITIONS),
    }
)

VISION_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "num_hidden_layers": integer(1, 1024),
        "hidden_size": integer(1, 1 << 20),
        "num_attention_heads": integer(1, 65536),
        "intermediate_size": integer(1, 1 << 20),
        "patch_size": integer(1, 4096),
        "rope_theta": number(1, 1e9, open_low=True),
        "downsample_ratio": integer(1, 64),
        # start, one feature, its newline, end: no smaller grid exists.
        "max_image_tokens": integer(4, 1 << 20),
        "min_pixels": integer(1, 1 << 30),
        "max_wh_ratio": optional(number(0, 1e6, open_low=True)),
    }
)

PLAIN_FORMATS = ("bf16", "fp32")
WEIGHT_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "dense": choice(("fp8", *PLAIN_FORMATS)),
        "experts": choice(("fp4", "fp8", *PLAIN_FORMATS)),
        "engram": choice(("fp8", *PLAIN_FORMATS)),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """YaRN for the layers with a ratio above 0 (SPEC 4). `factor` 1 leaves every frequency as it was."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        apply(self, ROPE_SCALING_CHECKS, "rope_scaling.")
        if self.beta_slow > self.beta_fast:
            legal = f"at most rope_scaling.beta_fast ({self.beta_fast:g})"
            raise refuse("rope_scaling.beta_slow", legal, self.beta_slow)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """The image tower and the grid rule (SPEC 10); names as in `vision_config` of the Hugging Face file."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        apply(self, VISION_CHECKS, "vision_config.")
        # A head splits into two axes, and each axis into rotary pairs.
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            legal = f"a divisor of vision_config.hidden_size ({self.hidden_size}) that leaves heads of a multiple of 4"
            raise refuse("vision_config.num_attention_heads", legal, self.num_attention_heads)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def cell(self) -> int:
        """Pixels of a side of the square that becomes one feature: 14 x 3 = 42 in the release."""
        return self.patch_size * self.downsample_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormats:
    """How weights are stored: linears, routed experts, Engram tables.

    "fp8" is E4M3 with E8M0 scales per 32 x 32 tile (per 32 of a row for Engram), "fp4" is E2M1 with E8M0 per 32 inputs.
    "bf16" and "fp32" are plain: a checkpoint may hold either dtype for them. Norms, gates and sinks are always plain.
    """

    dense: str = "fp8"
    experts: str = "fp4"
    engram: str = "fp8"

    def __post_init__(self) -> None:
        apply(self, WEIGHT_CHECKS, "weights.")

    @classmethod
    def stated(cls, dense: str, experts: str | None = None, engram: str | None = None) -> WeightFormats:
        """As the config files state it: one dtype, with None where the experts or the tables follow it."""
        experts = dense if experts is None else experts
        return cls(dense=dense, experts=experts, engram=dense if engram is None else engram)

    @property
    def is_plain(self) -> bool:
        """No quantised weight anywhere."""
        return {self.dense, self.experts, self.engram} <= set(PLAIN_FORMATS)
