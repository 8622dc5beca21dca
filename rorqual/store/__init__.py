"""The KV pool beyond the device: pages of global KV by key, in memory, on disk, elsewhere. No torch is in here.

interface   `PageStore`: what every tier can do
opener      `open_store`: the tiers of one folder as one store
tiers       several stores as one, the quickest first
memory      `MemoryStore`: a dict with a bound
writer      `WriteBehind`: a queue and a thread in front of a store, so that nobody waits for it
disk        `DiskStore`: segments, an index, checks; with `catalogue` (what it knows), `segments` and `index` (its
            files), `folder` (whose they are, and the lock), `sizes` (its bounds), `checksum`, `clock`
upkeep      a folder as a whole, for `rorqual store`
"""
