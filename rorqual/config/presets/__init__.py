"""Configs that come with the package, by name.

v4.1-flash   the release, its two files byte for byte
tiny         every mechanism on, drafts and vision included, at widths for tests; quantised weights
mid          quantised weights, 12 layers of 512: large enough to time
demo         what `rorqual train demo` trains: every text mechanism on, 16 MB
real-pair    the release's widths in two layers, a ratio-1 source and a reader of it; 8 experts

Presets other than the release have no tokenizer of their own. Their `engram_compressed_vocab_size` is therefore the
whole vocabulary: the compression map is the identity. With a tokenizer, it is the number of distinct keys (SPEC 8).
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

from rorqual.config.checks import refuse
from rorqual.config.files import parse
from rorqual.config.model import ModelConfig

NAMES = ("v4.1-flash", "tiny", "mid", "demo", "real-pair")


def file(name: str, *, inference: bool = False) -> Traversable:
    """The preset's `config.json`; `inference` gives the other layout, which only the release has a file of."""
    if name not in NAMES or (inference and name != "v4.1-flash"):
        raise refuse("preset", "one of " + ", ".join(NAMES), name)
    return resources.files(__name__) / f"{name}{'.inference' if inference else ''}.json"


def load(name: str) -> ModelConfig:
    """The preset as a config. ConfigError naming the presets when there is none of that name."""
    source = file(name)
    return ModelConfig.from_json(parse(source.read_text(encoding="utf-8"), source.name))
