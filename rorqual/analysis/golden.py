"""`rorqual golden CONFIG OUT`: a folder that `rorqual verify` reads, for any config: an oracle for people who port.

The checkpoint is random (seeded) and travels with its tensors; `noise_vs_alternative_order` is measured by running the
same prompt with the other set of ops, whose sums run in another order.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rorqual.analysis.meanings import meaning
from rorqual.analysis.saving import save_tensors
from rorqual.analysis.trace import trace
from rorqual.checkpoint.random import write_random
from rorqual.checkpoint.tokenizer import read_tokenizer
from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.model.load import load
from rorqual.model.ngram import compressed_token_map
from rorqual.model.numerics import MODES
from rorqual.model.transformer import Transformer
from rorqual.model.vision.image import image_patches, image_token_ids, load_image

NOISY = ("logits", "attn_out", "ffn_out", "x_out", "window_kv", "compress_kv", "index_k", "confidence")


def write_golden(
    config: ModelConfig,
    out: Path,
    *,
    seed: int = 0,
    prompt_tokens: int = 97,
    decode_steps: int = 25,
    numerics: str = "fp32",
    page_tokens: int = 16,
) -> dict[str, int]:
    """Write checkpoint, expected.safetensors and README.json; returns counts for the caller to print.

    Raises:
        InputError: `out` is there already, counts below 1, or more positions than the model has.
    """
    if out.exists():
        raise InputError(f"out: {out} exists already; give a new folder")
    if numerics not in MODES:
        raise InputError(f"numerics: {numerics!r} is not one of {', '.join(MODES)}")
    if prompt_tokens < 1 or decode_steps < 1 or prompt_tokens + decode_steps > config.max_position_embeddings:
        raise InputError(
            f"prompt_tokens + decode_steps: {prompt_tokens} + {decode_steps}; "
            f"legal: each at least 1, at most {config.max_position_embeddings} together"
        )
    if not out.parent.is_dir():
        raise InputError(f"out: the folder {out.parent} does not exist")
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    part = scratch / "case"
    try:
        weights: Literal["native", "plain"] = "native" if numerics == "native" else "plain"
        write_random(config, part, seed, weights=weights, compressed_size=partial(_distinct, config))
        counts = _fill(part, out.name, seed, prompt_tokens, decode_steps, numerics, page_tokens)
        part.rename(out)
        return counts
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _distinct(config: ModelConfig, tokenizer: Path) -> int:
    return int(compressed_token_map(read_tokenizer(tokenizer), config.vocab_size).max()) + 1


def _fill(
    folder: Path, case: str, seed: int, prompt_tokens: int, decode_steps: int, numerics: str, page_tokens: int
) -> dict[str, int]:
    model = load(folder, numerics=numerics, page_tokens=page_tokens, kernels="plain")
    prompt, forced, images = _inputs(model, folder, seed, prompt_tokens, decode_steps)
    spec = model.draft is not None
    tensors = trace(model, prompt, forced, spec=spec, images=images)
    if any(s.ratio > 1 for s in model.config.kv_sources):
        stale = "decode_stale.logits,decode_stale.layers.*.topk_idxs"
        tensors |= trace(model, prompt, forced, images=images, stale_decode=True, select=stale)
    other = load(folder, numerics=numerics, page_tokens=page_tokens, kernels="fast")
    noise = _noise(tensors, trace(other, prompt, forced, spec=spec, images=images))
    save_tensors(tensors, folder / "expected.safetensors")
    readme = {
        "case": case,
        "mode": numerics,
        "seed": seed,
        "page_tokens": page_tokens,
        "prompt_len": prompt_tokens,
        "decode_steps": decode_steps,
        "checks": {"noise_vs_alternative_order": noise},
        "tensors": {
            name: {
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "meaning": meaning(name),
            }
            for name, value in tensors.items()
        },
    }
    (folder / "README.json").write_text(json.dumps(readme, indent=1) + "\n")
    return {"tensors": len(tensors), "bytes": sum(t.numel() * t.element_size() for t in tensors.values())}


def _inputs(
    model: Transformer, folder: Path, seed: int, prompt_tokens: int, decode_steps: int
) -> tuple[Tensor, Tensor, list[Path]]:
    """A random prompt and continuation; with a vision tower, one image in the prompt where it fits."""
    config = model.config
    random = np.random.default_rng(seed)
    legal = np.array([i for i in range(config.vocab_size) if i != config.image_token_id])
    prompt = torch.from_numpy(random.choice(legal, prompt_tokens)).to(torch.int64)
    forced = torch.from_numpy(random.choice(legal, decode_steps)).to(torch.int64)
    if config.vision is None:
        return prompt, forced, []
    pixels = random.integers(0, 256, (30, 40, 3), dtype=np.uint8)
    grid = image_patches(load_image(Image.fromarray(pixels)), config.vision).grid
    if grid.tokens + 2 > prompt_tokens:
        return prompt, forced, []
    Image.fromarray(pixels).save(folder / "image_0.png")
    start = (prompt_tokens - grid.tokens) // 2
    prompt[start : start + grid.tokens] = image_token_ids(grid, config.image_token_id)
    return prompt, forced, [folder / "image_0.png"]


def _noise(ours: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Any]:
    """max_abs and relative RMS between two orders of summation, of the tensors where it says something."""
    found: dict[str, Any] = {}
    for name, value in ours.items():
        if name.rpartition(".")[2] not in NOISY or not value.is_floating_point() or name not in other:
            continue
        gap = (value.double() - other[name].double()).abs()
        scale = float(value.double().square().mean().sqrt()) or 1.0
        found[name] = {"max_abs": float(gap.max()), "rms_rel": float(gap.square().mean().sqrt()) / scale}
    return found
