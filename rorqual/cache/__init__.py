"""Where the bytes of a sequence live: global pages, window rings, compressor tails (DESIGN 2-4)."""
