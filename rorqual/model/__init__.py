"""The forward pass: attention by role, indexer, compressor, MoE, mHC, Engram, draft, vision."""
