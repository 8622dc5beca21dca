"""The baseline: a plain pre-norm transformer that uses as many parameters a token as a V4.1 config does.

RoPE, RMSNorm, full causal multi-head attention, SwiGLU, untied head, no quantisation. It is a `Learner`, so the same
trainer, optimisers, schedule and data train it; parameters start by the same rules as the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rorqual.config import ModelConfig
from rorqual.errors import ConfigError
from rorqual.inventory.parameters import active_parameters
from rorqual.training.batch import IGNORE, Packed
from rorqual.training.initial import EMBED_STD, HEAD_STD, WRITE_GAIN
from rorqual.training.learner import Phase, StepLoss, Totals
from rorqual.training.objective import noised

# T tokens of a batch, D hidden, H heads, C head dim, V vocabulary, P pieces of one length, n their length

TOLERANCE = 0.02
"""Relative difference allowed between the twin's active parameters and the config's."""
WIDTHS_STEP = 8
MAX_ROWS = 8192
"""Rows whose logits are held at once when nothing is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinConfig:
    """Dimensions of the twin; hidden = heads x head_dim."""

    vocab_size: int
    layers: int
    heads: int
    head_dim: int
    intermediate: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with: all but the embedding."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocab_size * self.hidden


def twin_config(config: ModelConfig) -> TwinConfig:
    """A twin as deep as `config`, as wide as equal active parameters make it (head included, embedding not).

    The feed-forward is about 8/3 of the width, the usual shape of a SwiGLU, and takes up what rounding leaves.

    Raises:
        ConfigError: no width comes within 2 %.
    """
    target = active_parameters(config).decode_with_head
    layers, vocab = config.num_hidden_layers, config.vocab_size
    # target = 12 x layers x D^2 + vocab x D, about.
    width = (math.sqrt(vocab**2 + 48 * layers * target) - vocab) / (24 * layers)
    head_dim = 64 if width >= 256 else 32
    heads = max(1, round(width / head_dim))
    hidden = heads * head_dim
    left = target - vocab * hidden - hidden - layers * (4 * hidden**2 + 2 * hidden)
    intermediate = max(1, round(left / (3 * layers * hidden * WIDTHS_STEP))) * WIDTHS_STEP
    twin = TwinConfig(vocab_size=vocab, layers=layers, heads=heads, head_dim=head_dim, intermediate=intermediate)
    if abs(twin.active - target) > TOLERANCE * target:
        raise ConfigError(f"model: no dense twin within {TOLERANCE:.0%} of its {target:,} active parameters")
    return twin


