"""Files that several checkpoint tests write."""

from __future__ import annotations

import json
from pathlib import Path


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """`model.safetensors.index.json` of a folder of shards."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
