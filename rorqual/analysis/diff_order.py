"""What a tensor's name says: when it is computed, how many dimensions it has, and which tensors are its kin.

The order is total. Runs (the plain one, `ced.`, `hitH.`) follow each other; inside a run come the prompt, the draft's
windows over the prompt (`mtp.`), the decode steps, the drafts made after them (`spec.`), the cache at the end
(`state.`), and the released decode (`decode_stale.`). Names of no known shape come last, alphabetically.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

PHASES = ("", "mtp.", "decode.", "spec.", "state.", "decode_stale.")
BEFORE_LAYERS = (
    "ids",
    "input_ids",
    "token_types",
    "first_row",
    "engram.token_map",
    "engram.multipliers",
    "engram.primes",
    "image.grid",
    "image.patches",
    "image.vit_out",
    "image.aligner_out",
    "engram_tokens",
    "engram.hash_ids",
    "main_x",
    "embed_out",
)
LAYER = (
    "engram.x_in",
    "engram.gate",
    "x_in",
    "pre_in",
    "attn_pre",
    "attn_post",
    "attn_comb",
    "attn_in",
    "tail_kv",
    "tail_score",
    "latent",
    "compress_kv",
    "index_k",
    "index_weights",
    "index_score",
    "candidates",
    "candidate_margin",
    "topk_idxs",
    "topk_margin",
    "window_kv",
    "window",
    "window_codes_last",
    "attn_out",
    "ffn_post",
    "ffn_comb",
    "ffn_in",
    "moe_indices",
    "moe_weights",
    "moe_margin",
    "ffn_out",
    "pre_out",
    "x_out",
)
"""A margin stands after the selection that it belongs to: it is a diagnosis, nothing is computed from it."""
AFTER_LAYERS = (
    "final_hidden",
    "hidden",
    "main_hidden",
    "final_norm",
    "logits",
    "argmax",
    "output_ids",
    "confidence",
)
PARTS = (".scale", ".codes", ".packed", "")
"""A cache entry's scale is computed first, then its codes, then the values that they stand for."""

SELECTIONS = ("topk_idxs", "moe_indices", "candidates", "argmax", "output_ids")
MARGINS = {"topk_idxs": "topk_margin", "moe_indices": "moe_margin", "candidates": "candidate_margin"}
QUANTISED = {
    "window_kv": "e4m3_e8m0_32",
    "window": "e4m3_e8m0_32",
    "window_codes_last": "e4m3_e8m0_32",
    "compress_kv": "e2m1_e4m3_16",
    "index_k": "e2m1_e8m0_32",
}
"""Cache entries and the formats that the release keeps them in."""
ROTATED = ("window_kv", "compress_kv", "index_k")

_RUN = re.compile(r"(ced\.|hit(\d+)\.)?")
_PHASE = re.compile(r"(decode\.|spec\.|state\.|decode_stale\.)?")
_LAYER = re.compile(r"(layers|mtp)\.(\d+)\.(.+)")
_IMAGE = re.compile(r"image\.(\d+)\.(.+)")
_PART = re.compile(r"\.(scale|codes|packed)$")
_ONE_DIM = (
    "ids",
    "token_types",
    "engram_tokens",
    "engram.token_map",
    "argmax",
    "topk_margin",
    "moe_margin",
    "candidate_margin",
)
_THREE_DIM = ("x_in", "engram.x_in", "x_out", "attn_comb", "ffn_comb", "engram.hash_ids", "engram.primes")

