"""A random checkpoint of any config, in the release's layout: what `rorqual init` writes.

It is written as a stream of blocks of about a million values, so memory does not depend on the size of the model, and a
folder appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rorqual.checkpoint.initial import Normal, distribution, draw, favour_own_copy
from rorqual.checkpoint.mapping import TORCH_DTYPES
from rorqual.checkpoint.tokenizer import copy_tokenizer, write_byte_tokenizer
from rorqual.checkpoint.writer import CheckpointWriter, new_checkpoint_folder
from rorqual.config import ModelConfig, WeightFormats
from rorqual.errors import CheckpointError, InputError
from rorqual.formats.codec import quantize
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import Fp8Weight, quantize_weight
from rorqual.inventory.names import GROUP, TensorSpec, expected_tensors, is_quantised_pair, scale_name

Progress = Callable[[int, int], None]
"""(bytes written, bytes in all)."""

LARGE_BYTES = 32 * 2**30
"""A larger checkpoint is written only when asked for explicitly."""

BLOCK_VALUES = 2**20
# Torch runs operations on fewer values than this in the calling thread, so our own threads do not fight over its pool.
_SERIAL_VALUES = 2**15


def write_random(
    config: ModelConfig,
    out_dir: str | Path,
    seed: int = 0,
    *,
    layers: int | Sequence[int] | None = None,
    experts: int | None = None,
    weights: Literal["native", "plain"] | None = None,
    shard_bytes: int | None = None,
    tokenizer: str | Path | None = None,
    compressed_size: Callable[[Path], int] | None = None,
    allow_large: bool = False,
    progress: Progress | None = None,
) -> ModelConfig:
    """Write config.json, inference_config.json, tokenizer.json and weights to a new folder; returns the config written.

    Args:
        seed: equal seeds give equal bytes, whatever `shard_bytes` is.
        layers: a depth cut, the first so many layers or a list of them (`ModelConfig.with_depth`).
        experts: routed experts a layer, drafts included, where the config has more.
        weights: "native" (FP8, FP4 experts, FP8 tables) or "plain" (BF16); None keeps the config's formats.
        shard_bytes: start a new file before passing this size; None writes one `model.safetensors`.
        tokenizer: a tokenizer.json to copy; None writes one of single bytes if the vocabulary has room for it.
        compressed_size: path of the tokenizer -> distinct keys of Engram's vocabulary (SPEC 8), for the config. Without
            it a tokenizer that is given must be the config's own, and none is written for a model with Engram.
        allow_large: write more than `LARGE_BYTES`.

    Raises:
        ConfigError, InputError: arguments that do not fit the config.
        CheckpointError: a folder that is not empty, a checkpoint too large, a full disk. Nothing is left behind then.
    """
    if shard_bytes is not None and shard_bytes < 1:
        raise InputError(f"shard_bytes is {shard_bytes}; legal: 1 or more")
    config = _reduced(config, layers, experts, weights)
    out = Path(out_dir)
    _check_size(config, out, allow_large)
    try:
        with new_checkpoint_folder(out) as folder:
            config = _write_tokenizer(config, folder, tokenizer, compressed_size)
            _write_weights(config, folder, seed, shard_bytes, progress)
            _write_json(folder / "inference_config.json", config.to_inference_dict())
            _write_json(folder / "config.json", config.to_hf_dict())
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error.strerror or error}") from None
    return config


def _reduced(
    config: ModelConfig, layers: int | Sequence[int] | None, experts: int | None, weights: str | None
) -> ModelConfig:
    if layers is not None:
        config = config.with_depth(range(layers) if isinstance(layers, int) else layers)
    if experts is not None:
        if experts < 0:
            raise InputError(f"experts is {experts}; legal: 0 or more")
        routed, drafts = min(experts, config.n_routed_experts), min(experts, config.dspark_n_routed_experts)
        config = config.replace(
            n_routed_experts=routed,
            num_experts_per_tok=min(routed, config.num_experts_per_tok),
            dspark_n_routed_experts=drafts,
            dspark_num_experts_per_tok=min(drafts, config.dspark_num_experts_per_tok),
        )
    if weights is not None:
        formats = {
            "native": WeightFormats(dense="fp8", experts="fp4", engram="fp8"),
            "plain": WeightFormats(dense="bf16", experts="bf16", engram="bf16"),
        }
        if weights not in formats:
            raise InputError(f"weights is {weights!r}; legal: {', '.join(formats)}")
        config = config.replace(weights=formats[weights])
    return config


def _check_size(config: ModelConfig, out: Path, allow_large: bool) -> None:
    specs = expected_tensors(config).values()
    total, largest = sum(spec.nbytes for spec in specs), max(specs, key=lambda spec: spec.nbytes)
    if total > LARGE_BYTES and not allow_large:
        raise CheckpointError(
            f"{out}: would take {total / 1e9:,.1f} GB (largest: {largest.name}, {largest.nbytes / 1e9:,.1f} GB), more "
            f"than the {LARGE_BYTES / 1e9:,.1f} GB written unasked; take fewer layers or experts, or allow large ones"
        )
    parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(parent).free
    if total > free:
        raise CheckpointError(f"{out}: needs {total / 1e9:,.1f} GB, the disk has {free / 1e9:,.1f} GB free")


def _write_tokenizer(
    config: ModelConfig, folder: Path, source: str | Path | None, compressed_size: Callable[[Path], int] | None
) -> ModelConfig:
    """The config, its compressed vocabulary that of the tokenizer written; without one the map is the identity."""
    engram = bool(config.engram_layer_ids)
    path: Path | None = None
    if source is not None:
        path = copy_tokenizer(Path(source), folder, config)
    elif compressed_size is not None or not engram:
        path = write_byte_tokenizer(folder, config)
    if engram and path is None:
        return config.replace(engram_compressed_vocab_size=config.vocab_size)
    if engram and path is not None and compressed_size is not None:
        return config.replace(engram_compressed_vocab_size=compressed_size(path))
    return config


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


class _Block(NamedTuple):
    """Rows [first, first + rows) of one weight, with the scale that belongs to it."""

    spec: TensorSpec
    first: int
    rows: int


class _Written(NamedTuple):
    """A piece of a tensor, ready to be written."""

    name: str
    tensor: Tensor
    first_row: int


def _write_weights(
    config: ModelConfig, folder: Path, seed: int, shard_bytes: int | None, progress: Progress | None
) -> None:
    specs = expected_tensors(config)
    total, done = sum(spec.nbytes for spec in specs.values()), 0
    writer = CheckpointWriter(folder, specs.values(), shard_bytes)
    try:
        for pieces in _computed(config, _blocks(specs.values()), seed):
            for piece in pieces:
                writer.write(*piece)
                done += piece.tensor.nbytes
            if progress is not None:
                progress(done, total)
        writer.finish()
    finally:
        writer.close()


def _blocks(specs: Iterable[TensorSpec]) -> Iterator[_Block]:
    """Cut every weight into blocks by its shape alone; scales come with their weights. Whole FP8 tiles in each."""
    for spec in specs:
        if spec.dtypes[0] == "F8_E8M0":
            continue
        rows = spec.shape[0]
        width = math.prod(_value_shape(spec, rows)[1:])
        step = max(GROUP, BLOCK_VALUES // width // GROUP * GROUP)
        for first in range(0, rows, step):
            yield _Block(spec, first, min(step, rows - first))


def _value_shape(spec: TensorSpec, rows: int) -> tuple[int, ...]:
    """Shape of `rows` rows in values: packed FP4 holds two a byte."""
    if spec.dtypes[0] == "I8":
        return rows, spec.shape[1] * 2
    return (rows, *spec.shape[1:])


def _computed(config: ModelConfig, blocks: Iterable[_Block], seed: int) -> Iterator[list[_Written]]:
    """The blocks' bytes, in order, computed by a few threads that keep only a little ahead of the writer."""
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[list[_Written]]] = deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(_compute, config, block, seed))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _compute(config: ModelConfig, block: _Block, seed: int) -> list[_Written]:
    spec = block.spec
    shape = _value_shape(spec, block.rows)
    normal: Normal = distribution(spec, shape[-1], config)
    drawn = draw(seed, spec.name, block.first, shape, normal)
    if spec.name.endswith("_base"):
        favour_own_copy(drawn, config.hc_mult)
    values = torch.from_numpy(drawn)
    if not is_quantised_pair(spec):
        return [_Written(spec.name, values.to(TORCH_DTYPES[spec.dtypes[0]]), block.first)]
    if spec.part == "engram_tables":
        codes, scales = _quantise_rows(values)
        first_scale = block.first
    else:
        codes, scales = _quantise(values, packed=spec.dtypes[0] == "I8")
        first_scale = block.first if spec.dtypes[0] == "I8" else block.first // GROUP
    codes = codes.view(TORCH_DTYPES[spec.dtypes[0]])
    return [
        _Written(spec.name, codes, block.first),
        _Written(scale_name(spec.name), scales.view(TORCH_DTYPES["F8_E8M0"]), first_scale),
    ]


def _quantise_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """A table's rows: groups of 32 along the row."""
    step = max(1, _SERIAL_VALUES // values.shape[1])
    parts = [quantize(rows, E4M3_E8M0_32) for rows in torch.split(values, step)]
    return torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])


def _quantise(values: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """A linear weight, tile by tile: FP8 tiles and FP4 groups end at every 32nd row and column."""
    codes, scales = [], []
    for rows in torch.split(values, GROUP):
        columns = torch.split(rows, _SERIAL_VALUES // GROUP, dim=1)
        parts = [quantize_weight(part, "fp4" if packed else "fp8") for part in columns]
        codes.append(torch.cat([part.codes if isinstance(part, Fp8Weight) else part.packed for part in parts], dim=1))
        scales.append(torch.cat([part.scales for part in parts], dim=1))
    return torch.cat(codes), torch.cat(scales)
