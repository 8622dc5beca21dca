"""Prior work that terms descend from, by title, year and arXiv number. Unsure ones carry their name only and say so."""

from __future__ import annotations

from rorqual.planner.glossary.entry import Work

TRANSFORMER = Work(
    title="Attention Is All You Need", year=2017, authors="A. Vaswani et al.", reference="arXiv 1706.03762"
)
ONE_WRITE_HEAD = Work(
    title="Fast Transformer Decoding: One Write-Head is All You Need",
    year=2019,
    authors="N. Shazeer",
    reference="arXiv 1911.02150",
)
GQA = Work(
    title="GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
    year=2023,
    authors="J. Ainslie et al.",
    reference="arXiv 2305.13245",
)
DEEPSEEK_V2 = Work(
    title="DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
    year=2024,
    authors="DeepSeek-AI",
    reference="arXiv 2405.04434",
)
LONGFORMER = Work(
    title="Longformer: The Long-Document Transformer",
    year=2020,
    authors="I. Beltagy, M. E. Peters, A. Cohan",
    reference="arXiv 2004.05150",
)
MISTRAL = Work(title="Mistral 7B", year=2023, authors="A. Q. Jiang et al.", reference="arXiv 2310.06825")
POWER_ATTENTION = Work(title="PowerAttention", verified=False)
STREAMING = Work(
    title="Efficient Streaming Language Models with Attention Sinks",
    year=2023,
    authors="G. Xiao et al.",
    reference="arXiv 2309.17453",
)
NSA = Work(
    title="Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention",
    year=2025,
    authors="J. Yuan et al.",
    reference="arXiv 2502.11089",
)
DEEPSEEK_V32 = Work(
    title="DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", year=2025, authors="DeepSeek-AI"
)
DEEPSEEK_V4 = Work(title="DeepSeek-V4, technical report", authors="DeepSeek-AI", verified=False)
YOCO = Work(
    title="You Only Cache Once: Decoder-Decoder Architectures for Language Models",
    year=2024,
    authors="Y. Sun et al.",
    reference="arXiv 2405.05254",
)
CROSS_LAYER = Work(
    title="Reducing Transformer Key-Value Cache Size with Cross-Layer Attention",
    year=2024,
    authors="W. Brandon et al.",
    reference="arXiv 2405.12981",
)
INDEX_CACHE = Work(title="IndexCache", verified=False)
INDEX_ONCE = Work(title="You Only Index Once", verified=False)
HYSPARSE = Work(title="HySparse", verified=False)
HISA = Work(title="HISA", verified=False)
HYPER_CONNECTIONS = Work(title="Hyper-Connections", year=2024, authors="D. Zhu et al.", reference="arXiv 2409.19606")
MHC = Work(
    title="mHC: Manifold-Constrained Hyper-Connections",
    year=2025,
    authors="Z. Xie et al.",
    reference="arXiv 2512.24880",
)
SINKHORN = Work(
    title="Concerning nonnegative matrices and doubly stochastic matrices",
    year=1967,
    authors="R. Sinkhorn, P. Knopp",
)
ENGRAM = Work(
    title="Conditional Memory via Scalable Lookup: A New Axis of Sparsity for Large Language Models",
    year=2026,
    authors="X. Cheng et al.",
)
SPECULATIVE_DECODING = Work(
    title="Fast Inference from Transformers via Speculative Decoding",
    year=2022,
    authors="Y. Leviathan, M. Kalman, Y. Matias",
    reference="arXiv 2211.17192",
)
SPECULATIVE_SAMPLING = Work(
    title="Accelerating Large Language Model Decoding with Speculative Sampling",
    year=2023,
    authors="C. Chen et al.",
    reference="arXiv 2302.01318",
)
BLOCKWISE = Work(
    title="Blockwise Parallel Decoding for Deep Autoregressive Models",
    year=2018,
    authors="M. Stern, N. Shazeer, J. Uszkoreit",
    reference="arXiv 1811.03115",
)
DEEPSEEK_V3 = Work(title="DeepSeek-V3 Technical Report", year=2024, authors="DeepSeek-AI", reference="arXiv 2412.19437")
VIT = Work(
    title="An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
    year=2020,
    authors="A. Dosovitskiy et al.",
    reference="arXiv 2010.11929",
)
SUB_PIXEL = Work(
    title="Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional Neural Network",
    year=2016,
    authors="W. Shi et al.",
    reference="arXiv 1609.05158",
)
INTEGER_ONLY = Work(
    title="Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
    year=2017,
    authors="B. Jacob et al.",
    reference="arXiv 1712.05877",
)
STRAIGHT_THROUGH = Work(
    title="Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation",
    year=2013,
    authors="Y. Bengio, N. Léonard, A. Courville",
    reference="arXiv 1308.3432",
)
NVFP4 = Work(title="Pretraining Large Language Models with NVFP4", year=2025, authors="NVIDIA")
MX_SPECIFICATION = Work(
    title="OCP Microscaling Formats (MX) Specification, version 1.0", year=2023, authors="Open Compute Project"
)
MICROSCALING = Work(
    title="Microscaling Data Formats for Deep Learning",
    year=2023,
    authors="B. D. Rouhani et al.",
    reference="arXiv 2310.10537",
)
FP8 = Work(
    title="FP8 Formats for Deep Learning", year=2022, authors="P. Micikevicius et al.", reference="arXiv 2209.05433"
)
PAGED_ATTENTION = Work(
    title="Efficient Memory Management for Large Language Model Serving with PagedAttention",
    year=2023,
    authors="W. Kwon et al.",
    reference="arXiv 2309.06180",
)
RADIX_ATTENTION = Work(
    title="SGLang: Efficient Execution of Structured Language Model Programs",
    year=2023,
    authors="L. Zheng et al.",
    reference="arXiv 2312.07104",
)
