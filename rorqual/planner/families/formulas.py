"""Bytes a token of other models' caches, as pure functions of the fields that decide them.

Sources: DeepSeek LLM 67B (arXiv 2401.02954), DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437), the
DeepSeek-V3.2-Exp report and its kernels' row format (FlashMLA: 656 bytes; the indexer's keys: 132 bytes), the
DeepSeek-V4 report (rows of 584 bytes, FP4 index keys of 68). Bytes of *this* model are `rorqual.layout`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

BF16_BYTES = 2
FP32_BYTES = 4
DSA_SCALE_GROUP = 128
V4_SCALE_GROUP = 64
V4_ROW_ALIGNMENT = 8
INDEX_FP4_GROUP = 32


def gqa_entry_bytes(kv_heads: int, head_dim: int, element_bytes: int = BF16_BYTES) -> int:
    """Bytes that one layer stores for one token: a key and a value of every KV head (MHA: all heads, MQA: one).

    Source: Ainslie et al., GQA (arXiv 2305.13245).

    >>> gqa_entry_bytes(8, 128), gqa_entry_bytes(64, 512)
    (4096, 131072)
    """
    return 2 * kv_heads * head_dim * element_bytes


def gqa_token_bytes(layers: int, kv_heads: int, head_dim: int, element_bytes: int = BF16_BYTES) -> int:
    """Bytes a token of grouped-query attention: `gqa_entry_bytes` in every layer. Source: `gqa_entry_bytes`.

    >>> gqa_token_bytes(32, 8, 128), gqa_token_bytes(95, 8, 128)
    (131072, 389120)
    """
    return layers * gqa_entry_bytes(kv_heads, head_dim, element_bytes)


def mla_entry_bytes(latent: int, rope: int, element_bytes: int = BF16_BYTES) -> int:
    """Bytes that one layer of multi-head latent attention stores for one token: the latent and one rotary key.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. With one byte an element: FP8 throughout, scales left out.

    >>> mla_entry_bytes(512, 64), mla_entry_bytes(512, 64, 1)
    (1152, 576)
    """
    return (latent + rope) * element_bytes


def mla_token_bytes(layers: int, latent: int, rope: int, element_bytes: int = BF16_BYTES) -> int:
    """Bytes a token of multi-head latent attention: `mla_entry_bytes` in every layer. Source: `mla_entry_bytes`.

    >>> mla_token_bytes(61, 512, 64), mla_token_bytes(61, 512, 64, 1)
    (70272, 35136)
    """
    return layers * mla_entry_bytes(latent, rope, element_bytes)


def dsa_row_bytes(latent: int = 512, rope: int = 64) -> int:
    """Bytes of V3.2's FP8 latent row: E4M3 codes, an fp32 scale each 128, and the rotary part in bf16.

    Source: FlashMLA, its FP8 sparse decoding format.

    >>> dsa_row_bytes()
    656
    """
    return latent + _groups(latent, DSA_SCALE_GROUP) * FP32_BYTES + rope * BF16_BYTES


def dsa_index_bytes(index_head_dim: int = 128) -> int:
    """Bytes of V3.2's index key: E4M3 codes and an fp32 scale each 128.

    Source: DeepSeek-V3.2-Exp report, its lightning indexer in FP8.

    >>> dsa_index_bytes()
    132
    """
    return index_head_dim + _groups(index_head_dim, DSA_SCALE_GROUP) * FP32_BYTES


def dsa_token_bytes(layers: int, latent: int = 512, rope: int = 64, index_head_dim: int = 128) -> int:
    """Bytes a token of V3.2's sparse attention: a latent row and an index key in every layer.

    Source: `dsa_row_bytes` and `dsa_index_bytes`.

    >>> dsa_token_bytes(61)
    48068
    """
    return layers * (dsa_row_bytes(latent, rope) + dsa_index_bytes(index_head_dim))


def v4_row_bytes(head_dim: int = 512, rope: int = 64) -> int:
    """Bytes of V4's row, of windows and compressed groups alike: K = V of one head.

    E4M3 codes of the un-rotated channels, the rotary ones in bf16, an E8M0 scale each 64 codes, padded to 8 bytes:
    448 + 128 + 7 + 1. Source: FlashMLA, its row format for this model.

    >>> v4_row_bytes()
    584
    """
    plain = head_dim - rope
    used = plain + rope * BF16_BYTES + _groups(plain, V4_SCALE_GROUP)
    return _groups(used, V4_ROW_ALIGNMENT) * V4_ROW_ALIGNMENT


def fp4_index_bytes(index_head_dim: int = 128) -> int:
    """Bytes of V4's index key: E2M1 codes, two a byte, and an E8M0 scale each 32.

    Source: DeepSeek-V4 report; V4.1 keeps the format.

    >>> fp4_index_bytes()
    68
    """
    return _groups(index_head_dim, 2) + _groups(index_head_dim, INDEX_FP4_GROUP)


def compressed_token_bytes(layers: Iterable[tuple[int, int, int]]) -> Fraction:
    """Bytes a token of layers that store one entry for every `ratio` tokens: (layers, entry bytes, ratio) each.

    Source: the DeepSeek-V4 report, by `v4_row_bytes` and `fp4_index_bytes`.

    >>> compressed_token_bytes([(21, 584 + 68, 4), (20, 584, 128)])
    Fraction(14057, 4)
    """
    return sum((Fraction(count * entry, ratio) for count, entry, ratio in layers), Fraction(0))


def v1_token_bytes() -> int:
    """Bytes a token of DeepSeek LLM 67B in bf16: 95 layers x 2 x 8 KV heads x 128 x 2. Source: arXiv 2401.02954.

    >>> v1_token_bytes()
    389120
    """
    return gqa_token_bytes(95, 8, 128)


def v3_token_bytes(element_bytes: int = BF16_BYTES) -> int:
    """Bytes a token of DeepSeek-V3: 61 layers x (512 + 64) elements. Source: arXiv 2412.19437.

    >>> v3_token_bytes(1), v3_token_bytes(2)
    (35136, 70272)
    """
    return mla_token_bytes(61, 512, 64, element_bytes)


def v32_token_bytes() -> int:
    """Bytes a token of DeepSeek-V3.2, 61 x (656 + 132). Source: `dsa_row_bytes`, `dsa_index_bytes`.

    >>> v32_token_bytes()
    48068
    """
    return dsa_token_bytes(61)


def v4_flash_token_bytes() -> Fraction:
    """Bytes a token of DeepSeek-V4-Flash: 21 CSA layers of ratio 4 with an index key, 20 HCA layers of ratio 128.

    163 and 4.5625 a layer. Source: DeepSeek-V4 report, `v4_row_bytes`, `fp4_index_bytes`.

    >>> float(v4_flash_token_bytes())
    3514.25
    """
    row = v4_row_bytes()
    return compressed_token_bytes([(21, row + fp4_index_bytes(), 4), (20, row, 128)])


def _groups(elements: int, group: int) -> int:
    """Groups that hold `elements`, the last one perhaps partly."""
    return -(-elements // group)
