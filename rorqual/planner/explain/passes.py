"""Techniques that spare work or traffic around attention: halved prefill, short replays, one pass, look-ups, drafts."""

from __future__ import annotations

from collections.abc import Iterator

from rorqual.config import ModelConfig
from rorqual.inventory.names import expected_tensors
from rorqual.inventory.parameters import active_parameters
from rorqual.layout import BF16_BYTES, KVLayout, exact_replay
from rorqual.planner.explain.entries import row_text
from rorqual.planner.explain.technique import Technique
from rorqual.planner.explain.text import exact, reference_prompt, saving
from rorqual.planner.figure import Figure
from rorqual.planner.speculation import ACCEPTANCE, tokens_per_step

SUB_LAYERS = 2  # attention and FFN
FIXED_PARTS = ("head", "norms", "mhc", "attention", "compressor", "indexer", "shared", "engram")
"""Parts of the backbone that every token meets whole; the router is left out with the experts it picks."""


def _ced(config: ModelConfig) -> Iterator[Figure]:
    layout, tokens, window = KVLayout(config), reference_prompt(config), config.sliding_window
    decoder = config.num_hidden_layers - config.decoder_start
    against = "every layer running on every token of the prompt"
    yield saving(
        "ced_layer_tokens",
        layout.prefill_layer_tokens(tokens, "full") - layout.prefill_layer_tokens(tokens),
        f"layer-tokens a prompt of {tokens:,}",
        formula="decoder layers x (tokens - window)",
        expression=f"{decoder} x ({tokens:,} - min({window}, {tokens:,}))",
        against=against,
    )
    active, norm = active_parameters(config), config.hidden_size
    yield saving(
        "ced_flops",
        2 * (active.decode - norm - active.prefill - active.seam),
        "FLOP a prompt token before the last window",
        formula="2 x (active parameters - output norm - those of the encoder - those of the seam)",
        expression=f"2 x ({active.decode:,} - {norm:,} - {active.prefill:,} - {active.seam:,})",
        against=against,
        note="The decoder's attention and index scores are left out; they would add to it.",
    )


CED = Technique(
    id="ced",
    name="CED (encoder-decoder split of the stack)",
    factor="work",
    moves="The layers before the last KV source run on the whole prompt, that source's compressor and index key too; "
    "the layers from it on run on the last W tokens only.",
    approximation="The decoder's windows begin W tokens before the prompt's end: its first rows see shorter windows "
    "than they would in a full prefill. Earlier prompt positions have no decoder output, so no logits.",
    expressiveness="No decoder layer writes global KV: all of them read what the last source projects from the "
    "encoder's final state.",
    training="The short windows have to be met in training: here a share of the sequences has its decoder windows "
    "begin at a random seam.",
    used=lambda config: bool(config.kv_source_layer_ids),
    count=_ced,
)


def _bounded_replay(config: ModelConfig) -> Iterator[Figure]:
    layout, tokens, window = KVLayout(config), reference_prompt(config), config.sliding_window
    encoder = config.decoder_start
    decoder = config.num_hidden_layers - encoder
    bounded = f"min({tokens:,}, {window})"
    if encoder:
        yield saving(
            "replay_encoder",
            encoder * (layout.replay_tokens(tokens, "exact") - layout.replay_tokens(tokens)),
            f"layer-tokens a hit of {tokens:,}",
            formula="encoder layers x (encoder layers x (window - 1) - window)",
            expression=f"{encoder} x (min({tokens:,}, {encoder} x ({window} - 1)) - {bounded})",
            against="an exact replay, which starts encoder layers x (window - 1) tokens before the hit",
        )
    exact_rows = tokens - exact_replay(tokens - 1, decoder, window)
    yield saving(
        "replay_decoder",
        decoder * (exact_rows - min(tokens, window)),
        f"layer-tokens a prompt of {tokens:,}",
        formula="decoder layers x (1 + decoder layers x (window - 1) - window)",
        expression=f"{decoder} x (min({tokens:,}, 1 + {decoder} x ({window} - 1)) - {bounded})",
        against="a decoder that runs on every row its last row depends on through the windows",
    )
    yield saving(
        "replay_windows",
        layout.window_bytes_logical,
        "B a stored prefix",
        formula="layers x window x row",
        expression=f"{config.num_hidden_layers} x {window} x ({row_text(layout.window_format, config.head_dim)})",
        against="storing the windows of a prefix beside its global KV",
    )


BOUNDED_REPLAY = Technique(
    id="bounded-replay",
    aliases=("replay",),
    name="bounded replay (encoder and decoder side)",
    factor="work",
    moves="Windows are rebuilt from the last W tokens instead of being stored or computed exactly: the encoder's after "
    "a prefix hit, the decoder's at the end of every prefill.",
    approximation="A query sees no window key from before the replay's start, in any layer, so replayed keys differ "
    "from those of a cold run, and global KV after a hit depends on where the hit ended. Global KV below the hit is "
    "never rewritten.",
    expressiveness="None. A hit of W tokens or fewer is not worth adopting: it is computed anew.",
    training="The decoder's side is what the seam in training shows (see ced); the encoder's side is not simulated "
    "here.",
    used=lambda config: bool(config.kv_source_layer_ids),
    count=_bounded_replay,
)


