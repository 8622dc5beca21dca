"""Cases without a model: number formats and products, Sinkhorn coefficients, the n-gram hash. All but Sinkhorn are
compared bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.analysis.compare import Outcome
from rorqual.formats import fp4, fp8
from rorqual.formats.codec import dequantize, quantize
from rorqual.formats.spec import E4M3_E8M0_32, FORMATS
from rorqual.formats.weights import Fp4Weight, Fp8Weight, Weight
from rorqual.model.ngram import IMAGE, NgramHash, compressed_token_map
from rorqual.ops.reference.hyper import split_mixes
from rorqual.ops.reference.linear import linear

SINKHORN_TOLERANCE = 1e-6


def exact(name: str, ours: Tensor | None, theirs: Tensor) -> Outcome:
    """Equal to the last bit (the sign of zero included)."""
    if ours is None or ours.shape != theirs.shape:
        return Outcome(name=name, ok=False, error=float("inf"), unit="absent", note="not produced, or another shape")
    a, b = ours.contiguous(), theirs.contiguous()
    same = (
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        if a.dtype == b.dtype and a.numel()
        else a.dtype == b.dtype
    )
    if same:
        return Outcome(name=name, ok=True, error=0.0, unit="bits")
    both_nan = a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    count = int(((a != b) & ~both_nan).sum())
    return Outcome(name=name, ok=not count, error=float(count), unit="elements")


def formats_case(_folder: Path, stored: Mapping[str, Tensor], _readme: Mapping[str, Any]) -> Iterator[Outcome]:
    """Packed codes, scales and values of every format, tables, weights, and native products."""
    ours: dict[str, Tensor] = {
        "table.e2m1_by_byte": fp4.E2M1_BY_BYTE,
        "table.e4m3_by_byte": fp8.E4M3_BY_BYTE,
        "table.e8m0_by_byte": fp8.E8M0_BY_BYTE,
    }
    for kind in ("f32", "bf16"):
        x = stored[f"{kind}.x"]
        ours[f"{kind}.x"] = x
        for name in ("e2m1_e4m3_16", "e2m1_e8m0_32", "e4m3_e8m0_32"):
            packed = quantize(x, FORMATS[name])
            codes = "codes" if name.startswith("e4m3") else "packed"
            ours[f"{kind}.{name}.{codes}"] = packed.codes
            ours[f"{kind}.{name}.scale"] = packed.scales
            ours[f"{kind}.{name}.dequant"] = dequantize(packed.codes, packed.scales, FORMATS[name])
    weights: dict[str, Weight] = {
        "fp8": Fp8Weight(stored["weight.fp8.q"], stored["weight.fp8.scale"]),
        "fp4": Fp4Weight(stored["weight.fp4.packed"], stored["weight.fp4.scale"]),
    }
    x = stored["gemm.x"]
    packed = quantize(x, E4M3_E8M0_32)
    ours["gemm.x_codes"], ours["gemm.x_scale"] = packed.codes, packed.scales
    for name, weight in weights.items():
        ours[f"weight.{name}.dequant"] = weight.expand()
        ours[f"gemm.{name}.y"] = linear(x.float(), weight, x.shape[0], True).to(torch.bfloat16)
    inputs = {"gemm.x", "weight.fp8.q", "weight.fp8.scale", "weight.fp4.packed", "weight.fp4.scale"}
    for name, value in stored.items():
        if name not in inputs:
            yield exact(name, ours.get(name), value)


def sinkhorn_case(_folder: Path, stored: Mapping[str, Tensor], readme: Mapping[str, Any]) -> Iterator[Outcome]:
    """pre, post and comb of every case within 1e-6."""
    for case in readme["cases"]:
        name = case["name"]
        given = (stored[f"{name}.{part}"] for part in ("mixes", "scale", "base"))
        mixes, scale, base = given
        ours = split_mixes(mixes, scale, base, case["eps"], case["iters"])
        for part, value in zip(("pre", "post", "comb"), ours, strict=True):
            error = float((value - stored[f"{name}.{part}"]).abs().max())
            yield Outcome(name=f"{name}.{part}", ok=error <= SINKHORN_TOLERANCE, error=error, unit="abs")


def engram_hash_case(folder: Path, stored: Mapping[str, Tensor], _readme: Mapping[str, Any]) -> Iterator[Outcome]:
    """Primes, multipliers, offsets and row ids: the release's constants, and three tiny configs."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for stem in ("real", "tiny0", "tiny1", "tiny2"):
        if stem == "real":
            maker, compressed, mask = (
                NgramHash((1, 14), 16_000_000, 4, 8, 99_092, 2),
                stored["real.compressed_ids"],
                "real.mask",
            )
        else:
            config = json.loads((folder / f"{stem}_inference_config.json").read_text())
            token_map = torch.from_numpy(compressed_token_map(tokenizer, config["vocab_size"]))
            yield exact(f"{stem}.token_map", token_map, stored[f"{stem}.token_map"])
            maker = NgramHash(
                config["engram_layer_ids"],
                config["engram_vocab_size"],
                config["engram_max_ngram_size"],
                config["engram_n_heads"],
                config["engram_compressed_vocab_size"],
                int(token_map[config["engram_pad_id"]]),
            )
            compressed, mask = token_map[stored[f"{stem}.input_ids"]], f"{stem}.mask"
        for part in ("primes", "multipliers", "offsets"):
            yield exact(f"{stem}.{part}", getattr(maker, part), stored[f"{stem}.{part}"])
        plain = "real.hash_ids_nomask" if stem == "real" else f"{stem}.hash_ids"
        yield exact(plain, maker.rows(compressed), stored[plain])
        masked = compressed.masked_fill(stored[mask] == 0, IMAGE)
        yield exact(f"{stem}.hash_ids_masked", maker.rows(masked), stored[f"{stem}.hash_ids_masked"])
