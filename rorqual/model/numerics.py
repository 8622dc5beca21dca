"""The two numerics modes (SPEC 3): what an activation is rounded to, and when a product quantises its input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.errors import InputError

MODES = ("fp32", "native")


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """`fp32`: activations fp32, no activation quantisation; caches still quantise.
    `native`: activations bf16, rounded where the release rounds; quantised weights take an FP8 activation.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in MODES:
            raise InputError(f"numerics: {self.name!r} is not one of {', '.join(MODES)}")

    @property
    def native(self) -> bool:
        return self.name == "native"

    @property
    def act_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.native else torch.float32

    def round(self, x: Tensor) -> Tensor:
        """To the activation dtype: the identity in fp32, one rounding to bf16 in native."""
        dtype = torch.bfloat16 if self.name == "native" else torch.float32
        return x if x.dtype is dtype else x.to(dtype)
