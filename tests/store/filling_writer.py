"""A process whose files may not grow beyond LIMIT bytes puts pages: `python filling_writer.py FOLDER LIMIT COUNT`.

Prints one JSON line: how many were kept, how many of those are got right, and what the store counted.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path

from stores import IDENTITY, key, page

from rorqual.store.disk import DiskStore


def main(folder: str, limit: str, count: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    store = DiskStore(Path(folder), IDENTITY, disk_bytes=None)
    kept = [number for number in range(int(count)) if store.put(key(number), page(number))]
    store.flush()
    right = sum(store.get(key(number)) == page(number) for number in kept)
    print(json.dumps({"kept": len(kept), "right": right, **asdict(store.stat())}))
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
