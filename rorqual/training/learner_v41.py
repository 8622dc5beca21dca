"""The V4.1 model as a learner: its parameters, its losses, its router's bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from rorqual.config import Mode, ModelConfig
from rorqual.errors import InputError
from rorqual.formats.codec import fake_quantize
from rorqual.layout import PAGE_TOKENS
from rorqual.model.draft import Draft
from rorqual.model.ngram import compressed_token_map, identity_token_map
from rorqual.model.numerics import Numerics
from rorqual.model.run import Run
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.ops.dispatch import Backend, Ops, reference_ops
from rorqual.ops.memory import keep_freed_memory
from rorqual.training.attend import PLAIN, Softmax
from rorqual.training.batch import IGNORE, Packed
from rorqual.training.draft import draft_losses
from rorqual.training.forward import Outputs, backbone, training_rows
from rorqual.training.kv import Choice, FakeQuantize, LearningKV
from rorqual.training.learner import Phase, StepLoss, Totals
from rorqual.training.live import FakeWeight, LiveScope, Rounding, fake_quantize_weight
from rorqual.training.objective import balance_loss, draw, expert_loads, next_token_loss, noised
from rorqual.training.parameters import initial_parameters, trained_specs
from rorqual.training.precision import with_autocast
from rorqual.training.recipe import LossRecipe

DRAFT = "mtp."
"""What the draft's tensors are called by."""

LOGIT_ROWS = 2048
"""Rows whose logits are held at once outside the loss."""


