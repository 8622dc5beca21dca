"""The trained parameters of a config, by checkpoint name."""

from __future__ import annotations

import torch
from torch import nn

from rorqual.config import ModelConfig
from rorqual.inventory.names import TensorSpec, expected_tensors
from rorqual.training.initial import initial_value


def trained_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """The checkpoint's tensors without the scales: what has a value to train, in file order."""
    return {name: spec for name, spec in expected_tensors(config).items() if spec.dtypes[0] != "F8_E8M0"}


def is_trained(name: str) -> bool:
    """False for router biases, which a rule moves, not a gradient."""
    return not name.endswith(("gate.bias", "gate.bias_vl"))


def initial_parameters(config: ModelConfig, seed: int, device: torch.device | None = None) -> dict[str, nn.Parameter]:
    """Fresh fp32 parameters in file order; the same values on every device (None: the CPU)."""
    return {
        name: nn.Parameter(initial_value(spec, config, seed).to(device), requires_grad=is_trained(name))
        for name, spec in trained_specs(config).items()
    }