Key = tuple[tuple[int, int], int, tuple[int, int, int], tuple[int, int], tuple[tuple[int, int, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A name taken apart: `hit32.decode.layers.3.topk_idxs` is run "hit32.", phase "decode.", layer 3, and the rest.

    run, phase: with their dots, "" for none. kind: "layers", "mtp", "image" or "". index: of the layer or image, -1 for
    none. last: what remains, without its part; part: ".scale", ".codes", ".packed" or "".
    """

    full: str
    run: str
    phase: str
    kind: str
    index: int
    last: str
    part: str

    @property
    def stem(self) -> str:
        """The full name without its part: what scale, codes and values of one cache entry have in common."""
        return self.full.removesuffix(self.part) if self.part else self.full

    @property
    def scope(self) -> str:
        """Run and phase: tensors of one scope share the meaning of their rows."""
        return self.run + self.phase

    def sibling(self, last: str) -> str:
        """The name of another tensor of the same layer (or of the same scope, outside layers)."""
        return self.stem.removesuffix(self.last) + last

    @property
    def known(self) -> bool:
        return self.last in (LAYER if self.kind in ("layers", "mtp") else BEFORE_LAYERS + AFTER_LAYERS)


def parse(name: str) -> Name:
    """Take a name apart; unknown names have the whole rest as `last`.

    >>> parse("hit32.layers.1.compress_kv.packed").last, parse("image.0.vit_out").last
    ('compress_kv', 'image.vit_out')
    """
    run = _RUN.match(name)
    phase = _PHASE.match(name, run.end() if run else 0)
    assert run is not None and phase is not None, "both patterns match the empty string"
    rest, kind, index = name[phase.end() :], "", -1
    if layer := _LAYER.fullmatch(rest):
        kind, index, rest = layer[1], int(layer[2]), layer[3]
    elif image := _IMAGE.fullmatch(rest):
        kind, index, rest = "image", int(image[1]), f"image.{image[2]}"
    part = _PART.search(rest)
    found = part[0] if part and rest[: part.start()] in LAYER else ""
    return Name(
        full=name,
        run=run[0],
        phase=phase[0],
        kind=kind,
        index=index,
        last=rest.removesuffix(found) if found else rest,
        part=found,
    )


def order_key(name: str) -> Key:
    """Sort key in order of computation: run, phase, before/in/after layers, layer, place in it; then the name."""
    n = parse(name)
    hit = re.search(r"\d+", n.run)
    run = (1 if n.run == "ced." else 2, int(hit[0]) if hit else 0) if n.run else (0, 0)
    if not n.known:
        return (9, 0), 0, (0, 0, 0), (0, 0), natural(name)
    phase = PHASES.index("mtp." if n.kind == "mtp" and not n.phase else n.phase)
    if n.kind in ("layers", "mtp"):
        place = (1, int(n.kind == "mtp"), n.index)
        within = LAYER.index(n.last)
    elif n.last in BEFORE_LAYERS:
        place = (
            (0, BEFORE_LAYERS.index(n.last), 0)
            if n.kind != "image"
            else (0, BEFORE_LAYERS.index("image.grid"), n.index)
        )
        within = BEFORE_LAYERS.index(n.last)
    else:
        place, within = (2, AFTER_LAYERS.index(n.last), 0), 0
    return run, phase, place, (within, PARTS.index(n.part)), natural(name)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts alphabetically but takes digits as numbers: block.9 before block.10."""
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.findall(r"\d+|\D+", name))


def dimensions(name: str) -> int | None:
    """Dimensions of a known tensor without a batch, None for an unknown one.

    Rows come first: positions, groups, decode steps, ring slots. A draft's tensors have [steps, block] in front.
    """
    n = parse(name)
    if not n.known:
        return None
    if n.last == "first_row":
        return 0
    if n.phase == "spec.":
        special = {"input_ids": 1, "output_ids": 2, "confidence": 2}
        if n.last in special:
            return special[n.last]
    base = 1 if n.last in _ONE_DIM or n.last in ("input_ids", "image.grid") else 3 if n.last in _THREE_DIM else 2
    if n.last == "image.patches":
        base = 4
    return base + (n.phase == "spec.")


def causal(name: str) -> bool:
    """Whether row r of this tensor depends on rows up to r only, as far as it has rows of its scope.

    Not so for ring slots (a slot is a position modulo the window), images and constants.
    """
    n = parse(name)
    return n.known and n.phase != "state." and n.kind != "image" and n.last not in BEFORE_LAYERS[3:7]


def kin(name: str, names: Container[str]) -> tuple[str, ...]:
    """Scale, codes, packed and values of the cache entry that `name` belongs to, as far as they are in `names`."""
    stem = parse(name).stem
    return tuple(stem + part for part in PARTS if stem + part != name and stem + part in names)