class V41Learner:
    """Trains a config's parameters (fp32) through the modules that inference runs.

    Args:
        config: fitted to the tokenizer (`fit_config`); text only.
        tokenizer: folds Engram's vocabulary; None: the identity, as in a checkpoint without one.
        loss: weights of the losses.
        seed: of the parameters, and of what is drawn for each sequence.
        device: of parameters and batches.
        fast: the compiled twins of the training ops, on a CPU only; False: plain torch, slower, the same numbers within
            fp32 noise. None: what the device has.

    Raises:
        InputError: a config with a vision tower, which this trainer does not train.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        loss: LossRecipe,
        seed: int,
        *,
        device: torch.device | None = None,
        fast: bool | None = None,
    ) -> None:
        if config.vision is not None:
            raise InputError("model: it has a vision tower, which is not trained here; use config.without('vision')")
        self.config, self.tokenizer, self.weights, self.seed = config, tokenizer, loss, seed
        self.parameters: dict[str, nn.Parameter] = initial_parameters(config, seed, device)
        if loss.learn == "draft":
            for name, parameter in self.parameters.items():
                parameter.requires_grad_(parameter.requires_grad and name.startswith(DRAFT))
        device = device or torch.device("cpu")
        fast = device.type == "cpu" if fast is None else fast
        self.ops, self.fake, self.softmax, fake_weight = _operations(fast, device)
        self.rounding = Rounding(fake_weight)
        folded = compressed_token_map(tokenizer, config.vocab_size) if tokenizer and config.engram_layer_ids else None
        token_map = torch.from_numpy(identity_token_map(config.vocab_size) if folded is None else folded)
        scope = LiveScope(self.parameters, trained_specs(config), self.rounding)
        numerics = Numerics(name="fp32")
        with device:
            self.model = Transformer(config, scope, numerics, Backend("plain"), token_map, page_tokens_of(config))

    def loss(self, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
        if self.weights.learn == "draft":
            return self._draft_alone(batch, phase, totals)
        self.rounding.turn(phase.quantise_weights)
        w, model = self.weights, self.model
        inputs = [noised(packed, w.noise, self.config.dspark_noise_token_id, self.seed) for packed in batch]
        rows = training_rows(model, inputs)
        ids = torch.cat([packed.ids for packed in inputs])
        targets = torch.cat([packed.targets for packed in batch])
        window = self.config.sliding_window
        choices = [c for packed in batch for c in draw(packed, w, phase.replay, window, self.seed)]
        run, kv = self._run(phase, choices)
        out = backbone(model, ids, rows, run)
        logits = F.linear(out.normed_TD, model.backbone.head.expand())
        total = next_token_loss(logits, targets, totals)
        parts = {"loss": total.item()}
        lengths = [packed.ids.shape[0] for packed in batch]
        if kv.index_losses:
            indexer = torch.stack(kv.index_losses).sum() / max(1, totals.tokens) / self._index_sources
            total, parts["indexer"] = total + w.indexer * indexer, indexer.item()
        if kv.routing and w.balance:
            balance = balance_loss(kv.routing, lengths, totals)
            total, parts["balance"] = total + w.balance * balance, balance.item()
        loads = expert_loads(kv.routing)
        if phase.draft and model.draft is not None:
            drafts = self._drafts(model.draft, out, batch, phase, totals)
            total, parts, loads = total + drafts.total, parts | drafts.parts, loads | drafts.loads
        return StepLoss(total=total, parts=parts, loads=loads)

    def _draft_alone(self, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
        """No gradient through the backbone, so it runs as it does when it is judged: no noise, no seams."""
        assert self.model.draft is not None and phase.draft
        with torch.no_grad():
            out = self._outputs(batch, phase)
        drafts = self._drafts(self.model.draft, out, batch, phase, totals)
        drafts.parts["loss"] = float(drafts.total.detach())
        return drafts

    def _drafts(self, draft: Draft, out: Outputs, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
        """The draft's losses after a forward of the backbone."""
        assert out.targets_TM is not None
        run, kv = self._run(phase, [])
        found = draft_losses(
            draft,
            self.model.backbone.embed.detach(),
            self.model.backbone.head,
            out.targets_TM,
            out.normed_TD.detach(),
            batch,
            run=run,
            loss=self.weights,
            totals=totals,
            seed=self.seed,
            quantise=phase.quantise_caches,
        )
        return StepLoss(total=found.total, parts=found.parts, loads=expert_loads(kv.routing))

    def after_step(self, loads: Mapping[str, Tensor]) -> None:
        """The router's bias without an auxiliary loss: down by `bias_rate` for a busy expert, up for an idle one."""
        with torch.no_grad():
            for name, load in loads.items():
                bias = self.parameters[f"{name}.ffn.gate.bias"]
                loaded = load.to(bias.device).float()  # counted over processes, on the CPU
                bias.add_((loaded.mean() - loaded).sign(), alpha=self.weights.bias_rate)

    @torch.no_grad()
    def token_losses(self, batch: Sequence[Packed], phase: Phase) -> list[Tensor]:
        targets = torch.cat([packed.targets for packed in batch])
        normed = self._outputs(batch, phase).normed_TD
        head = self.model.backbone.head.expand()
        losses = [
            F.cross_entropy(F.linear(part, head), target, ignore_index=IGNORE, reduction="none")
            for part, target in zip(normed.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
        ]
        return list(torch.cat(losses).split([packed.ids.shape[0] for packed in batch]))

    @torch.no_grad()
    def next_logits(self, ids: Tensor, phase: Phase) -> Tensor:
        packed = Packed(ids=ids, targets=torch.full_like(ids, IGNORE), starts=(0,), number=0)
        return F.linear(self._outputs([packed], phase).normed_TD[-1], self.model.backbone.head.expand())

    def _outputs(self, batch: Sequence[Packed], phase: Phase) -> Outputs:
        """Of the backbone, nothing drawn."""
        self.rounding.turn(phase.quantise_weights)
        rows = training_rows(self.model, batch)
        none = torch.empty(0, dtype=torch.int64, device=rows.positions_T.device)
        choices = [Choice(index_rows=none, row_weight=0.0, seam=None)] * len(rows.segments)
        run, _ = self._run(phase, choices)
        return backbone(self.model, torch.cat([packed.ids for packed in batch]), rows, run)

    def _run(self, phase: Phase, choices: list[Choice]) -> tuple[Run, LearningKV]:
        kv = LearningKV(
            config=self.config, ops=self.ops, fake=self.fake, softmax=self.softmax, phase=phase, choices=choices
        )
        return Run(ops=self.ops, numerics=self.model.numerics, kv=kv, tap=Tap(), hooks=kv), kv

    @property
    def _index_sources(self) -> int:
        return max(1, sum(role.mode in (Mode.FULL, Mode.REINDEX) for role in self.config.backbone_roles))


def page_tokens_of(config: ModelConfig) -> int:
    """The smallest multiple of 128 tokens that is a page of the config (DESIGN 2)."""
    span = max([role.ratio for role in config.backbone_roles if role.ratio] or [1])
    blocks = config.candidate_block_size * span if config.candidate_source_layer_id >= 0 else 1
    return max(PAGE_TOKENS, blocks * -(-PAGE_TOKENS // blocks))


def _operations(fast: bool, device: torch.device) -> tuple[Ops, FakeQuantize, Softmax, FakeWeight]:
    if not fast:
        ops = with_autocast(reference_ops()) if device.type == "cuda" else reference_ops()
        return ops, fake_quantize, PLAIN, fake_quantize_weight
    # Numba takes half a second to import; plain training does without.
    from rorqual.ops.fast import train_attend, train_codec, train_ops

    keep_freed_memory()
    softmax = Softmax(train_attend.joint_softmax, train_attend.joint_softmax_backward)
    return train_ops.training_ops(), train_codec.fake_quantize, softmax, train_codec.fake_quantize_weight
