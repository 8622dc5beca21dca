"""The whole model: backbone, draft, vision tower, n-gram constants, read from one checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from rorqual.config import ModelConfig
from rorqual.errors import ConfigError
from rorqual.layout import KVLayout
from rorqual.model.backbone import Backbone
from rorqual.model.draft import Draft
from rorqual.model.layer import Seam
from rorqual.model.ngram import IMAGE, NgramHash
from rorqual.model.numerics import Numerics
from rorqual.model.run import NOT_YET
from rorqual.model.vision.tower import VisionTower
from rorqual.model.weights import Scope
from rorqual.ops.dispatch import Backend, Regions

PARTS = ("all", "encoder")


class Transformer(nn.Module):
    """Weights and constants; no state of any sequence.

    Args:
        config: what to build.
        scope: the checkpoint's tensors; every one is taken exactly once.
        numerics: fp32 or native.
        backend: which ops serve.
        token_map: int64 [vocab], compressed ids of Engram (SPEC 8).
        page_tokens: tokens a page of the global cache (DESIGN 2).
        part: of `PARTS`. An encoder alone prefills and can be handed over (`rorqual.disagg`); it gives no logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        scope: Scope,
        numerics: Numerics,
        backend: Backend,
        token_map: torch.Tensor,
        page_tokens: int,
        part: str = "all",
    ) -> None:
        super().__init__()
        self.config, self.has_decoder = config, part == "all"
        self.numerics = numerics
        self.backend = backend
        self.layout = KVLayout(config, page_tokens=page_tokens)
        self.token_map = token_map
        self.tokenizer: Tokenizer | None = None
        self.ngram = ngram_hash(config, token_map)
        self._packed_ngrams: Any = NOT_YET
        self.backbone = Backbone(config, scope, encoder_only=not self.has_decoder)
        drafts = config.num_nextn_predict_layers if self.has_decoder else 0
        self.draft = Draft(config, self.backbone.freqs, scope.scope("mtp")) if drafts else None
        self.vision = (
            VisionTower(config.vision, config.hidden_size, scope, numerics.act_dtype) if config.vision else None
        )

    @property
    def device(self) -> torch.device:
        """Where weights and activations are; caches must be too."""
        return self.backbone.embed.device

    def ngrams_for(self, regions: Regions) -> Any:
        """The constants of the n-gram hash as the region takes them."""
        if self._packed_ngrams is NOT_YET:
            made = self.ngram
            assert made is not None
            constants = made.multipliers, made.primes, made.offsets
            self._packed_ngrams = regions.pack_ngrams(self.token_map, constants, pad=made.pad_id, image=IMAGE)
        return self._packed_ngrams


def of_encoder(config: ModelConfig, tensor: str) -> bool:
    """Whether a model that is only an encoder takes the tensor of this name.

    >>> from rorqual.config import presets
    >>> names = "layers.3.attn.wkv.weight", "layers.20.attn.compressor.wkv.weight", "layers.20.attn.wkv.weight"
    >>> [of_encoder(presets.load("v4.1-flash"), name) for name in (*names, "head.weight")]
    [True, True, False, False]
    """
    stem, _, rest = tensor.partition(".")
    if stem != "layers":
        return stem not in ("norm", "head", "mtp")
    layer, _, name = rest.partition(".")
    if int(layer) == config.decoder_start:
        return name.startswith(Seam.TENSORS)
    return int(layer) < config.decoder_start


def ngram_hash(config: ModelConfig, token_map: torch.Tensor) -> NgramHash | None:
    """The hash constants of the config's Engram layers, or None without Engram.

    Raises:
        ConfigError: the tables' rows are not the sums of their primes (SPEC 8): other rows would be read in silence.
    """
    if not config.engram_layer_ids:
        return None
    made = NgramHash(
        config.engram_layer_ids,
        config.engram_vocab_size,
        config.engram_max_ngram_size,
        config.engram_n_heads,
        config.engram_compressed_vocab_size,
        int(token_map[config.engram_pad_token_id]),
    )
    if made.table_rows != config.engram_num_embeddings:
        raise ConfigError(
            f"engram_num_embeddings is {list(config.engram_num_embeddings)}; with engram_vocab_size "
            f"{config.engram_vocab_size} the primes sum to {list(made.table_rows)}"
        )
    return made
