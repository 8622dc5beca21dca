"""Techniques that shrink an entry: one latent for all heads, four bits an element, and the training that bears them."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from rorqual.config import ModelConfig
from rorqual.formats.spec import FORMATS, NumberFormat
from rorqual.inventory.parameters import expert_parameters
from rorqual.layout import BF16_BYTES, KVLayout, mha_bytes
from rorqual.planner.explain.technique import Technique
from rorqual.planner.explain.text import by_ratio, exact, saving, summed
from rorqual.planner.figure import Figure
from rorqual.planner.work import index_groups, selected_groups

TILE = 32  # the side of an FP8 weight tile, and the group of an FP4 weight (SPEC 2)


def entries_per_token(config: ModelConfig) -> Fraction:
    """Entries that a token adds to global KV, all sources together: the sum of 1 / ratio (SPEC 11).

    >>> from rorqual.config import presets
    >>> entries_per_token(presets.load("v4.1-flash"))
    Fraction(5, 2)
    """
    return sum((Fraction(1, source.ratio) for source in config.kv_sources), Fraction(0))


def entries_text(config: ModelConfig) -> str:
    """The same with the sources spelled out. Unit: entries a token. Source: the config.

    >>> from rorqual.config import presets
    >>> entries_text(presets.load("v4.1-flash"))
    '3/2 + 1/1'
    """
    return summed(f"{count}/{ratio}" for count, ratio in by_ratio(config.kv_sources))


def row_text(fmt: NumberFormat, width: int) -> str:
    """Bytes of a row as a sum of codes and scales. Source: SPEC 2.

    >>> row_text(FORMATS["e2m1_e4m3_16"], 512), row_text(FORMATS["bf16"], 512)
    ('512 x 4/8 + 512/16', '512 x 16/8')
    """
    codes = f"{width:,} x {fmt.bits}/8"
    return f"{codes} + {width:,}/{fmt.group}" if fmt.scale else codes


def _shared_latent(config: ModelConfig) -> tuple[Figure, ...]:
    heads, width, layers = config.num_attention_heads, config.head_dim, config.num_hidden_layers
    against = "multi-head attention: a key and a value of every head, bf16"
    latent = width * BF16_BYTES
    a_layer = mha_bytes(1, heads, width) - latent
    formula = "2 x heads x head_dim x 2 - head_dim x 2"
    expression = f"2 x {heads} x {width:,} x 2 - {width:,} x 2"
    return (
        saving(
            "shared_latent_layer",
            a_layer,
            "B a token and layer",
            formula=formula,
            expression=expression,
            against=against,
        ),
        saving(
            "shared_latent_token",
            layers * a_layer,
            "B a token",
            formula=f"layers x ({formula})",
            expression=f"{layers} x ({expression})",
            against=f"{against}, in every layer",
        ),
    )


SHARED_LATENT = Technique(
    id="shared-latent",
    aliases=("mla", "latent"),
    name="shared latent (MLA)",
    factor="entry size",
    moves="A layer keeps one vector a token for all heads, and the vector is key and value at once, so an entry has "
    "head_dim elements instead of 2 x heads x head_dim.",
    approximation="None: the model is built so, nothing is approximated afterwards.",
    expressiveness="Every head reads the same vector; heads differ only by their queries and by their share of the "
    "output projection. Since the rotary channels are part of the value too, the output is rotated back by the query's "
    "angle. A query meets the whole latent, so a key costs heads x head_dim products twice, for score and sum.",
    training="The gradients of all heads meet in one narrow projection; queries and outputs are low-rank as well.",
    used=lambda config: True,
    count=_shared_latent,
)


def _fp4_main(config: ModelConfig) -> Iterator[Figure]:
    fmt, width = FORMATS[config.cache.main], config.head_dim
    read = sum(selected_groups(config, role, config.max_position_embeddings) for role in config.backbone_roles)
    return _narrower(config, "fp4_main", fmt, width, read, "entries of main KV that the Top-K of all layers read")


def _fp4_index(config: ModelConfig) -> Iterator[Figure]:
    fmt, width = FORMATS[config.cache.index_key], config.index_head_dim
    read = index_groups(config, config.max_position_embeddings)
    return _narrower(config, "fp4_index", fmt, width, read, "index keys that all indexers score")


def _narrower(config: ModelConfig, name: str, fmt: NumberFormat, width: int, read: int, what: str) -> Iterator[Figure]:
    """An entry, a token, and what one decoded token reads at the longest context, each against bf16."""
    an_entry = width * BF16_BYTES - fmt.row_bytes(width)
    row = f"{width:,} x 2 - ({row_text(fmt, width)})"
    yield saving(
        f"{name}_entry",
        an_entry,
        "B an entry",
        formula="width x 2 - (width x bits / 8 + width / group)" if fmt.scale else "width x 2 - width x bits / 8",
        expression=row,
        against="the same entry in bf16",
    )
    yield saving(
        f"{name}_token",
        entries_per_token(config) * an_entry,
        "B a token",
        formula="sum over KV sources of 1 / ratio, x saved an entry",
        expression=f"({entries_text(config)}) x ({row})",
        against="the same entries in bf16",
    )
    yield saving(
        f"{name}_read",
        read * an_entry,
        f"B read a token at {config.max_position_embeddings:,}",
        formula=f"{what}, x saved an entry",
        expression=f"{read:,} x ({row})",
        against="the same entries in bf16",
    )


FP4_MAIN_KV = Technique(
    id="fp4-main-kv",
    aliases=("fp4-main",),
    name="FP4 main KV",
    factor="entry size",
    moves="An element of global main KV takes four bits (E2M1) and its share of an E4M3 scale byte for 16 neighbours.",
    approximation="An element becomes one of 15 values times its group's scale: off by up to 3/17 of the group's "
    "largest magnitude, rotary channels included. A group beyond 6 x 448 = 2,688 clips. Windows keep a wider format, "
    "so the most recent tokens are read more finely.",
    expressiveness="Small elements beside a large one of the same group of 16 vanish.",
    training="The rounding must be part of the forward pass in training (see qat).",
    used=lambda config: bool(config.kv_sources) and FORMATS[config.cache.main].value == "e2m1",
    count=_fp4_main,
)

FP4_INDEX = Technique(
    id="fp4-index",
    name="FP4 index",
    factor="entry size",
    moves="An element of an index key takes four bits (E2M1) and its share of a power-of-two scale byte (E8M0) for 32 "
    "neighbours. Index queries are rounded alike, so scores are products of FP4 with FP4.",
    approximation="Scores are rounded: key and query are off by up to 1/5 of their group's largest magnitude. Only the "
    "choice near the edge of the Top-K, or of the candidate pool, can change; attention itself reads main KV.",
    expressiveness="A scale is a power of two and serves 32 elements: coarser than main KV's format, and cheaper.",
    training="The rounding must be part of the forward pass in training (see qat).",
    used=lambda config: bool(config.kv_sources) and FORMATS[config.cache.index_key].value == "e2m1",
    count=_fp4_index,
)


def _quantised_caches(config: ModelConfig) -> bool:
    formats = [config.cache.window, *((config.cache.main, config.cache.index_key) if config.kv_sources else ())]
    return any(FORMATS[name].bits < 16 for name in formats)


def _qat(config: ModelConfig) -> Iterator[Figure]:
    return (figure for figure in (*_qat_caches(config), *_qat_weights(config)) if figure.value)


def _qat_caches(config: ModelConfig) -> Iterator[Figure]:
    layout, width, index_width = KVLayout(config), config.head_dim, config.index_head_dim
    if config.kv_sources:
        main, index = row_text(layout.main_format, width), row_text(layout.index_format, index_width)
        yield saving(
            "qat_cache_token",
            entries_per_token(config) * (width + index_width) * BF16_BYTES - layout.bytes_per_token,
            "B a token",
            formula="sum over KV sources of 1 / ratio, x ((head_dim + index_head_dim) x 2 - entry)",
            expression=f"({entries_text(config)}) x (({width:,} + {index_width:,}) x 2 - ({main} + {index}))",
            against="main KV and index keys in bf16",
            note="What FP4 main KV and FP4 index save together: QAT makes it bearable, it adds no byte of its own.",
        )
    layers, window = config.num_hidden_layers, config.sliding_window
    yield saving(
        "qat_window_sequence",
        layers * window * (width * BF16_BYTES - layout.window_row_bytes),
        "B a sequence",
        formula="layers x window x (head_dim x 2 - row)",
        expression=f"{layers} x {window} x ({width:,} x 2 - ({row_text(layout.window_format, width)}))",
        against="windows in bf16",
    )


def _qat_weights(config: ModelConfig) -> Iterator[Figure]:
    # Codes and their share of a scale byte: a row's 32 inputs share one in FP4, a 32 x 32 tile in FP8.
    per_parameter = {"fp4": ("1/2 + 1/32", Fraction(17, 32)), "fp8": ("1 + 1/1,024", 1 + Fraction(1, TILE * TILE))}
    if config.n_routed_experts and config.weights.experts in per_parameter:
        text, stored = per_parameter[config.weights.experts]
        experts, size = config.num_hidden_layers * config.n_routed_experts, expert_parameters(config)
        yield saving(
            "qat_experts",
            experts * size * (BF16_BYTES - stored),
            "B a replica",
            formula="layers x experts x parameters of an expert x (2 - bytes a parameter)",
            expression=f"{config.num_hidden_layers} x {config.n_routed_experts} x {size:,} x (2 - ({text}))",
            against="routed experts in bf16",
            note="The backbone's; dense weights and the drafts' experts are left out.",
        )
    if config.engram_layer_ids and config.weights.engram == "fp8":
        rows, width = sum(config.engram_num_embeddings), config.engram_head_dim
        yield saving(
            "qat_tables",
            rows * (width * BF16_BYTES - width - width // TILE),
            "B a replica",
            formula="rows x (width x 2 - (width + width / 32))",
            expression=f"{exact(rows)} x ({width} x 2 - ({width} + {width}/32))",
            against="Engram tables in bf16",
        )


QAT = Technique(
    id="qat",
    name="quantisation-aware training (QAT)",
    factor="entry size",
    moves="It changes no size by itself: the formats of caches and weights do. It is what lets four and eight bits be "
    "used where bf16 stood, because the model was trained with the rounding in place.",
    approximation="None of its own. What the formats round away stays away; training puts it where it harms least.",
    expressiveness="The trained model fits its formats: in wider ones it runs, but it has never been shown them.",
    training="Rounding has no useful derivative, so the gradient is passed straight through it, and it is turned on "
    "part of the way into training. Which tensors and when is this project's choice (extrapolated).",
    used=lambda config: _quantised_caches(config) or not config.weights.is_plain,
    count=_qat,
)
