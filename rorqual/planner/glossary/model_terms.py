"""Terms of the architecture and of its number formats. Figures are the release's; a test recomputes them."""

from __future__ import annotations

from rorqual.planner.glossary import works
from rorqual.planner.glossary.entry import UNVERIFIED, Entry

ATTENTION: tuple[Entry, ...] = (
    Entry(
        term="MHA",
        expansion="multi-head attention",
        topic="attention and its cache",
        meaning="Every head has a key and a value of its own for every token. At the release's shape, 64 heads of 512 "
        "in 40 layers, it would cache 5,242,880 bytes a token in bf16.",
        descends=(works.TRANSFORMER,),
    ),
    Entry(
        term="MQA",
        expansion="multi-query attention",
        topic="attention and its cache",
        meaning="All query heads share one key and one value. The attention here has this form, and goes further: key "
        "and value are the same vector.",
        descends=(works.ONE_WRITE_HEAD,),
    ),
    Entry(
        term="GQA",
        expansion="grouped-query attention",
        topic="attention and its cache",
        meaning="Query heads form groups, and each group shares one key and one value. With as many groups as heads it "
        "is MHA, with one group MQA.",
        descends=(works.GQA, works.ONE_WRITE_HEAD),
    ),
    Entry(
        term="MLA",
        expansion="multi-head latent attention",
        topic="attention and its cache",
        aliases=("shared latent", "latent"),
        meaning="A layer caches one vector a token, the latent, that all heads read as key and as value: 512 elements "
        "in the release, 1,024 bytes in bf16 against 131,072 for MHA. DeepSeek-V2 and V3 cache a small rotary key "
        "beside it; here the rotary channels are the latent's own last 64, and the output is rotated back by the "
        "query's angle.",
        descends=(works.DEEPSEEK_V2, works.ONE_WRITE_HEAD),
    ),
    Entry(
        term="SWA",
        expansion="sliding-window attention",
        topic="attention and its cache",
        aliases=("sliding window", "window"),
        meaning="A query sees the keys of the last W tokens, its own included: 128 in the release, in every layer. "
        "Through windows alone content travels W - 1 tokens a layer, so 20 layers see 1 + 20 x 127 = 2,541 tokens.",
        descends=(works.LONGFORMER, works.MISTRAL, works.POWER_ATTENTION),
    ),
    Entry(
        term="CSA2",
        expansion=f"compressed sparse attention, second form; {UNVERIFIED}",
        topic="attention and its cache",
        aliases=("CSA",),
        meaning="A query attends, in one softmax with a learned sink for each head, to its window and to the Top-K "
        "compressed groups that an indexer selects from the whole context: 128 + 512 entries in the release. A group "
        "is one entry for m tokens (m = 2 in the encoder, 1 in the decoder), stored by 4 layers and read by 38.",
        descends=(works.NSA, works.DEEPSEEK_V32, works.DEEPSEEK_V4, works.STREAMING),
        extrapolated="The report does not disclose how the indexer is trained: here its scores learn from the "
        "attention of its own layer. The release leaves ties open: here they go to the lowest index.",
    ),
    Entry(
        term="Full / Reindex / Reuse",
        expansion="what a layer that reads global KV computes itself",
        topic="attention and its cache",
        aliases=("Full", "Reindex", "Reuse"),
        meaning="Full: it is a KV source, with main KV, index keys, index queries and a Top-K of its own. Reindex: "
        "index queries and a Top-K of its own over an earlier source's keys; Reuse: neither, it reads an earlier "
        "source's KV at another layer's Top-K. The release has 4, 4 and 30 of them, and 2 layers that read their "
        "window only.",
        descends=(works.CROSS_LAYER, works.INDEX_CACHE, works.INDEX_ONCE, works.HYSPARSE),
    ),
    Entry(
        term="CED",
        expansion=f"encoder and decoder in one causal stack; the letters are {UNVERIFIED}",
        topic="attention and its cache",
        meaning="Layers before the last KV source are the encoder, that source and the layers after it the decoder, "
        "and all global KV the decoder reads is projected from the encoder's final state. A prefill therefore runs the "
        "encoder on all N tokens and the decoder on the last W only: 1/2 + W/(2N) of the layer-tokens in the release, "
        "50.2 % at N = 32,768.",
        descends=(works.YOCO,),
    ),
    Entry(
        term="HSI",
        expansion="hierarchical sparse indexer",
        topic="attention and its cache",
        aliases=("candidate pool", "candidates", "indexer"),
        meaning="One layer, the candidate source, scores every group of the context and keeps the 2,048 best blocks of "
        "8 as a pool; later indexers score those 16,384 groups only. Seen as a memory, the indexer generates addresses "
        "(the Top-K) into main KV, and the candidate pool is a TLB: a short list made by one walk over everything, "
        "which later look-ups consult instead of walking again. Unlike a TLB it has no miss path: what the pool lacks "
        "is not selected.",
        descends=(works.HISA, works.DEEPSEEK_V32),
    ),
    Entry(
        term="bounded replay",
        expansion="recomputing W tokens to rebuild windows",
        topic="attention and its cache",
        aliases=("replay",),
        meaning="Windows are not persisted: after a prefix hit the encoder runs again on the last W tokens of the hit, "
        "and at the end of a prefill the decoder runs on the last W of the prompt. Queries then see no window key from "
        "before the replay's start; an exact replay of the release would begin 20 x 127 = 2,540 tokens back. What "
        "follows a hit therefore depends, slightly, on where the hit ended.",
    ),
)

