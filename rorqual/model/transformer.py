"""The whole model: backbone, draft, vision tower, n-gram constants, read from one checkpoint."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import nn

from rorqual.config import ModelConfig
from rorqual.errors import ConfigError
from rorqual.layout import KVLayout
from rorqual.model.backbone import Backbone
from rorqual.model.draft import Draft
from rorqual.model.ngram import NgramHash
from rorqual.model.numerics import Numerics
from rorqual.model.vision.tower import VisionTower
from rorqual.model.weights import Scope
from rorqual.ops.dispatch import Backend


class Transformer(nn.Module):
    """Weights and constants; no state of any sequence.

    Args:
        config: what to build.
        scope: the checkpoint's tensors; every one is taken exactly once.
        numerics: fp32 or native.
        backend: which ops serve.
        token_map: int64 [vocab], compressed ids of Engram (SPEC 8).
        page_tokens: tokens a page of the global cache (DESIGN 2).
    """

    def __init__(
        self,
        config: ModelConfig,
        scope: Scope,
        numerics: Numerics,
        backend: Backend,
        token_map: torch.Tensor,
        page_tokens: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.numerics = numerics
        self.backend = backend
        self.layout = KVLayout(config, page_tokens=page_tokens)
        self.token_map = token_map
        self.tokenizer: Tokenizer | None = None
        self.ngram = ngram_hash(config, token_map)
        self.backbone = Backbone(config, scope)
        drafts = config.num_nextn_predict_layers
        self.draft = Draft(config, self.backbone.freqs, scope.scope("mtp")) if drafts else None
        self.vision = (
            VisionTower(config.vision, config.hidden_size, scope, numerics.act_dtype) if config.vision else None
        )

    @property
    def device(self) -> torch.device:
        """Where weights and activations are; caches must be too."""
        return self.backbone.embed.device


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
