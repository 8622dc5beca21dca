"""Where a decode step goes, part by part: `rorqual bench model --profile` and `rorqual bench kernels --profile`.

Each op and each fused region of a step is clocked by its name; what is left of the step is the Python between them. A
clocked step is a little slower than one that is not, so shares are to be read and not sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from rorqual.bench.baseline import load_baseline
from rorqual.bench.checkpoints import checkpoint, random_ids
from rorqual.bench.clocked import Clock, Given
from rorqual.bench.report import JsonRow
from rorqual.bench.timing import elapsed, undisturbed
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model.load import load

STEPS = 8
"""Decode steps whose mean a profile is."""
WARM = 2
REST = "Python between"
PRESET, QUICK_PRESET = "mid", "tiny"
CONTEXT, QUICK_CONTEXT = 1024, 24

NOTE = (
    "profile: means over clocked steps, which are slower than unclocked ones; region.* are fused stretches of a layer, "
    f"'{REST}' is the rest of the step"
)


def profile_row(running: Mapping[str, Sequence], ids: Tensor, name: str) -> JsonRow:
    """Decode `ids` one by one with every sequence, each op clocked; the first `WARM` steps do not count.

    Returns:
        A row with `profile`: by contestant a list of {part, calls, seconds, share} of one step, slowest first.
    """
    first = next(iter(running.values()))
    assert len(ids) > WARM
    context, numerics = first.length, first.model.numerics.name
    profiles = {kind: _profile(sequence, ids) for kind, sequence in running.items()}
    return {
        "name": "profile",
        "shape": f"{name}: 1 token at {context} tokens of context, mean of {len(ids) - WARM}",
        "numerics": numerics,
        "profile": profiles,
    }


def kernels_profile(quick: bool) -> JsonRow:
    """The profile of a random checkpoint: which of the kernels a decode step spends its time in."""
    preset, context = (QUICK_PRESET, QUICK_CONTEXT) if quick else (PRESET, CONTEXT)
    with checkpoint(None, preset) as folder:
        models = {"plain": load_baseline(folder, "fp32"), "fast": load(folder, kernels="fast")}
        running: dict[str, Sequence] = {}
        ids = random_ids(models["fast"].config, context + WARM + STEPS, seed=6)
        for kind, model in models.items():
            running[kind] = Sequence(model, new_cache(model, len(ids)))
            running[kind].prefill(Prompt(ids=ids[:context]), mode="ced", chunk=context)
        return profile_row(running, ids[context:], preset)


def _profile(sequence: Sequence, ids: Tensor) -> list[JsonRow]:
    backend = sequence.model.backend
    clock = Clock(backend.ops(), None)
    sequence.model.backend = Given(clock.ops)
    total, steps = 0.0, len(ids) - WARM
    try:
        with undisturbed():
            for at, token in enumerate(ids):
                if at == WARM:
                    clock.reset()
                taken = elapsed(partial(sequence.append, token[None]))
                total += taken if at >= WARM else 0.0
    finally:
        sequence.model.backend = backend
    parts = [(name, clock.calls[name], seconds) for name, seconds in clock.seconds.items() if clock.calls[name]]
    parts.append((REST, steps, total - sum(seconds for _, _, seconds in parts)))
    return [
        {"part": name, "calls": calls / steps, "seconds": seconds / steps, "share": seconds / total}
        for name, calls, seconds in sorted(parts, key=lambda part: -part[2])
    ]
