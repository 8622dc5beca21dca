"""What each technique saves, in this config, and what it pays for it.

catalogue   the techniques, each with its three answers (`technique.py` says which)
waterfall   global KV a token from multi-head attention to what is stored; `draw` makes a chart of it
chain       the formulas from an entry's bytes to refresh counts, in order of dependence
"""

from __future__ import annotations

from rorqual.planner.explain.catalogue import NAMES, TECHNIQUES, answers, find, overview
from rorqual.planner.explain.chain import Link, chain, chain_table
from rorqual.planner.explain.technique import FACTORS, OFF, Technique
from rorqual.planner.explain.waterfall import Step, waterfall, waterfall_table

__all__ = [
    "FACTORS",
    "NAMES",
    "OFF",
    "TECHNIQUES",
    "Link",
    "Step",
    "Technique",
    "answers",
    "chain",
    "chain_table",
    "find",
    "overview",
    "waterfall",
    "waterfall_table",
]
