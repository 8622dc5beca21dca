"""Which layers of a grouped-query model see only a window: each model type's own rule, and `layer_types` over it."""

from __future__ import annotations

from typing import Literal

from rorqual.config.checks import refuse
from rorqual.errors import ConfigError
from rorqual.planner.families.fields import Fields

Rule = Literal["never", "all", "upper", "off", "pattern"]
"""never   no windows: `sliding_window` is not a field of the type (Llama)
all     every layer, unless `sliding_window` is null (Mistral)
upper   layers from `max_window_layers` on, if `use_sliding_window` (Qwen)
off     as `upper`, but the type's implementations disagree on which layers: only without windows (Qwen3 MoE)
pattern one full layer in every so many, the last of them (Gemma, gpt-oss)
"""

LAYER_TYPES = ("full_attention", "sliding_attention")
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")


def layer_windows(text: Fields, rule: Rule, layers: int, pattern: int = 0) -> list[int | None]:
    """The window of every layer in tokens, None for full attention.

    pattern: one layer in so many is full, where the config does not say.
    Source: the configuration classes of Hugging Face transformers.

    >>> text = Fields({"sliding_window": 1024, "sliding_window_pattern": 3})
    >>> layer_windows(text, "pattern", 7, 6)
    [1024, 1024, None, 1024, 1024, None, 1024]

    Raises:
        ConfigError: a field that is missing, an unknown layer type, or fields that contradict each other.
    """
    windows = _by_rule(text, rule, layers, pattern)
    if not text.stated("layer_types"):
        return windows
    types = text.one_of_each("layer_types", LAYER_TYPES, (layers,))
    decides = rule == "pattern" and not any(text.stated(name) for name in PATTERNS)
    if decides:
        window = _window(text) if "sliding_attention" in types else None
        return [window if kind == "sliding_attention" else None for kind in types]
    for layer, (kind, expected) in enumerate(zip(types, windows, strict=True)):
        if (kind == "sliding_attention") != (expected is not None):
            legal = f"{LAYER_TYPES[expected is not None]}, as the config's other fields say"
            raise refuse(text.path(f"layer_types[{layer}]"), legal, kind)
    return windows


def _by_rule(text: Fields, rule: Rule, layers: int, pattern: int) -> list[int | None]:
    if rule == "never":
        return [None] * layers
    if rule == "all":
        return [_window(text) if _nullable_window(text) else None] * layers
    if rule == "pattern":
        return _patterned(text, layers, pattern)
    text.ignore("sliding_window", "max_window_layers")
    if not text.flag("use_sliding_window"):
        return [None] * layers
    if rule == "off":
        raise refuse(text.path("use_sliding_window"), "false for this model_type", True)
    first, window = text.integer("max_window_layers", low=0), _window(text)
    return [window if layer >= first else None for layer in range(layers)]


def _patterned(text: Fields, layers: int, pattern: int) -> list[int | None]:
    stated = [text.integer(name) for name in PATTERNS if text.stated(name)]
    if len(set(stated)) > 1:
        raise refuse(text.path(PATTERNS[1]), f"the same as {PATTERNS[0]}", stated[1])
    every = stated[0] if stated else pattern
    window = _window(text)
    return [None if (layer + 1) % every == 0 else window for layer in range(layers)]


def _window(text: Fields) -> int:
    """`sliding_window`; early Gemma 2 files state `sliding_window_size` beside it."""
    window = text.integer("sliding_window")
    beside = text.optional("sliding_window_size")
    if beside is not None and beside != window:
        raise refuse(text.path("sliding_window_size"), f"the same as sliding_window, {window}", beside)
    return window


def _nullable_window(text: Fields) -> bool:
    """Whether there is a window. Null says no; a missing field says nothing: it once meant 4,096 (Mistral 7B v0.1)."""
    if "sliding_window" not in text.raw:
        raise ConfigError(f"{text.path('sliding_window')} is missing; give null for full attention")
    return text.stated("sliding_window")
