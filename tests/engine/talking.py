"""A process that answers one prompt over a store in a folder, tells what came of it, and ends without closing anything.

python talking.py MODEL STORE REPLAY PREFILL TOKEN,TOKEN,...
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rorqual.engine.llm import LLM
from rorqual.engine.params import SamplingParams
from rorqual.model.load import load

PAGE = 16
NEW = 30
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=0)


def main() -> None:
    folder, store, replay, prefill, ids = sys.argv[1:]
    model = load(Path(folder), page_tokens=PAGE, kernels="plain")
    llm = LLM(model, store=store, pages=64, slots=1, speculative=False, replay=replay, prefill=prefill)
    (output,) = llm.generate([int(token) for token in ids.split(",")], PARAMS)
    assert output.logprobs is not None
    logprobs = [one.logprob for one in output.logprobs]
    print(json.dumps({"ids": output.token_ids, "logprobs": logprobs, "counts": asdict(output.counts)}))


if __name__ == "__main__":
    main()
