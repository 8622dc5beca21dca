"""Which optimiser a parameter belongs to, decided by its checkpoint name and shape.

Muon    2-D weights that multiply a vector: attention, compressor, indexer, experts, Engram's `wkv`, `main_proj`,
        vision.
Tables  2-D weights whose rows stand for ids: `embed`, `head`, Engram's `embed`, the Markov head's two.
AdamW   the rest: norms, sinks, biases, mHC, the router, Engram's gains, the confidence head, anything of a shape
        not known here.

A learner with names of its own is sorted by the same rules: a table is a 2-D weight of a module called `embed`,
`tok_embedding`, `lm_head` or the like, every other 2-D `.weight` is a matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from rorqual.config import ModelConfig

# 2-D, and yet AdamW's: the router chooses by its rows' inner products, mHC's rows are three maps in one, Engram's gains
# scale channels one by one, and the confidence head is one row, which orthogonalising would only normalise.
_SMALL = re.compile(r"(^|\.)(ffn\.gate\.weight|hc_\w+|engram\.[qk]_weight|confidence_head\.proj\.weight)$")
_GAIN = re.compile(r"(norm\d*\.weight|engram\.[qk]_weight)$")
_TABLE = re.compile(r"(^|[._])(embed(ding)?s?(_\w+)?|head)\.weight$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Names of the trained parameters, each exactly once, in the order given.

    decayed, plain: AdamW's, with weight decay (matrices) and without (norms, gains, biases, sinks, scalars).
    """

    muon: tuple[str, ...]
    tables: tuple[str, ...]
    decayed: tuple[str, ...]
    plain: tuple[str, ...]


def sort_parameters(parameters: Mapping[str, Tensor]) -> Groups:
    """Every parameter that requires a gradient, in its group."""
    found: dict[str, list[str]] = {"muon": [], "tables": [], "decayed": [], "plain": []}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            found[_group(name, parameter)].append(name)
    return Groups(**{group: tuple(names) for group, names in found.items()})


def query_heads(names: Iterable[str], config: ModelConfig) -> dict[str, int]:
    """Heads of each weight whose rows are heads x head_dim of queries: what Muon takes head by head."""
    heads: dict[str, int] = {}
    for name in names:
        if name.endswith("attn.indexer.wq_b.weight"):
            heads[name] = config.index_n_heads
        elif name.endswith("attn.wq_b.weight"):
            heads[name] = config.num_attention_heads
    return heads


def _group(name: str, parameter: Tensor) -> str:
    matrix = parameter.ndim == 2 and min(parameter.shape) > 1
    if matrix and not _SMALL.search(name) and not _GAIN.search(name) and name.endswith(".weight"):
        return "tables" if _TABLE.search(name) else "muon"
    return "decayed" if parameter.ndim >= 2 and not _GAIN.search(name) else "plain"
