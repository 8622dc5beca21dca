"""What a model is made of: read, checked, and resolved into one role per layer. No torch in here."""

from __future__ import annotations

from rorqual.config.cache_formats import CacheFormats
from rorqual.config.model import ModelConfig
from rorqual.config.parts import RopeScaling, VisionConfig, WeightFormats
from rorqual.config.roles import LayerRole, Mode, Part

__all__ = [
    "CacheFormats",
    "LayerRole",
    "Mode",
    "ModelConfig",
    "Part",
    "RopeScaling",
    "VisionConfig",
    "WeightFormats",
]