def _mhc(config: ModelConfig) -> tuple[Figure, ...]:
    copies, width, layers = config.hc_mult, config.hidden_size, config.num_hidden_layers
    vectors = (4 * copies + 4) - (2 * copies + 2)
    formula = "((4n + 4) - (2n + 2)) x hidden x 2"
    expression = f"((4 x {copies} + 4) - (2 x {copies} + 2)) x {width:,} x 2"
    against = "two passes over the stream, 4n + 4 vectors instead of 2n + 2, bf16"
    return (
        saving(
            "mhc_token",
            SUB_LAYERS * layers * vectors * width * BF16_BYTES,
            "B moved a token",
            formula=f"2 sub-layers x layers x {formula}",
            expression=f"2 x {layers} x {expression}",
            against=against,
        ),
        saving(
            "mhc_sub_layer",
            vectors * width * BF16_BYTES,
            "B moved a token and sub-layer",
            formula=formula,
            expression=expression,
            against=against,
        ),
    )


SINGLE_PASS_MHC = Technique(
    id="single-pass-mhc",
    aliases=("mhc",),
    name="single-pass mHC",
    factor="work",
    moves="A sub-layer reads the n copies of the residual stream once and writes them once: all mixing coefficients "
    "come from the stream before it, so writing back and collapsing for the next sub-layer are one pass.",
    approximation="The weights that collapse the stream for a sub-layer were computed one sub-layer earlier, from a "
    "stream that did not yet hold the last output.",
    expressiveness="None further: copies still mix by a matrix that Sinkhorn makes nearly doubly stochastic.",
    training="n copies of every activation are held, and gradients pass through the Sinkhorn iterations.",
    used=lambda config: config.hc_mult > 1,
    count=_mhc,
)


def _engram(config: ModelConfig) -> tuple[Figure, ...]:
    rows, width = sum(config.engram_num_embeddings), config.engram_head_dim
    row, text = {
        "fp8": (width + width // 32, f"{width} + {width}/32"),
        "bf16": (2 * width, f"{width} x 2"),
        "fp32": (4 * width, f"{width} x 4"),
    }[config.weights.engram]
    return (
        saving(
            "engram_flops",
            2 * rows * width,
            "FLOP a token",
            formula="2 x rows x row width",
            expression=f"2 x {rows:,} x {width}",
            against="as many parameters in dense weights, each multiplied for every token",
            note="The projection of the rows that are read is paid either way.",
        ),
        saving(
            "engram_device",
            rows * row,
            "B of device memory a replica",
            formula="rows x row",
            expression=f"{rows:,} x ({text})",
            against="the same parameters in weights, which must be where the products are",
            note="If the tables are kept in host memory or on disk: the rows of a token are known from its id and the "
            "few before it, early enough to be fetched.",
        ),
    )


ENGRAM = Technique(
    id="engram",
    name="Engram",
    factor="work",
    moves="Parameters are addressed instead of multiplied: hashes of the last few token ids pick rows of large tables, "
    "and only those rows are read and projected.",
    approximation="N-grams that hash to one bucket share its row; several heads with different primes make it unlikely "
    "that all of them collide at once.",
    expressiveness="A row knows the last few token ids and no other context; a gate decides from the stream how much "
    "of it counts. Positions of images get nothing.",
    training="Tables of this size need sparse updates, and they survive neither another tokenizer nor renumbered "
    "layers. Each token reads scattered rows, and the last ids are state of the sequence.",
    used=lambda config: bool(config.engram_layer_ids),
    count=_engram,
)


def _fixed_weight_bytes(config: ModelConfig) -> int:
    """Bytes of the backbone that every token reads, whatever its experts; the router is left out with them."""
    # A config with fewer experts has the same other tensors, and names them in a fraction of the time.
    fewer = config.replace(n_routed_experts=config.num_experts_per_tok) if config.n_routed_experts else config
    tensors = expected_tensors(fewer).values()
    return sum(tensor.nbytes for tensor in tensors if tensor.part in FIXED_PARTS)


def _dspark(config: ModelConfig) -> Iterator[Figure]:
    block = config.dspark_block_size
    spared = 1 - 1 / tokens_per_step(ACCEPTANCE, block)
    accepted = exact(ACCEPTANCE)
    expression = f"1 - (1 - {accepted}) / (1 - {accepted}^{block + 1})"
    given = f"If each draft is accepted with probability {accepted}, independently: the report's example."
    yield saving(
        "dspark_steps",
        spared,
        "backbone steps a token",
        formula="1 - (1 - a) / (1 - a^(block + 1))",
        expression=expression,
        against="one step a token",
        note=f"{given} A step emits (1 - a^(block + 1)) / (1 - a) tokens, of which one is no draft.",
    )
    fixed = _fixed_weight_bytes(config)
    yield saving(
        "dspark_weights",
        fixed * spared,
        "B of weights read a token, one sequence alone",
        formula="weights that every token meets x steps spared a token",
        expression=f"{fixed:,} x ({expression})",
        against="reading them for each token",
        note=f"{given} Router, experts and the draft's own weights are left out: several tokens pick several sets of "
        "experts.",
    )


DSPARK = Technique(
    id="dspark",
    aliases=("drafts",),
    name="DSpark",
    factor="work",
    moves="A small draft proposes a block of tokens at once and the backbone verifies them in one step, so a step "
    "emits several tokens.",
    approximation="None: by the rule of speculative sampling the output's distribution is exactly the backbone's.",
    expressiveness="None. Products for rejected drafts are done in vain, so it pays while weights and caches, not "
    "arithmetic, bound a step; and a sequence carries draft windows and spare rows for a rollback.",
    training="The draft has weights and losses of its own, with no gradient into the backbone.",
    used=lambda config: config.num_nextn_predict_layers > 0,
    count=_dspark,
)
