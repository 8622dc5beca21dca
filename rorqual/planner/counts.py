"""Parameters by part and parameters a token meets, as `rorqual.inventory.parameters` counts them, in milliseconds.

The inventory lists every tensor: 96,085 in the release, 92,160 of them of routed experts. That takes longer than a verb
of the planner may take to start. Every count is an affine function of `n_routed_experts` (an expert adds its three
weights and a row of the router, in every layer), so two small inventories give the large one exactly.
"""

from __future__ import annotations

from functools import lru_cache

from rorqual.config import ModelConfig
from rorqual.inventory.parameters import ActiveParameters, active_parameters, parameters_by_part


def part_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters of each part the config has: `parameters_by_part`. Source: the names and shapes of the release.

    >>> from rorqual.config import presets
    >>> counts = part_counts(presets.load("v4.1-flash"))
    >>> counts["experts"], counts["router"]
    (543581798400, 78673920)
    """
    return dict(_part_counts(config))


@lru_cache(maxsize=16)
def active_counts(config: ModelConfig) -> ActiveParameters:
    """Parameters that one token is multiplied with: `active_parameters`. Source: the names and shapes of the release.

    >>> from rorqual.config import presets
    >>> release = active_counts(presets.load("v4.1-flash"))
    >>> release.prefill, release.decode, release.decode_with_head
    (7892875448, 15468675184, 16130588784)
    """
    few = few_experts(config.without("drafts"))
    one = active_parameters(few)
    further = config.n_routed_experts - few.n_routed_experts
    if not further:
        return one
    two = active_parameters(_one_more(few))
    return ActiveParameters(
        decode=one.decode + further * (two.decode - one.decode),
        head=one.head,
        prefill=one.prefill + further * (two.prefill - one.prefill),
        seam=one.seam,
    )


def few_experts(config: ModelConfig) -> ModelConfig:
    """The same config with as few routed experts as its Top-K allows; itself when that saves nothing.

    Unit: experts. Source: `n_routed_experts` and `num_experts_per_tok`.

    >>> from rorqual.config import presets
    >>> few_experts(presets.load("v4.1-flash")).n_routed_experts
    6
    """
    least = max(1, config.num_experts_per_tok)
    return config if config.n_routed_experts <= least + 1 else config.replace(n_routed_experts=least)


@lru_cache(maxsize=16)
def _part_counts(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    few = few_experts(config)
    one = parameters_by_part(few)
    if few is config:
        return tuple(one.items())
    two = parameters_by_part(_one_more(few))
    further = config.n_routed_experts - few.n_routed_experts
    return tuple((part, count + further * (two[part] - count)) for part, count in one.items())


def _one_more(config: ModelConfig) -> ModelConfig:
    return config.replace(n_routed_experts=config.n_routed_experts + 1)
