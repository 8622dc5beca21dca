"""A config object read field by field; what was not read and may change the cache is refused, never ignored.

A config.json holds scores of fields that say nothing about the cache. One that does is recognised by the words in its
name, so that a field nobody has heard of yet is refused as well: half a cache is worse than an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rorqual.config import checks
from rorqual.config.checks import refuse
from rorqual.errors import ConfigError

MOST = 2**31 - 1
MOST_LAYERS = 10_000

WORDS = frozenset(
    (
        *("kv", "key", "value", "cache", "attn", "attention", "window", "sliding", "swa", "chunk", "chunked"),
        *("compress", "compressed", "compression", "latent", "linear", "mamba", "mamba2", "ssm", "state", "conv"),
        *("conv1d", "recurrent", "rwkv", "delta", "index", "indexer", "sparse", "hybrid", "global", "bidirectional"),
        *("mla", "cla", "yoco"),
    )
)
NAMES = frozenset(("layer_types", "layers_block_type", "block_types", "block_configs", "text_config"))
HARMLESS = frozenset(
    (
        *("attention_bias", "attention_dropout", "attention_out_bias", "attn_logit_softcapping"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "output_attentions"),
        *("attention_probs_dropout_prob", "_flash_attn_2_enabled", "use_flash_attn"),
        *("use_cache", "cache_implementation", "chunk_size_feed_forward", "decoder_sparse_step", "ignore_index"),
    )
)
"""Biases, dropout, scaling of scores, and how a library runs: none of it is stored."""
HARMLESS_STARTS = ("rope_", "router_")
HARMLESS_ENDS = ("_token_id", "_token_index")


def suspicious(name: str) -> bool:
    """Whether a field of this name may change what is cached. Without unit; source: `WORDS`.

    >>> [suspicious(name) for name in ("kv_lora_rank", "v_head_dim", "attention_bias", "hidden_act", "rope_theta")]
    [True, True, False, False, False]
    """
    if name in HARMLESS or name.startswith(HARMLESS_STARTS) or name.endswith(HARMLESS_ENDS):
        return False
    return name in NAMES or name.endswith("head_dim") or not WORDS.isdisjoint(name.split("_"))


class Fields:
    """One JSON object of a config. Every getter notes what it read; `finish` refuses what is left and matters.

    A value of null is a missing one. All raise ConfigError naming the field, nested ones with their path.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str = "", defaults: Mapping[str, int] | None = None) -> None:
        self.raw = raw
        self._prefix = prefix
        self._defaults = defaults or {}
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """The field as a message names it."""
        return self._prefix + name

    def stated(self, name: str) -> bool:
        """Whether the field is there and not null."""
        self._read.add(name)
        return self.raw.get(name) is not None

    def optional(self, name: str, low: int = 1, high: int = MOST) -> int | None:
        """An integer, else the default of this model type, else None."""
        if not self.stated(name):
            return self._defaults.get(name)
        value = checks.integer(low, high)(self.path(name), self.raw[name])
        assert isinstance(value, int)
        return value

    def integer(self, name: str, low: int = 1, high: int = MOST) -> int:
        """An integer that must be stated, unless this model type has a default."""
        value = self.optional(name, low, high)
        if value is None:
            raise ConfigError(f"{self.path(name)} is missing")
        return value

    def layers(self) -> int:
        """`num_hidden_layers`, bounded so that a hostile one makes no long list."""
        return self.integer("num_hidden_layers", high=MOST_LAYERS)

    def flag(self, name: str) -> bool:
        """A boolean, false where it is not stated."""
        return self.stated(name) and checks.flag(self.path(name), self.raw[name])

    def one_of_each(self, name: str, legal: Sequence[object], counts: Sequence[int]) -> list[Any]:
        """A list with one of the legal values a layer, and as many of them as one of `counts`."""
        self._read.add(name)
        values = self.raw[name]
        lengths = " or ".join(str(count) for count in dict.fromkeys(counts))
        if not isinstance(values, list | tuple) or len(values) not in counts:
            got = f"{len(values)} entries" if isinstance(values, list | tuple) else values
            raise refuse(self.path(name), f"a list of {lengths}, one a layer", got)
        for position, value in enumerate(values):
            if not any(type(value) is type(one) and value == one for one in legal):
                text = "one of " + ", ".join(str(one) for one in legal)
                raise refuse(f"{self.path(name)}[{position}]", text, value)
        return list(values)

    def ignore(self, *names: str) -> None:
        """Fields that this family is known to cache nothing by, whatever their names suggest."""
        self._read.update(names)

    def finish(self, model_type: str) -> None:
        """Refuses a field that was not read, is switched on, and may change what is cached."""
        for name, value in self.raw.items():
            switched_on = value is not None and value is not False and value not in (0, "", [], {})
            if switched_on and name not in self._read and suspicious(name):
                legal = f"absent or null: what it does to the cache of {model_type} is unknown"
                raise refuse(self.path(name), legal, value)


def stores_fp8(root: Mapping[str, Any], *sections: Mapping[str, Any]) -> bool:
    """Whether the checkpoint's quantisation says that its KV cache is 8-bit floating point. Without unit.

    Source: `kv_cache_scheme` of compressed-tensors, `kv_cache_quant_algo` of ModelOpt.

    >>> stores_fp8({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}), stores_fp8({})
    (True, False)

    Raises:
        ConfigError: it says that the cache is stored some other way.
    """
    for section in (root, *sections):
        quantisation = section.get("quantization_config")
        if not isinstance(quantisation, Mapping):
            continue
        for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
            scheme = quantisation.get(name)
            if scheme is None:
                continue
            if isinstance(scheme, Mapping):
                fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float"
            else:
                fp8 = isinstance(scheme, str) and scheme.lower() in ("fp8", "fp8_e4m3")
            if not fp8:
                raise refuse(f"quantization_config.{name}", "null or FP8", scheme)
            return True
    return False
