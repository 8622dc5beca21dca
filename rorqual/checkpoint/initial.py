"""What a random checkpoint's values look like, so that activations stay where a trained model's are.

Linears are N(0, gain / sqrt(fan in)): unit inputs give outputs of size `gain`. What is chosen beyond that, and why:

* Queries have gain 2, so attention logits have a spread of 2: a row attends to a dozen keys in effect, not to all.
* Weights that write to the residual stream share a variance of about one over the whole depth, as much as the
  embedding. Attention's share is scaled up by 2, because the average over keys has shrunk the values.
* mHC mixes are biased towards each copy keeping itself, else all copies would be one after a layer. `pre` and `post`
  lie around 0.5 and 1 and depend on the token.
* Router and head have gains that spread their logits by 1.5 and 2; biases of the router are small against that.

Deterministic: a block of values depends on the seed, the tensor's name and the block's place, on nothing drawn before.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rorqual.config import ModelConfig
from rorqual.inventory.names import TensorSpec


class Normal(NamedTuple):
    """Mean and standard deviation of a tensor's values."""

    mean: float
    std: float


_FIXED: tuple[tuple[str, Normal], ...] = (
    (".q_weight", Normal(1.0, 0.2)),
    (".k_weight", Normal(1.0, 0.2)),
    ("norm.weight", Normal(1.0, 0.1)),
    ("norm1.weight", Normal(1.0, 0.1)),
    ("norm2.weight", Normal(1.0, 0.1)),
    (".attn_sink", Normal(0.0, 0.5)),
    ("gate.bias", Normal(0.0, 0.05)),
    ("gate.bias_vl", Normal(0.0, 0.05)),
    ("_base", Normal(0.0, 0.5)),
    ("_scale", Normal(0.5, 0.1)),
    ("markov_head.embed.weight", Normal(0.0, 0.5)),
    ("embed.weight", Normal(0.0, 1.0)),
    ("image_start", Normal(0.0, 1.0)),
    ("image_end", Normal(0.0, 1.0)),
    ("image_newline", Normal(0.0, 1.0)),
    (".bias", Normal(0.0, 0.02)),
)
"""Ending of a name -> its values; the first that fits counts."""

_GAINS: tuple[tuple[str, float], ...] = (
    ("attn.wq_b", 2.0),
    ("ffn.gate", 1.5),
    ("markov_head.head", 0.5),
    ("confidence_head.proj", 0.5),
    ("engram.wkv", 0.5),
    ("head", 2.0),
)
"""Ending of a linear's name -> its gain; 1 where none fits."""

_KEEP_COPY = 2.0  # added to the diagonal of mHC's comb logits: a copy keeps 0.7 of itself among four


def distribution(spec: TensorSpec, fan_in: int, config: ModelConfig) -> Normal:
    """The values of one tensor. `fan_in`: K of a linear [N, K], unpacked."""
    for ending, normal in _FIXED:
        if spec.name.endswith(ending):
            return normal
    stem = spec.name.removesuffix(".weight")
    gain = next((gain for ending, gain in _GAINS if stem.endswith(ending)), 1.0) * _residual_share(stem, config)
    return Normal(0.0, gain / math.sqrt(fan_in))


def _residual_share(stem: str, config: ModelConfig) -> float:
    """1 for a weight that does not write to a residual stream, else its share by depth."""
    depth = config.num_hidden_layers
    if stem.startswith("mtp."):
        depth = config.num_nextn_predict_layers
    if stem.startswith("vision."):
        depth = 0 if config.vision is None else config.vision.num_hidden_layers
    if stem.endswith((".attn.wo_b", ".attn.wo")):
        return 2.0 / math.sqrt(depth)
    writes = stem.endswith((".mlp.w2", ".shared_experts.w2")) or (".ffn.experts." in stem and stem.endswith(".w2"))
    return 1.0 / math.sqrt(depth) if writes else 1.0


def draw(seed: int, name: str, first_row: int, shape: tuple[int, ...], normal: Normal) -> npt.NDArray[np.float32]:
    """fp32 values of the block of `name` that begins at `first_row`."""
    digest = hashlib.sha256(f"{seed}/{name}/{first_row}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(digest[:16], "little")))
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(normal.std)
    values += np.float32(normal.mean)
    return values


def favour_own_copy(values: npt.NDArray[np.float32], copies: int) -> None:
    """In place on a mixing base [pre n | post n | comb n x n]: raise the diagonal of comb."""
    values[2 * copies :: copies + 1] += np.float32(_KEEP_COPY)
