"""What each traced tensor is: the text of a golden's README.json, by the name's end."""

from __future__ import annotations

MEANINGS: tuple[tuple[str, str], ...] = (
    ("input_ids", "token ids"),
    ("decode.ids", "token fed at each decode step"),
    ("hash_ids", "row ids into each Engram table, offsets included [T, layers, (max_ngram - 1) x heads]"),
    ("token_types", "per prompt token: -1 text, 0 image start, 1 image, 2 newline, 3 image end"),
    (".grid", "start position, ViT rows, ViT columns, feature rows, feature columns"),
    (".patches", "ViT input patches, (pixel / 255 - 0.5) / 0.5 rounded to bf16"),
    (".vit_out", "ViT output, final norm included"),
    (".aligner_out", "image features in the language model's width"),
    ("embed_out", "embeddings with image features merged, before the copies"),
    ("final_hidden", "stream collapsed by the last pre, before the output norm"),
    ("final_norm", "after the output norm"),
    ("logits", "fp32 logits"),
    ("argmax", "argmax of the logits"),
    ("confidence", "confidence logits of the draft"),
    ("output_ids", "the next token, then the greedy draft"),
    ("main_hidden", "DSpark hidden: mean over the copies entering each target layer, concatenated"),
    ("main_x", "normed projection of main_hidden"),
    (".engram.x_in", "stream before the Engram write"),
    (".engram.gate", "Engram gate after masking [T, copies]"),
    ("x_in", "stream entering the block, after the Engram write [T, copies, D]"),
    ("x_out", "stream leaving the block"),
    ("pre_in", "pre used by this block's attention"),
    ("pre_out", "pre for the next block, or the final collapse"),
    ("attn_pre", "pre computed by the attention's mix, used by this block's FFN"),
    ("_post", "mHC post coefficients"),
    ("_comb", "mHC comb [T, from, to]"),
    ("attn_in", "attention input, collapsed and normed"),
    ("attn_out", "attention output"),
    ("ffn_in", "MoE input, collapsed and normed"),
    ("ffn_out", "MoE output"),
    ("moe_indices", "routed experts in descending biased score"),
    ("moe_weights", "routing weights"),
    ("moe_margin", "k-th minus (k+1)-th biased score"),
    ("topk_idxs", "selected groups, ascending, -1 = unused"),
    ("topk_margin", "k-th minus (k+1)-th score, inf = nothing close"),
    ("candidate_margin", "k-th minus (k+1)-th block score"),
    ("candidates", "1 = group inside a kept candidate block"),
    ("index_score", "index scores, -inf = not visible or outside the pool"),
    ("index_weights", "index head weights, both scales included"),
    (".latent", "compressed latent after its norm, before RoPE"),
    (".packed", "E2M1 codes, two a byte, low nibble first"),
    (".codes", "E4M3 bytes"),
    (".scale", "scale bytes"),
    ("window_kv", "window KV after RoPE and quantise-dequantise"),
    ("compress_kv", "main KV after RoPE and quantise-dequantise"),
    ("index_k", "index keys after norm, RoPE and quantise-dequantise"),
    (".window", "window ring after the last step, slot = position % window"),
    ("tail_kv", "compressor rows of the last group, slot = position % ratio"),
    ("tail_score", "compressor gate rows of the last group, slot = position % ratio"),
    ("engram_tokens", "compressed ids seen, -1 = image"),
    ("token_map", "compressed id of every token id"),
    ("multipliers", "hash multipliers [layers, max_ngram]"),
    ("primes", "bucket primes [layers, n-gram sizes, heads]"),
    ("hidden", "collapsed draft hidden before its norm"),
    ("first_row", "first prompt position that the tensors of a truncated prefill cover"),
)


def meaning(name: str) -> str:
    """One line for a traced tensor.

    >>> meaning("decode.layers.3.topk_margin")
    'k-th minus (k+1)-th score, inf = nothing close'
    """
    return next((text for end, text in MEANINGS if name.endswith(end)), "")
