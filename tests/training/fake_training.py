"""A learner and data so small that the loop around them is what a test times: an embedding, a router, a linear."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F

from rorqual.config import presets
from rorqual.training.batch import IGNORE, Packed
from rorqual.training.learner import Phase, StepLoss, Totals
from rorqual.training.optim import Optimizers
from rorqual.training.progress import Reporter
from rorqual.training.recipe import DataRecipe, OptimRecipe, Recipe, RunRecipe
from rorqual.training.trainer import Trainer

TEXT = "A whale surfaced, breathed, and dived again; the sea closed over it. " * 40
WIDTH = 8
EXPERTS = 3


def recipe(**run: Any) -> Recipe:
    """16 tokens x 4 sequences a step, products in fp32 whatever the machine; run: fields of RunRecipe."""
    defaults = {"steps": 8, "eval_every": 4, "eval_sequences": 4, "sample_every": 0, "save_every": 2, "autocast": "off"}
    return Recipe(
        name="fake",
        model=presets.load("tiny").without("vision"),
        data=DataRecipe(seq_len=16, batch_tokens=64, micro_tokens=64),
        optim=OptimRecipe(lr=0.02, lr_adam=0.02, lr_table=0.05, warmup=0.25),
        run=RunRecipe(**(defaults | run)),
    )


def byte_tokenizer() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: token for token, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class FakeData:
    """Windows of TEXT; sequence `number` begins at a place that the number decides. Some targets are ignored."""

    def __init__(self, recipe: Recipe, text: str = TEXT) -> None:
        self.recipe = recipe
        self.tokenizer = byte_tokenizer()
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self._ids = torch.tensor(self.tokenizer.encode(text).ids)

    def batch(self, step: int, rank: int, world: int) -> list[Packed]:
        count = self.recipe.data.batch_tokens // self.recipe.seq_len_at(step)
        return [self._packed(step * count + index, self.recipe.seq_len_at(step)) for index in range(rank, count, world)]

    def heldout_batches(self, seq_len: int, limit: int) -> list[Packed]:
        return [self._packed(1_000_000 + index, seq_len) for index in range(limit)]

    def _packed(self, number: int, length: int) -> Packed:
        start = number * 7919 % (len(self._ids) - length - 1)
        targets = self._ids[start + 1 : start + length + 1].clone()
        targets[: number % 5] = IGNORE
        return Packed(ids=self._ids[start : start + length], targets=targets, starts=(0,), number=number)


class FakeLearner:
    """logits = head(embed(id) + expert(table(previous id))); each token has one of three experts by its id.

    Every kind of gradient is there: dense, sparse (the table), None (an expert that nobody was routed to), and a bias
    that a rule moves.
    """

    def __init__(self, seed: int = 0, poison_step: int = -1, vocab: int = 256) -> None:
        generator = torch.Generator().manual_seed(seed)

        def fresh(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * 0.3)

        self.parameters: dict[str, nn.Parameter] = {
            "embed.weight": fresh(vocab, WIDTH),
            "layers.0.engram.embed.weight": fresh(vocab, WIDTH),
            **{f"layers.0.ffn.experts.{expert}.w1.weight": fresh(WIDTH, WIDTH) for expert in range(EXPERTS)},
            "layers.0.ffn.gate.bias": nn.Parameter(torch.zeros(EXPERTS), requires_grad=False),
            "norm.weight": nn.Parameter(torch.ones(WIDTH)),
            "head.weight": fresh(vocab, WIDTH),
        }
        self.poison_step = poison_step
        self.steps = 0
        self.phases: list[Phase] = []

    def loss(self, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
        self.phases.append(phase)
        ids = torch.cat([packed.ids for packed in batch])
        targets = torch.cat([packed.targets for packed in batch])
        logits, chosen = self._logits(ids, torch.cat([packed.ids.roll(1) for packed in batch]))
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") / totals.tokens
        if self.steps == self.poison_step:
            loss = loss * float("nan")
        loads = {"layers.0": torch.bincount(chosen, minlength=EXPERTS)}
        parts = {"loss": loss.item(), "sequences": len(batch) / totals.sequences}
        return StepLoss(total=loss, parts=parts, loads=loads)

    def after_step(self, loads: Mapping[str, Tensor]) -> None:
        self.steps += 1
        load = loads["layers.0"].float()
        with torch.no_grad():
            self.parameters["layers.0.ffn.gate.bias"] += 0.01 * (load.mean() - load).sign()

    @torch.no_grad()
    def token_losses(self, batch: Sequence[Packed], phase: Phase) -> list[Tensor]:
        self.phases.append(phase)
        return [
            F.cross_entropy(
                self._logits(packed.ids, packed.ids.roll(1))[0], packed.targets, ignore_index=IGNORE, reduction="none"
            )
            for packed in batch
        ]

    @torch.no_grad()
    def next_logits(self, ids: Tensor, phase: Phase) -> Tensor:
        return self._logits(ids, ids.roll(1))[0][-1]

    def _logits(self, ids: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        p = self.parameters
        hidden = F.embedding(ids, p["embed.weight"])
        table = F.embedding(before, p["layers.0.engram.embed.weight"], sparse=True)
        # 'z' alone goes to the last expert, and TEXT has none.
        chosen = torch.where(ids == ord("z"), EXPERTS - 1, ids % (EXPERTS - 1))
        outs = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            rows = (chosen == expert).nonzero()[:, 0]
            if len(rows):
                mixed = table[rows] @ p[f"layers.0.ffn.experts.{expert}.w1.weight"].T
                outs = outs.index_add(0, rows, mixed)
        normed = F.rms_norm(hidden + outs, (WIDTH,), p["norm.weight"])
        return normed @ p["head.weight"].T, chosen


def trainer(recipe: Recipe, out: Path, learner: FakeLearner | None = None, **more: Any) -> Trainer:
    """A silent one over the fakes."""
    learner = learner or FakeLearner()
    out.mkdir(parents=True, exist_ok=True)
    return Trainer(
        recipe,
        more.pop("data", None) or FakeData(recipe),
        learner,
        out,
        optimiser=Optimizers(learner.parameters, recipe.optim, {}),
        reporter=Reporter(silent=True),
        **more,
    )
