"""The trained parameters of a config, by checkpoint name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rorqual.checkpoint.names import TensorSpec, expected_tensors
from rorqual.config import ModelConfig
from rorqual.errors import CheckpointError
from rorqual.training.initial import initial_value


def trained_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """The checkpoint's tensors without the scales: what has a value to train, in file order."""
    return {name: spec for name, spec in expected_tensors(config).items() if spec.dtypes[0] != "F8_E8M0"}


def is_trained(name: str) -> bool:
    """False for router biases, which a rule moves, not a gradient."""
    return not name.endswith(("gate.bias", "gate.bias_vl"))


def initial_parameters(config: ModelConfig, seed: int) -> dict[str, nn.Parameter]:
    """Fresh fp32 parameters in file order."""
    return {
        name: nn.Parameter(initial_value(spec, config, seed), requires_grad=is_trained(name))
        for name, spec in trained_specs(config).items()
    }


def load_parameters(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Copy values into parameters of the same names and shapes, in place.

    Raises:
        CheckpointError: names or shapes differ; nothing is copied then.
    """
    for name, parameter in parameters.items():
        if name not in values:
            raise CheckpointError(f"{name} is missing")
        if values[name].shape != parameter.shape:
            raise CheckpointError(f"{name} is {tuple(values[name].shape)}, must be {tuple(parameter.shape)}")
    extra = sorted(set(values) - set(parameters))
    if extra:
        raise CheckpointError(f"{extra[0]} is not a parameter of this model")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