AROUND: tuple[Entry, ...] = (
    Entry(
        term="mHC",
        expansion="manifold-constrained hyper-connections",
        topic="around attention",
        aliases=("single-pass mHC", "hyper-connections"),
        meaning="The residual stream is n copies (4 in the release), which each sub-layer collapses to its input, "
        "mixes by a matrix that Sinkhorn iterations make nearly doubly stochastic, and adds its output to. "
        "Single-pass: all three sets of coefficients come from the stream before the sub-layer, and its collapse "
        "serves the next one, so 2n + 2 vectors are moved instead of 4n + 4.",
        descends=(works.HYPER_CONNECTIONS, works.MHC, works.SINKHORN),
    ),
    Entry(
        term="Engram",
        expansion="a memory trace: conditional memory by look-up",
        topic="around attention",
        meaning="Hashes of the last 2, 3 and 4 token ids pick 24 rows of a large table, which are projected, gated and "
        "added to the residual stream, in 2 layers of the release. A token reads 12,672 bytes out of tables of 196.6 "
        "billion parameters and multiplies only what it has read.",
        descends=(works.ENGRAM,),
    ),
    Entry(
        term="DSpark",
        expansion=f"a draft for speculative decoding; the name's origin is {UNVERIFIED}",
        topic="around attention",
        aliases=("draft", "drafts"),
        meaning="A draft of 3 window layers behind the backbone that proposes a block of 5 tokens in one pass, reading "
        "the backbone's late streams; a low-rank Markov term makes each draft depend on the one before, and a "
        "confidence says how far to trust it. The backbone verifies a block in one step by speculative sampling, so "
        "the output's distribution is exactly its own.",
        descends=(works.BLOCKWISE, works.SPECULATIVE_DECODING, works.SPECULATIVE_SAMPLING, works.DEEPSEEK_V3),
    ),
    Entry(
        term="ViT",
        expansion="vision transformer",
        topic="around attention",
        aliases=("vision tower", "tower"),
        meaning="The image tower: 14 x 14 pixel patches through 32 layers of full attention within one image, with "
        "rotary positions in both directions. It encodes an image whole and once; the language model then takes its "
        "features in chunks of any size.",
        descends=(works.VIT,),
    ),
    Entry(
        term="pixel-unshuffle",
        expansion="space to depth",
        topic="around attention",
        aliases=("unshuffle",),
        meaning="A square of 3 x 3 neighbouring patch vectors becomes one vector of nine times the width, which the "
        "aligner projects to the language model's: 1,008 x 1,008 pixels are 5,184 patches but 576 features.",
        descends=(works.SUB_PIXEL,),
    ),
    Entry(
        term="QAT",
        expansion="quantisation-aware training",
        topic="around attention",
        meaning="Values are rounded to their format in the forward pass of training and gradients pass straight "
        "through the rounding, so that the model learns to live with what inference will store.",
        descends=(works.INTEGER_ONLY, works.STRAIGHT_THROUGH),
        extrapolated="Which tensors are rounded from which step on is this project's recipe.",
    ),
)

FORMATS: tuple[Entry, ...] = (
    Entry(
        term="E2M1/E4M3/16",
        expansion="FP4 elements, an FP8 scale for each 16",
        topic="number formats",
        aliases=("e2m1_e4m3_16", "NVFP4", "FP4 main KV"),
        meaning="The format of main KV: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign, two codes a byte, times an "
        "E4M3 scale shared by 16 neighbours, so 288 bytes for 512 elements and a range of 6 x 448 = 2,688. It is NVFP4 "
        "without its second-level scale for a whole tensor.",
        descends=(works.NVFP4,),
    ),
    Entry(
        term="E2M1/E8M0/32",
        expansion="FP4 elements, a power-of-two scale for each 32 (MXFP4)",
        topic="number formats",
        aliases=("e2m1_e8m0_32", "MXFP4", "FP4 index"),
        meaning="The format of index keys, index queries and routed experts: the same elements, times a power of two "
        "shared by 32 neighbours, so 68 bytes for 128 elements. It is another format than main KV's and never goes by "
        "a common name.",
        descends=(works.MX_SPECIFICATION, works.MICROSCALING),
    ),
    Entry(
        term="MXFP8",
        expansion="FP8 elements (E4M3), a power-of-two scale for each 32",
        topic="number formats",
        aliases=("E4M3/E8M0/32", "e4m3_e8m0_32"),
        meaning="The format of window KV, of activations before a product, and of Engram rows: 528 bytes for 512 "
        "elements. Dense weights use the same elements and scale type, but a scale covers a tile of 32 x 32.",
        descends=(works.MX_SPECIFICATION, works.MICROSCALING, works.FP8),
    ),
)
