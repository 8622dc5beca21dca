"""A toy corpus with conversations, its tokenizer, and a random model that fits it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.checkpoint.random import write_random
from rorqual.config import presets
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.training.data.bpe import train_tokenizer
from rorqual.training.data.chat import chat_ids
from rorqual.training.data.documents import Document, Turn
from rorqual.training.data.tokens import plain_ids, special_ids
from rorqual.training.fit import fit_config

WORDS = (
    *("the", "whale", "sea", "ship", "sailor", "harpoon", "breathed", "surfaced", "dived"),
    *("closed", "over", "under", "and", "of", "it", "again", "slowly"),
)


def text(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count)) + "."


def documents() -> dict[str, list[Document]]:
    turns = tuple(Turn(role, text(n, 6)) for n, role in enumerate(("user", "assistant") * 3))
    return {
        "train": [
            *(Document(name=f"bbe/{n}", text=text(n, 400)) for n in range(4)),
            Document(name="chat/0", turns=turns),
        ],
        "heldout": [
            Document(name="bbe/held", text=text(90, 500)),
            Document(name="web/held", text=text(91, 60)),
            Document(name="chat/held", turns=turns[:4]),
        ],
    }


class ToyCorpus:
    """As the training data hands out whole documents."""

    def __init__(self) -> None:
        self.all = documents()
        self.tokenizer: Tokenizer = train_tokenizer(self.all["train"], 400)
        special = special_ids(self.tokenizer)
        self.bos, self.eos = special.bos, special.eos

    def documents(self, split: str) -> Iterator[tuple[str, str, Tensor]]:
        for document in self.all[split]:
            if document.turns:
                ids = chat_ids(self.tokenizer, document.turns)
            else:
                ids = [self.bos, *plain_ids(self.tokenizer, document.text), self.eos]
            yield document.name, document.kind, torch.tensor(ids)


@cache
def corpus() -> ToyCorpus:
    return ToyCorpus()


@cache
def model() -> Transformer:
    """Random weights, every text mechanism of `tiny`."""
    folder = Path(mkdtemp(prefix="rorqual-test-"))
    file = folder / "tokenizer.json"
    tokenizer = corpus().tokenizer
    tokenizer.save(str(file))
    config = fit_config(presets.load("tiny").without("vision"), tokenizer)
    write_random(config, folder / "model", seed=5, tokenizer=file)
    return load(folder / "model", page_tokens=16, kernels="plain")