def initial_twin(config: TwinConfig, seed: int) -> dict[str, nn.Parameter]:
    """Fresh fp32 parameters by name. Linears N(0, 1 / fan in), smaller where they write to the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden, config.intermediate
    write = WRITE_GAIN / math.sqrt(2 * config.layers)

    def normal(rows: int, columns: int, std: float) -> nn.Parameter:
        return nn.Parameter(torch.randn(rows, columns, generator=generator) * std)

    def linear(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
        return normal(rows, columns, gain / math.sqrt(columns))

    found = {"embed.weight": normal(config.vocab_size, hidden, EMBED_STD)}
    for i in range(config.layers):
        layer = f"layers.{i}"
        found[f"{layer}.attn_norm.weight"] = nn.Parameter(torch.ones(hidden))
        for name in ("wq", "wk", "wv"):
            found[f"{layer}.attn.{name}.weight"] = linear(hidden, hidden)
        found[f"{layer}.attn.wo.weight"] = linear(hidden, hidden, write)
        found[f"{layer}.ffn_norm.weight"] = nn.Parameter(torch.ones(hidden))
        found[f"{layer}.ffn.w1.weight"] = linear(inner, hidden)
        found[f"{layer}.ffn.w3.weight"] = linear(inner, hidden)
        found[f"{layer}.ffn.w2.weight"] = linear(hidden, inner, write)
    found["norm.weight"] = nn.Parameter(torch.ones(hidden))
    found["head.weight"] = normal(config.vocab_size, hidden, HEAD_STD)
    return found


class DenseTwin:
    """A `Learner`: next-token loss only; phases change nothing. Parameters may lie on any one device.

    noise: what a sequence is trained on, from the sequence (`objective.noised`); judged and sampled without.
    """

    def __init__(
        self,
        config: TwinConfig,
        parameters: Mapping[str, nn.Parameter],
        noise: Callable[[Packed], Packed] = lambda packed: packed,
    ) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self._noise = noise

    @classmethod
    def fresh(cls, config: ModelConfig, seed: int, noise_share: float = 0.0) -> DenseTwin:
        """The untrained twin of a config that is fitted to its tokenizer; `noise_share` as a recipe's `noise`."""
        twin = twin_config(config)
        noise = partial(noised, share=noise_share, noise_id=config.dspark_noise_token_id, seed=seed)
        return cls(twin, initial_twin(twin, seed), noise)

    def loss(self, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
        """The summed loss of the batch over the totals' tokens."""
        targets = torch.cat([sequence.targets for sequence in batch]).to(self._device)
        counted = targets != IGNORE
        inputs = [self._noise(sequence) for sequence in batch]
        logits = self._logits(self._hidden(inputs)[counted])
        total = F.cross_entropy(logits.float(), targets[counted], reduction="sum") / max(1, totals.tokens)
        return StepLoss(total=total, parts={"loss": float(total.detach())}, loads={})

    def after_step(self, loads: Mapping[str, Tensor]) -> None:
        """No routers, nothing to do."""

    @torch.no_grad()
    def token_losses(self, batch: Sequence[Packed], phase: Phase) -> list[Tensor]:
        """Nats, fp32 [n] a sequence, 0 where the target is IGNORE."""
        targets = torch.cat([sequence.targets for sequence in batch]).to(self._device)
        hidden = self._hidden(batch)
        losses = [
            F.cross_entropy(self._logits(rows).float(), wanted, reduction="none", ignore_index=IGNORE)
            for rows, wanted in zip(hidden.split(MAX_ROWS), targets.split(MAX_ROWS), strict=True)
        ]
        return list(torch.cat(losses).split([len(sequence.ids) for sequence in batch]))

    @torch.no_grad()
    def next_logits(self, ids: Tensor, phase: Phase) -> Tensor:
        """fp32 [V] after the last of ids int64 [n]."""
        sequence = Packed(ids=ids, targets=torch.full_like(ids, IGNORE), starts=(0,), number=0)
        return self._logits(self._hidden([sequence])[-1:])[0].float()

    @property
    def _device(self) -> torch.device:
        return self.parameters["head.weight"].device

    def _logits(self, rows_TD: Tensor) -> Tensor:
        return F.linear(rows_TD, self.parameters["head.weight"])

    def _hidden(self, batch: Sequence[Packed]) -> Tensor:
        """[T, D] of all tokens of the batch, normed for the head."""
        ids = torch.cat([sequence.ids for sequence in batch]).to(self._device)
        pieces = _pieces(batch)
        rotation = _rotation(self.config, pieces, self._device)
        x_TD = F.embedding(ids, self.parameters["embed.weight"])
        for i in range(self.config.layers):
            x_TD = x_TD + self._attention(f"layers.{i}", x_TD, pieces, rotation)
            x_TD = x_TD + self._feed_forward(f"layers.{i}", x_TD)
        return self._norm("norm", x_TD)

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        return F.rms_norm(x_TD, x_TD.shape[-1:], self.parameters[f"{name}.weight"], self.config.norm_eps)

    def _attention(
        self, layer: str, x_TD: Tensor, pieces: Sequence[tuple[int, int]], rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        x_TD = self._norm(f"{layer}.attn_norm", x_TD)
        q_THC, k_THC, v_THC = (
            F.linear(x_TD, self.parameters[f"{layer}.attn.{name}.weight"]).unflatten(-1, (-1, self.config.head_dim))
            for name in ("wq", "wk", "wv")
        )
        q_THC, k_THC = _rotated(q_THC, rotation), _rotated(k_THC, rotation)
        mixed_THC = torch.cat(
            [
                _causal(q_THC[first:last], k_THC[first:last], v_THC[first:last], pieces_of_one)
                for first, last, pieces_of_one in _runs(pieces)
            ]
        )
        return F.linear(mixed_THC.flatten(1), self.parameters[f"{layer}.attn.wo.weight"])

    def _feed_forward(self, layer: str, x_TD: Tensor) -> Tensor:
        x_TD = self._norm(f"{layer}.ffn_norm", x_TD)
        gate, up, down = (self.parameters[f"{layer}.ffn.{name}.weight"] for name in ("w1", "w3", "w2"))
        return F.linear(F.silu(F.linear(x_TD, gate)) * F.linear(x_TD, up), down)


def _pieces(batch: Sequence[Packed]) -> list[tuple[int, int]]:
    """[start, end) of every document piece in the concatenated batch."""
    found, base = [], 0
    for sequence in batch:
        found += [(base + start, base + end) for start, end in sequence.pieces()]
        base += len(sequence.ids)
    return found


def _runs(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(start, end, pieces): neighbours of one length, which attention takes at once."""
    found: list[tuple[int, int, int]] = []
    for start, end in pieces:
        if found and (found[-1][1] - found[-1][0]) == (end - start) * found[-1][2]:
            found[-1] = (found[-1][0], end, found[-1][2] + 1)
        else:
            found.append((start, end, 1))
    return found


def _causal(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, pieces: int) -> Tensor:
    """Causal attention within each of `pieces` equal parts of the rows."""
    q, k, v = (x.unflatten(0, (pieces, -1)).transpose(1, 2) for x in (q_THC, k_THC, v_THC))
    mixed_PHnC = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed_PHnC.transpose(1, 2).flatten(0, 1)


def _rotation(config: TwinConfig, pieces: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin) [T, 1, C / 2]; positions restart in every piece."""
    positions = torch.cat([torch.arange(end - start) for start, end in pieces])
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = (positions[:, None] * frequencies)[:, None].to(device)
    return angles.cos(), angles.sin()


def _rotated(x_THC: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Halves rotated against each other."""
    cos, sin = (part.to(x_THC.dtype) for part in rotation)
    first, second = x_THC.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
