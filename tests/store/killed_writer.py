"""A process that puts pages until it is killed: `python killed_writer.py FOLDER SEED FIRST PAGES STEP`.

It says `flushed N` when the pages [FIRST, N) have been flushed. PAGES bounds the store, 0 for no bound. At its STEP-th
write to a segment it writes half of the page and kills itself; 0 waits for somebody else to do it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from stores import IDENTITY, PAGE_BYTES, key, page

from rorqual.store.disk import DiskStore


def tear(step: int) -> None:
    write, count = os.pwrite, 0

    def torn(file: int, data: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        if count == step:
            write(file, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, data, offset)

    os.pwrite = torn  # type: ignore[assignment]


def main(folder: str, seed: str, first: str, pages: str, step: str) -> None:
    assert "torch" not in sys.modules and "numba" not in sys.modules
    draw = random.Random(int(seed))
    bound = int(pages) * PAGE_BYTES or None
    store = DiskStore(Path(folder), IDENTITY, disk_bytes=bound, fsync=draw.random() < 0.25)
    if int(step):
        tear(int(step))
    number = int(first)
    while True:
        for _ in range(draw.randint(1, 100)):
            assert store.put(key(number), page(number))
            number += 1
            if draw.random() < 0.1:
                store.match([key(draw.randint(int(first), number)) for _ in range(3)])
            if draw.random() < 0.01:
                store.compact()
        store.flush()
        print("flushed", number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
