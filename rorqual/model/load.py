"""`rorqual.load`: a checkpoint folder becomes a model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from rorqual.checkpoint.load import Checkpoint
from rorqual.checkpoint.shipped import shipped_model
from rorqual.checkpoint.tokenizer import read_tokenizer
from rorqual.config import ModelConfig
from rorqual.errors import CheckpointError, InputError
from rorqual.layout import PAGE_TOKENS
from rorqual.model.ngram import compressed_token_map, identity_token_map
from rorqual.model.numerics import Numerics
from rorqual.model.transformer import PARTS, Transformer, of_encoder
from rorqual.ops.dispatch import Backend
from rorqual.ops.memory import STEP_BYTES, keep_freed_memory


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    numerics: str = "fp32",
    device: str = "cpu",
    page_tokens: int = PAGE_TOKENS,
    kernels: str = "auto",
    config: ModelConfig | None = None,
    part: str = "all",
) -> Transformer:
    """Open a checkpoint in the release's layout and build its model; weights stay packed and memory-mapped.

    On Linux the process keeps up to 256 MB of memory that it frees (`rorqual.ops.memory`).

    Args:
        path: folder with config.json (or inference_config.json), model.safetensors or shards with an index, and
            tokenizer.json where text or Engram is used; None is the model that ships with the package.
        numerics: "fp32" (activations fp32) or "native" (bf16 activations, FP8 GEMM inputs).
        device: "cpu", or "cuda" (the current device): weights are copied to it, Engram tables stay in their file.
        page_tokens: tokens a page; a multiple of every ratio and of the candidate span.
        kernels: "fast", "plain" (the torch twins), or "auto" (twins until the kernels are compiled). On CUDA the
            kernels are Triton's, and "auto" takes the twins where it is not installed.
        config: read the same weights as this model instead of the folder's own: other cache formats, or no candidate
            pool (`ModelConfig.from_json(folder).without("candidates")`). Its tensors must be the folder's.
        part: "all", or "encoder": what a prefill worker runs. Names, shapes and dtypes of all tensors are checked; what
            decoder, drafts and head hold is never read.

    Raises:
        InputError, ConfigError, CheckpointError: one line that names the thing and the legal values.
    """
    folder = shipped_model() if path is None else Path(path)
    if not folder.is_dir():
        raise InputError(f"model: {folder} is not a folder; a checkpoint is a folder with config.json and safetensors")
    if part not in PARTS:
        raise InputError(f"part: {part!r} is not legal; legal: {', '.join(PARTS)}")
    place = chosen_device(device)
    mode = Numerics(name=numerics)
    backend = Backend(kernels, place)
    config = config or ModelConfig.from_json(folder)
    if part == "encoder" and config.decoder_start == config.num_hidden_layers:
        raise InputError("part: this model has no KV source and so no decoder of its own; legal: all")
    file = folder / "tokenizer.json"
    tokenizer = read_tokenizer(file) if file.exists() else None
    token_map = engram_token_map(config, tokenizer, folder).to(place)
    checkpoint = Checkpoint.open(folder, config, place)
    with place:  # what a module computes when it is made, frequencies, is made there
        model = Transformer(config, checkpoint.scope(), mode, backend, token_map, page_tokens, part)
    checkpoint.assert_all_taken(partial(of_encoder, config) if part == "encoder" else None)
    model.tokenizer = tokenizer
    keep_freed_memory(STEP_BYTES)
    return model.eval().requires_grad_(False)


def chosen_device(name: str) -> torch.device:
    """cpu or cuda. Raises InputError for another name, and where there is no such device."""
    if name == "cpu":
        return torch.device(name)
    if name != "cuda":
        raise InputError(f"device: {name!r} is not supported by this version; legal: cpu, cuda")
    if not torch.cuda.is_available():
        raise InputError("device: 'cuda' was asked for and there is none; legal here: cpu")
    return torch.device("cuda", torch.cuda.current_device())


def engram_token_map(config: ModelConfig, tokenizer: Tokenizer | None, folder: Path) -> torch.Tensor:
    """Compressed ids (SPEC 8) from the tokenizer; the identity where there is none and the config says so."""
    if not config.engram_layer_ids:
        return torch.from_numpy(identity_token_map(config.vocab_size))
    if tokenizer is None:
        if config.engram_compressed_vocab_size != config.vocab_size:
            raise CheckpointError(
                f"{folder}: tokenizer.json is missing; Engram's compressed vocabulary of "
                f"{config.engram_compressed_vocab_size} ids cannot be derived without it"
            )
        return torch.from_numpy(identity_token_map(config.vocab_size))
    found = compressed_token_map(tokenizer, config.vocab_size, compressed_vocab=config.engram_compressed_vocab_size)
    return torch.from_numpy(found)
