"""One prefill and a few decoded tokens in a process of its own, which then says what it held in memory.

    python -m rorqual.bench.resident FOLDER NUMERICS PROMPT_TOKENS DECODED_TOKENS CHUNK

prints one line of JSON. A fresh process, because a peak is the peak of everything that a process ever did.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rorqual.bench.checkpoints import check_positions, random_ids
from rorqual.bench.fresh import answer
from rorqual.bench.timing import Sample, elapsed
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model.load import load


def resident_bytes(name: str = "VmHWM") -> int | None:
    """A field of /proc/self/status: VmHWM the peak of this process, RssAnon its own memory, RssFile mapped files.

    Elsewhere than on Linux only the peak is known. Linux's getrusage will not do: a process inherits its parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    if name == "VmHWM" and sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def run(folder: Path, numerics: str, prompt_tokens: int, decoded: int, chunk: int) -> dict[str, object]:
    """Load with the fast ops, prefill everything on every layer, decode; every reading in bytes and seconds."""
    after_import = resident_bytes()
    model = load(folder, numerics=numerics, kernels="fast")
    check_positions(model.config, prompt_tokens + decoded)
    model.backend.warm()
    after_load = resident_bytes()
    ids = random_ids(model.config, prompt_tokens + decoded, seed=3)
    sequence = Sequence(model, new_cache(model, len(ids)))
    prefill_s = elapsed(lambda: sequence.prefill(Prompt(ids=ids[:prompt_tokens]), mode="full", chunk=chunk))
    after_prefill = resident_bytes()
    decode_s = [elapsed(partial(sequence.append, token[None])) for token in ids[prompt_tokens:]]
    return {
        "peak_rss_bytes": resident_bytes(),
        "peak_after_import_bytes": after_import,
        "peak_after_load_bytes": after_load,
        "peak_after_prefill_bytes": after_prefill,
        "end_rss_file_bytes": resident_bytes("RssFile"),
        "end_rss_anonymous_bytes": resident_bytes("RssAnon"),
        "cache_bytes": sequence.cache.nbytes,
        "prefill_s": prefill_s,
        "decode_s": asdict(Sample.of(decode_s)),
    }


if __name__ == "__main__":
    sys.exit(answer(lambda: run(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]))))
