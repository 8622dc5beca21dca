"""The backbone and its one seam: causal encoder-decoder prefill (SPEC 11).

Encoder layers run on every row; at the last KV source every row leaves its global KV; the decoder runs on the rows it
is given. Layers do not know which of the three is happening.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rorqual.config import ModelConfig, Part
from rorqual.formats.weights import Weight
from rorqual.model.layer import Layer, Seam
from rorqual.model.rope import frequencies
from rorqual.model.rows import Rows
from rorqual.model.run import NOT_YET, Carry, Run
from rorqual.model.weights import Scope

# T rows, S residual copies, D hidden


def copy_mean(x_TSD: Tensor) -> Tensor:
    """fp32 mean over the copies [T, D], added in order so that a row's bits are its own."""
    total = x_TSD[:, 0].float()
    for copy in range(1, x_TSD.shape[1]):
        total = total + x_TSD[:, copy].float()
    return total / x_TSD.shape[1]


class Backbone(nn.Module):
    """Embedding, layers in two parts, output norm and head.

    encoder_only: neither decoder nor norm nor head; of the decoder's first layer, the global KV.
    """

    norm: Tensor
    head: Weight

    def __init__(self, config: ModelConfig, scope: Scope, encoder_only: bool = False) -> None:
        super().__init__()
        self.config = config
        self.eps = config.rms_norm_eps
        self.freqs = (frequencies(config, False), frequencies(config, True))
        self.embed = scope.tensor("embed.weight")
        parts = (Part.ENCODER,) if encoder_only else (Part.ENCODER, Part.DECODER)
        layers = [
            Layer(config, role, self.freqs, scope.scope(f"layers.{role.layer_id}"))
            for role in config.roles
            if role.part in parts
        ]
        self.source = None
        if encoder_only:
            role = config.roles[config.decoder_start]
            self.source = Seam(config, role, self.freqs, scope.scope(f"layers.{role.layer_id}"))
        else:
            self.norm = scope.param("norm.weight")
            self.head = scope.weight("head")
        self.encoder = nn.ModuleList(layers[: config.decoder_start])
        self.decoder = nn.ModuleList(layers[config.decoder_start :])
        self._packed: Any = NOT_YET
        self.targets = set(config.dspark_target_layer_ids) if config.num_nextn_predict_layers else set()

    @property
    def has_seam(self) -> bool:
        """Some layers are the decoder's, whether they were loaded or not."""
        return bool(self.decoder) or self.source is not None

    @property
    def first_of_decoder(self) -> Layer | Seam:
        """The last KV source, of which an encoder alone has what writes global KV."""
        first = self.source or self.decoder[0]
        assert isinstance(first, Layer | Seam)
        return first

    def run_layers(
        self, layers: nn.ModuleList, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, carry: Carry, run: Run
    ) -> tuple[Tensor, Tensor]:
        """(stream, pre) through `layers`; keeps the copies' mean entering each DSpark target layer in the carry."""
        for layer in layers:
            assert isinstance(layer, Layer)
            if layer.role.layer_id in self.targets:
                few = run.regions is not None and rows.short_rows == len(rows)
                mean = run.regions.mean(x_TSD) if few and run.regions is not None else copy_mean(x_TSD)
                carry.hidden[layer.role.layer_id] = run.numerics.round(mean)
            # By name, here and in the layers: nothing hooks these modules, and a decoded token notices what torch does
            # to look for hooks.
            x_TSD, pre_TS = layer.forward(x_TSD, pre_TS, rows, carry, run)
        return x_TSD, pre_TS

    def seam(self, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, run: Run) -> None:
        """The last source's global KV for every row: eq. (1) of the report, C = H W^KV on the encoder's output."""
        self.first_of_decoder.write_global(x_TSD, pre_TS, rows, run)

    def hidden(self, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, run: Run) -> Tensor:
        """The stream collapsed by the last `pre` [T, D], before the output norm."""
        return run.record("final_hidden", run.numerics.round(run.ops.hyper_collapse(x_TSD, pre_TS)), rows)

    def logits(self, hidden_TD: Tensor, short_rows: int, run: Run) -> tuple[Tensor, Tensor]:
        """(normed hidden [T, D], fp32 logits [T, V]); the head runs in fp32 in both numerics."""
        normed = run.norm(hidden_TD, self.norm, self.eps)
        return normed, run.ops.linear(normed.float(), self.head, short_rows, False)

    def few_logits(self, x_TSD: Tensor, pre_TS: Tensor, run: Run) -> Tensor | None:
        """`hidden` and `logits` in one kernel: fp32 logits [T, V] of a few rows; None where there is none for them."""
        regions = run.regions
        if regions is None:
            return None
        if self._packed is NOT_YET:
            self._packed = regions.pack_head(self.head, self.norm, eps=self.eps)
        return None if self._packed is None else regions.head(x_TSD, pre_TS, self._packed, run.numerics.native)
