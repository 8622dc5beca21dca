"""Multi-head, grouped-query and multi-query attention, with or without sliding layers: a key and a value a KV head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rorqual.config.checks import refuse
from rorqual.errors import ConfigError
from rorqual.planner.families.family import BF16, Family, Group, Storage
from rorqual.planner.families.fields import Fields, stores_fp8
from rorqual.planner.families.formulas import BF16_BYTES, gqa_entry_bytes
from rorqual.planner.families.sliding import Rule, layer_windows

BF16_SOURCE = "the weights' own 16 bits; what vLLM and SGLang store unless told otherwise"
FP8_SOURCE = "vLLM and SGLang, KV cache type fp8: one byte an element, scales a layer and none a token"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a model type leaves unsaid.

    rule, pattern: which layers slide (`sliding.layer_windows`). defaults: values of its configuration class in Hugging
    Face transformers that published files leave out.
    """

    rule: Rule = "never"
    pattern: int = 0
    defaults: Mapping[str, int] = field(default_factory=dict)


_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072}

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "llama": Kind(),
        "mistral": Kind(rule="all"),
        "mixtral": Kind(rule="all"),
        "qwen2": Kind(rule="upper"),
        "qwen3": Kind(rule="upper", defaults={"head_dim": 128}),
        "qwen3_moe": Kind(rule="off"),
        "qwen3_vl_text": Kind(),
        "qwen3_vl_moe_text": Kind(),
        "gemma": Kind(defaults={"head_dim": 256}),
        "gemma2": Kind(rule="pattern", pattern=2, defaults={"head_dim": 256}),
        "gemma3_text": Kind(rule="pattern", pattern=6, defaults=_GEMMA3),
        "gpt_oss": Kind(rule="pattern", pattern=2),
    }
)

NESTED: Mapping[str, str] = MappingProxyType(
    {"gemma3": "gemma3_text", "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}
)
"""Root model types whose language model is described in `text_config`, of this type."""

MODEL_TYPES = (*KINDS, *NESTED)


def read(root: Mapping[str, Any], name: str) -> Family:
    """The cache of a config whose `model_type` is one of MODEL_TYPES; bytes by `formulas.gqa_entry_bytes`.

    Source: the config, and the configuration classes of Hugging Face transformers for what it leaves out.

    >>> fields = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
    >>> read({"model_type": "llama", **fields}, "llama-3.1-70b").token_bytes()
    Fraction(327680, 1)

    Raises:
        ConfigError: a field that is missing, illegal or not understood, by name.
    """
    model_type, text = _text(root)
    kind = KINDS[model_type]
    fields = Fields(text, "" if text is root else "text_config.", kind.defaults)
    layers = fields.layers()
    heads, kv_heads, head_dim = _heads(fields)
    windows = layer_windows(fields, kind.rule, layers, kind.pattern)
    max_tokens = fields.optional("max_position_embeddings")
    fields.ignore("quantization_config")
    fields.finish(model_type)
    bf16 = Storage(name=BF16, groups=_groups(windows, kv_heads, head_dim, BF16_BYTES), source=BF16_SOURCE)
    fp8 = Storage(name="fp8", groups=_groups(windows, kv_heads, head_dim, 1), source=FP8_SOURCE)
    return Family(
        name=name,
        model_type=root["model_type"],
        attention=_attention(heads, kv_heads, windows),
        max_tokens=max_tokens,
        storages=(fp8, bf16) if stores_fp8(root, text) else (bf16, fp8),
    )


def _text(root: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The language model's type and fields."""
    if root["model_type"] not in NESTED:
        return root["model_type"], root
    expected = NESTED[root["model_type"]]
    text = root.get("text_config")
    if not isinstance(text, Mapping):
        raise refuse("text_config", "an object", text)
    if text.get("model_type", expected) != expected:
        raise refuse("text_config.model_type", expected, text["model_type"])
    return expected, text


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim; what is not stated follows from the others as in the first Llama."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or heads
    if heads % kv_heads:
        raise refuse(fields.path("num_key_value_heads"), f"a divisor of num_attention_heads {heads}", kv_heads)
    head_dim = fields.optional("head_dim")
    if head_dim is None:
        hidden = fields.integer("hidden_size")
        if hidden % heads:
            raise ConfigError(f"{fields.path('head_dim')} is missing, and {heads} heads do not divide {hidden}")
        head_dim = hidden // heads
    return heads, kv_heads, head_dim


def _groups(windows: list[int | None], kv_heads: int, head_dim: int, element_bytes: int) -> tuple[Group, ...]:
    plural = "s" if kv_heads != 1 else ""
    groups = []
    for window in sorted(set(windows), key=lambda window: window or 0):
        groups.append(
            Group(
                name="full attention" if window is None else "sliding window",
                layers=windows.count(window),
                entry_bytes=gqa_entry_bytes(kv_heads, head_dim, element_bytes),
                entry=f"2 x {kv_heads} KV head{plural} x {head_dim} x {element_bytes}",
                window=window,
            )
        )
    return tuple(groups)


def _attention(heads: int, kv_heads: int, windows: list[int | None]) -> str:
    name = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    slides = any(window is not None for window in windows)
    return f"{name}, sliding" if slides else name
