"""The checkpoint that a benchmark runs on: the shipped one, another folder, or a random one that is gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from rorqual.checkpoint.random import write_random
from rorqual.checkpoint.shipped import shipped_model
from rorqual.config import ModelConfig, presets
from rorqual.errors import InputError
from rorqual.inventory.names import expected_tensors
from rorqual.inventory.parameters import active_parameters


@contextmanager
def checkpoint(given: Path | None, random: str | None) -> Iterator[Path]:
    """`given`; or a folder with a random checkpoint of the preset `random` (seed 0); or the shipped model.

    Raises:
        InputError: `given` is not a folder. ConfigError: no such preset.
        CheckpointError: neither is given, and this installation lacks the shipped model.
    """
    if given is not None:
        if not given.is_dir():
            raise InputError(f"model: {given} is not a folder; legal: a checkpoint folder")
        yield given
    elif random is None:
        yield shipped_model()
    else:
        config = presets.load(random)
        with TemporaryDirectory(prefix="rorqual-bench-") as parent:
            folder = Path(parent) / random
            write_random(config, folder, seed=0)
            yield folder


def check_positions(config: ModelConfig, tokens: int, flag: str = "model") -> None:
    """Raise InputError where a checkpoint has fewer positions than a benchmark needs."""
    if config.max_position_embeddings < tokens:
        raise InputError(f"{flag}: has {config.max_position_embeddings} positions; the benchmark needs {tokens}")


def random_ids(config: ModelConfig, count: int, seed: int) -> Tensor:
    """int64 [count] of ordinary text ids."""
    ids = torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))
    special = torch.tensor([config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id])
    ordinary = next(i for i in range(config.vocab_size) if i not in special.tolist())
    return ids.masked_fill(torch.isin(ids, special), ordinary)


def stored_bytes(config: ModelConfig) -> int:
    """Bytes of all tensors of a checkpoint, scales included."""
    return sum(spec.nbytes for spec in expected_tensors(config).values())


def active_bytes(config: ModelConfig) -> int:
    """Packed bytes that one decoded token is multiplied with: all layers, the chosen experts only, and the head."""
    fixed = routed = 0
    for name, spec in expected_tensors(config).items():
        if spec.part == "experts":
            routed += spec.nbytes
        elif name.startswith(("layers.", "head.")) and spec.part != "engram_tables":
            fixed += spec.nbytes
    return fixed + routed * config.num_experts_per_tok // max(1, config.n_routed_experts)


def prefill_flops(config: ModelConfig, tokens: int, mode: str) -> int:
    """2 x the parameters that each prompt token meets: in `ced` the decoder runs on the last window alone."""
    active = active_parameters(config)
    if mode == "full":
        return 2 * (active.decode * tokens + active.head)
    window = min(tokens, config.sliding_window)
    decoder = (active.decode - active.prefill) * window + active.seam * (tokens - window)
    return 2 * (active.prefill * tokens + decoder + active.head)
