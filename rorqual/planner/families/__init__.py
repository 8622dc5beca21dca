"""Caches of other models, read from their own config.json: the baselines that this model's bytes are held against.

formulas    bytes a token, as pure functions
family      what a cache is made of: groups of layers that cache alike, in one or more storages
fields      a config read field by field; what may change the cache and was not read is refused
grouped     MHA, GQA, MQA, with `sliding` for layers that see only a window
latent      MLA and DSA
compressed  CSA and HCA
v41         this model
catalogue   by name or by exact model type
"""

from __future__ import annotations

from rorqual.planner.families.catalogue import READERS, from_config, load, names, read_family
from rorqual.planner.families.family import BF16, Family, Group, Storage

__all__ = ["BF16", "READERS", "Family", "Group", "Storage", "from_config", "load", "names", "read_family"]
