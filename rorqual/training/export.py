"""Trained parameters become a checkpoint in the release's layout: what `rorqual.load` opens.

Parameters are fp32 under the checkpoint's names, without scales; what is written is decided by the config's formats:

    linears        `weights.dense`, `weights.experts`   FP8 in 32 x 32 tiles, packed FP4, or plain
    Engram tables  `weights.engram`                     FP8 in groups of 32 along the row, or plain
    the rest       BF16 (norms, embedding, head, compressors), or F32 (mixing, router biases, sinks)

Each value is rounded once, from fp32 to what is stored. A linear that is written as FP8 or FP4 expands to exactly
`quantize_weight(parameter).expand()`, the value that training with quantised weights multiplied with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.checkpoint.check import nearest
from rorqual.checkpoint.mapping import TORCH_DTYPES
from rorqual.checkpoint.tokenizer import TOKENIZER_FILE
from rorqual.checkpoint.writer import CheckpointWriter, new_checkpoint_folder
from rorqual.config import ModelConfig, WeightFormats
from rorqual.errors import CheckpointError
from rorqual.formats.codec import quantize
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import Fp4Weight, quantize_weight
from rorqual.inventory.names import TensorSpec, expected_tensors, is_quantised_pair, scale_name
from rorqual.model.ngram import compressed_token_map

PLAIN = WeightFormats(dense="bf16", experts="bf16", engram="bf16")


def export(
    parameters: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    folder: Path,
    *,
    quantised: bool = True,
) -> Path:
    """Write config.json, tokenizer.json and model.safetensors to a new or empty folder; nothing is left on an error.

    Args:
        parameters: every tensor that `expected_tensors(config)` names but the scales, fp32, in the shape of its values.
        tokenizer: None for a model of ids only, which with Engram needs the identity as its compressed vocabulary.
        quantised: as `config.weights` says; False writes BF16 where the config has a quantised format anywhere.

    Returns:
        The folder.

    Raises:
        CheckpointError: a parameter is missing, too many, of another shape or not finite; a tokenizer that is not the
            config's; a folder that is not empty or cannot be written.
    """
    if not quantised and not config.weights.is_plain:
        config = config.replace(weights=PLAIN)
    specs = expected_tensors(config)
    _check_parameters(specs, parameters)
    _check_tokenizer(config, tokenizer)
    try:
        with new_checkpoint_folder(folder) as unfinished:
            _write_weights(specs, parameters, unfinished)
            if tokenizer is not None:
                tokenizer.save(str(unfinished / TOKENIZER_FILE), pretty=False)
            text = json.dumps(config.to_hf_dict(), indent=2) + "\n"
            (unfinished / "config.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return folder


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in file order: the tensors of a checkpoint but its scales, unpacked."""
    return _value_shapes(expected_tensors(config))


def _value_shapes(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[int, ...]]:
    return {name: _value_shape(spec) for name, spec in specs.items() if not _is_scale(spec)}


def _is_scale(spec: TensorSpec) -> bool:
    return spec.dtypes[0] == "F8_E8M0"


def _value_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Packed FP4 holds two values a byte."""
    return (spec.shape[0], spec.shape[1] * 2) if spec.dtypes[0] == "I8" else spec.shape


def _check_parameters(specs: Mapping[str, TensorSpec], parameters: Mapping[str, Tensor]) -> None:
    wanted = _value_shapes(specs)
    missing = [name for name in wanted if name not in parameters]
    unexpected = [name for name in parameters if name not in wanted]
    if missing:
        line = f"{missing[0]} is missing from the parameters"
        if unexpected:
            line += f"; they hold {nearest(missing[0], unexpected)}, which the config does not name"
        raise CheckpointError(f"{line} ({len(missing):,} missing, {len(unexpected):,} unexpected in all)")
    if unexpected:
        raise CheckpointError(f"{unexpected[0]} is not a parameter of this config ({len(unexpected):,} such in all)")
    for name, shape in wanted.items():
        tensor = parameters[name]
        if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point:
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise CheckpointError(f"{name} is {found}; the config asks for float32 {list(shape)}")
        if not bool(torch.isfinite(tensor.detach()).all()):
            raise CheckpointError(f"{name} holds NaN or Inf; a checkpoint needs finite values")


def _check_tokenizer(config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """A wrong one would load and read wrong rows of the tables, or ids beyond the embedding."""
    if tokenizer is None:
        if config.engram_layer_ids and config.engram_compressed_vocab_size != config.vocab_size:
            raise CheckpointError(
                f"tokenizer: none given; Engram's compressed vocabulary of {config.engram_compressed_vocab_size} ids "
                "cannot be derived without it"
            )
        return
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > config.vocab_size:
        raise CheckpointError(f"tokenizer: has {size:,} tokens, the config's vocab_size is {config.vocab_size:,}")
    if config.engram_layer_ids:
        found = int(compressed_token_map(tokenizer, config.vocab_size).max()) + 1
        if found != config.engram_compressed_vocab_size:
            raise CheckpointError(
                f"tokenizer: its ids fold into {found}, the config's engram_compressed_vocab_size is "
                f"{config.engram_compressed_vocab_size}: they do not belong together"
            )


def _write_weights(specs: Mapping[str, TensorSpec], parameters: Mapping[str, Tensor], folder: Path) -> None:
    writer = CheckpointWriter(folder, specs.values())
    try:
        for spec in specs.values():
            if not _is_scale(spec):
                for name, tensor in _stored(spec, parameters[spec.name]):
                    writer.write(name, tensor.view(TORCH_DTYPES[specs[name].dtypes[0]]))
        writer.finish()
    finally:
        writer.close()


def _stored(spec: TensorSpec, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One parameter as it lies in the file: itself, or its codes and its scales."""
    values = parameter.detach().to("cpu", torch.float32)
    if not is_quantised_pair(spec):
        yield spec.name, values.to(TORCH_DTYPES[spec.dtypes[0]])
        return
    if spec.part == "engram_tables":
        codes, scales = quantize(values, E4M3_E8M0_32)
    else:
        weight = quantize_weight(values, "fp4" if spec.dtypes[0] == "I8" else "fp8")
        codes, scales = weight.packed if isinstance(weight, Fp4Weight) else weight.codes, weight.scales
    yield spec.name, codes
    yield scale_name(spec.name), scales
