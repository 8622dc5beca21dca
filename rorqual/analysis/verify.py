"""`rorqual verify CASE`: a folder of stored tensors against our own computation.

Each kind of case says what it stores in README.json. Model cases run `trace` once for each kind of run that their
names call for, holding only what is compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rorqual.analysis.compare import (
    NATIVE_MARGIN,
    Outcome,
    excess,
    fp32_outcome,
    group_of,
    native_outcome,
)
from rorqual.analysis.trace import trace
from rorqual.analysis.verify_parts import engram_hash_case, formats_case, sinkhorn_case
from rorqual.errors import InputError
from rorqual.model.load import load
from rorqual.model.tap import Recorder, Tie
from rorqual.model.transformer import Transformer

PAGE_TOKENS = 16
"""The goldens' windows are 16 tokens; their pages are as small. A case may state its own `page_tokens`."""


MOST_TIES = 16
"""Rounding ties tried in one run before giving up."""


@dataclass(slots=True)
class Report:
    """Outcomes of one case, in order of the case's tensors, and the rounding ties that were resolved its way."""

    case: str
    outcomes: list[Outcome] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)

    @property
    def passed(self) -> int:
        return sum(o.ok for o in self.outcomes)

    @property
    def failed(self) -> int:
        return len(self.outcomes) - self.passed

    def groups(self) -> dict[str, list[Outcome]]:
        """Outcomes by tensor group, worst first within each."""
        found: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            found.setdefault(group_of(outcome.name), []).append(outcome)
        return {name: sorted(os, key=lambda o: (o.ok, -o.error)) for name, os in found.items()}


@dataclass(frozen=True, slots=True)
class Case:
    """A folder: its README.json and its stored tensors."""

    folder: Path
    readme: Mapping[str, Any]
    stored: Mapping[str, Tensor]

    @property
    def native(self) -> bool:
        return self.readme.get("mode") == "native"

    def noise(self, name: str) -> float:
        """Relative RMS noise between two orders of summation, as the case states it."""
        noise = self.readme.get("checks", {}).get("noise_vs_alternative_order", {})
        return float(noise.get(name, {}).get("rms_rel", 0.0))


def open_case(folder: str | Path) -> Case:
    """Read a case folder.

    Raises:
        InputError: no such folder, or a file of it is missing or not readable.
    """
    path = Path(folder)
    for file in ("README.json", "expected.safetensors"):
        if not (path / file).is_file():
            raise InputError(
                f"case: {path / file} does not exist; a case folder has README.json and expected.safetensors"
            )
    try:
        readme = json.loads((path / "README.json").read_text())
        stored = load_file(path / "expected.safetensors")
    except Exception as error:
        raise InputError(f"case: {path} cannot be read ({error})") from error
    return Case(path, readme, stored)


def verify(folder: str | Path, *, kernels: str = "fast", model: Transformer | None = None) -> Report:
    """Compare every tensor of a case. `kernels` as in `load`; `model` reuses a loaded one of this folder."""
    case = open_case(folder)
    parts: dict[str, Callable[[Path, Mapping[str, Tensor], Mapping[str, Any]], Iterable[Outcome]]] = {
        "formats": formats_case,
        "sinkhorn": sinkhorn_case,
        "engram-hash": engram_hash_case,
    }
    name = str(case.readme.get("case", case.folder.name))
    if name in parts and not (case.folder / "model.safetensors").exists():
        return Report(name, list(parts[name](case.folder, case.stored, case.readme)))
    if model is None:
        mode = str(case.readme.get("mode", "fp32"))
        page_tokens = case.readme.get("page_tokens", PAGE_TOKENS)
        if type(page_tokens) is not int:
            raise InputError(f"case: {case.folder / 'README.json'}: page_tokens is {page_tokens!r}, must be an integer")
        model = load(case.folder, numerics=mode, page_tokens=page_tokens, kernels=kernels)
    ours, ties = run_case(case, model)
    return Report(name, [outcome(case, key, ours) for key in case.stored], ties)


def run_case(case: Case, model: Transformer) -> tuple[dict[str, Tensor], list[Tie]]:
    """Every stored name, from as few runs as the names call for."""
    names = set(case.stored)
    ids = case.stored["input_ids"][0]
    forced = case.stored.get("decode.ids")
    images = sorted(case.folder.glob("image_*.png"))
    ours: dict[str, Tensor] = {}
    if "hits" in case.readme:
        runs: list[dict[str, Any]] = [{"prefill": "ced"}, *({"prefill": "ced", "hit": h} for h in case.readme["hits"])]
    else:
        runs = [{"spec": any(n.startswith("spec.") for n in names)}]
        if any(n.startswith("decode_stale.") for n in names):
            runs.append({"stale_decode": True})
        if case.native:
            runs[0]["inject"] = layer_inputs(case.stored)
    ties: list[Tie] = []
    for options in runs:
        left = sorted(names - set(ours))
        inject = options.pop("inject", None)
        call = partial(trace, model, ids, forced, images=images, **options)
        found, resolved = resolve_ties(case, left, call, inject, ties)
        ours |= found
        ties += resolved
    return ours, ties


