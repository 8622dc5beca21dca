"""Where training starts: every parameter by its checkpoint name.

Linears are N(0, 1 / fan in). What is chosen beyond that, and why:

* What writes to the residual stream starts small (WRITE_GAIN / sqrt(2 layers)), so that the stream is the embedding at
  first; the head starts near zero, so that the first loss is ln(vocabulary).
* mHC starts as plain hyper-connections would: each copy keeps itself, every sub-layer writes to all copies, and reads
  mostly one of them, in turn, which is what makes the copies differ.

Deterministic: a tensor depends on the seed and its name, on nothing drawn before.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rorqual.config import ModelConfig
from rorqual.inventory.names import TensorSpec
from rorqual.training.seeding import keyed_generator

WRITE_GAIN = 0.5
EMBED_STD = 0.5
TABLE_STD = 0.1
HEAD_STD = 0.01
READS_MOSTLY = 0.7
"""Share of the collapse that the favoured copy gives."""
KEEPS_ITSELF = 3.0
"""Logit of a copy keeping itself, over 0 for going elsewhere."""
MIX_STD = 0.01
"""Of the token-dependent part of the mixing coefficients, at first."""


def initial_value(spec: TensorSpec, config: ModelConfig, seed: int) -> Tensor:
    """fp32 value of a parameter (of a quantised one: [out, in], unpacked)."""
    name, shape = spec.name, list(spec.shape)
    if spec.dtypes[0] == "I8":
        shape[-1] *= 2
    if name.endswith(("norm.weight", ".q_weight", ".k_weight", "norm1.weight", "norm2.weight")):
        return torch.ones(shape)
    if name.endswith(("attn_sink", "gate.bias", "gate.bias_vl", ".bias")):
        return torch.zeros(shape)
    if name.endswith("_scale") and ".hc_" in name:
        return torch.ones(shape)
    if name.endswith("_base") and ".hc_" in name:
        return _mix_base(name, config)
    return torch.randn(shape, generator=keyed_generator(seed, name)) * _std(name, shape, config)


def _std(name: str, shape: list[int], config: ModelConfig) -> float:
    if name.endswith("engram.embed.weight"):
        return TABLE_STD
    if name.endswith("embed.weight"):
        return EMBED_STD
    if name.endswith(("head.weight", "confidence_head.proj.weight")):
        return HEAD_STD
    if ".hc_" in name:
        return MIX_STD
    fan_in = 1.0 / math.sqrt(shape[-1])
    writes = name.endswith(("wo_b.weight", ".w2.weight")) and not name.startswith(("vision", "aligner"))
    return fan_in * WRITE_GAIN / math.sqrt(2 * config.num_hidden_layers) if writes else fan_in


def _mix_base(name: str, config: ModelConfig) -> Tensor:
    """[pre n | post n | comb n x n] before their functions. The `pre` that sub-layer k computes serves sub-layer
    k + 1, which reads copy k + 1 mod n most."""
    n = config.hc_mult
    parts = name.split(".")
    layer = int(parts[1]) + (config.num_hidden_layers if parts[0] == "mtp" else 0)
    reader = 2 * layer + ("_ffn_" in name) + 1
    share = torch.full((n,), (1 - READS_MOSTLY) / max(1, n - 1))
    share[reader % n] = READS_MOSTLY if n > 1 else 1 - 1e-3
    comb = KEEPS_ITSELF * torch.eye(n).flatten()
    return torch.cat((share.logit(), torch.zeros(n), comb))