def resolve_ties(
    case: Case,
    names: list[str],
    call: Callable[..., dict[str, Tensor]],
    inject: Mapping[str, Tensor] | None,
    known: Sequence[Tie],
) -> tuple[dict[str, Tensor], list[Tie]]:
    """One run, with rounding ties of the cache formats resolved as the case resolved them.

    Two correct orders of summation differ by some 1e-7; a cache entry that stands so close to a rounding boundary
    lands on either side, and everything after it moves by one quantisation step. Such elements are noted beforehand
    (within TIE_REACH of the boundary). Where the run first disagrees with the case, those that can be the cause are
    tried the other way, and kept so if the first tensor to disagree then comes later or there is none. No tolerance
    widens, and the ties are reported. `known` ties were resolved in an earlier run of the same prompt.
    """

    def attempt(resolve: Sequence[Tie]) -> tuple[dict[str, Tensor], list[Tie], int]:
        tap = Recorder(",".join(names), inject)
        tap.ties, tap.resolve = [], resolve
        found = call(tap=tap)
        agree = (outcome(case, name, found).ok for name in found if name in case.stored)
        return found, tap.ties, next((n for n, ok in enumerate(agree) if not ok), len(names))

    kept: list[Tie] = list(known)
    found, ties, reached = attempt(kept)
    tried: set[tuple[str, int, int]] = set()
    while reached < len(names) and not case.native and len(tried) < MOST_TIES:
        first = [name for name in found if name in case.stored][reached]
        tie = next((t for t in suspects(case, first, found[first], ties) if t.place not in tried), None)
        if tie is None:
            break
        tried.add(tie.place)
        other, other_ties, further = attempt([*kept, tie])
        if further > reached:
            found, ties, reached, kept = other, other_ties, further, [*kept, tie]
    return found, [tie for tie in kept if tie not in known]


def suspects(case: Case, name: str, ours: Tensor, ties: Sequence[Tie]) -> list[Tie]:
    """Ties that can explain the first tensor to disagree: its own elements if it is a cache tensor, otherwise those of
    the first position that disagrees and of positions before it, latest first."""
    theirs = case.stored[name]
    if ours.shape != theirs.shape or not ours.dim():
        return []
    bad = (excess(ours.float(), theirs.float()) > 1).flatten(1).any(1) if ours.dim() > 1 else ours != theirs
    if not bool(bad.any()):
        bad = (ours != theirs).flatten(1).any(1) if ours.dim() > 1 else ours != theirs
    rows = set(torch.nonzero(bad).flatten().tolist())
    own = [t for t in ties if name == t.name or name.startswith(f"{t.name}.")]
    if own:
        return [t for t in own if t.position in rows]
    step = min(rows, default=0)
    position = int(case.readme["prompt_len"]) + step if "decode" in name or name.startswith("spec.") else step
    return sorted((t for t in ties if t.position <= position), key=lambda t: -t.position)


def layer_inputs(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What each layer is given, so that a rounding flip in one does not spread to the next: its stream and pre, and
    the shared KV, Top-K and candidates."""
    last = ("x_in", "pre_in", "topk_idxs", "candidates", "x_out", "pre_out")
    cache = ("compress_kv.packed", "compress_kv.scale", "index_k.packed", "index_k.scale")
    window = ("window_kv.codes", "window_kv.scale")
    return {
        name: value
        for name, value in stored.items()
        if name.startswith("layers.") and name.endswith((*(f".{x}" for x in last), *cache, *window))
    }


def outcome(case: Case, name: str, ours: Mapping[str, Tensor]) -> Outcome:
    theirs = case.stored[name]
    found = ours.get(name)
    if not case.native:
        return fp32_outcome(name, found, theirs, case.stored)
    return native_outcome(name, found, theirs, case.noise(name), unstable_rows(case, name))


def unstable_rows(case: Case, name: str) -> Tensor | None:
    """Rows of a tensor that hang on a selection made by less than NATIVE_MARGIN: a rounding flip may change it."""
    margins = [m for m in related_margins(name, case.stored) if m.shape[:1] == case.stored[name].shape[:1]]
    if not margins:
        return None
    unstable = torch.zeros(margins[0].shape[0], dtype=torch.bool)
    for margin in margins:
        unstable |= (margin < NATIVE_MARGIN).flatten(1).any(1) if margin.dim() > 1 else margin < NATIVE_MARGIN
    return unstable


def related_margins(name: str, stored: Mapping[str, Tensor]) -> list[Tensor]:
    """Stored selection margins that a tensor's rows hang on.

    A prompt's tensors are computed from injected streams and selections, so they hang on their own layer's routing at
    most. Decode steps and truncated prefills run free: any selection of the row's own step counts. A margin is itself
    the difference of two close scores, so its own small rows say nothing in bf16.
    """
    stem, _, last = name.rpartition(".")
    if last.endswith("_margin"):
        return [stored[name]]
    free = name.split(".")[0]
    if free in ("decode", "decode_stale", "spec", "ced") or free.startswith("hit"):
        prefix = "decode." if free == "decode_stale" else f"{free}."
        return [m for n, m in stored.items() if n.startswith(prefix) and n.endswith("_margin")]
    if last in ("topk_idxs", "candidates"):
        wanted = ["topk_margin", "candidate_margin"]
    elif last in ("moe_indices", "moe_weights", "ffn_out", "x_out", "pre_out"):
        wanted = ["moe_margin"]
    else:
        return []
    return [stored[f"{stem}.{w}"] for w in wanted if f"{stem}.{w}" in stored]
