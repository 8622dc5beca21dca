"""From a recipe and paths to batches: the one door to the training data."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from rorqual.errors import InputError
from rorqual.training.batch import Packed
from rorqual.training.data.bpe import train_tokenizer
from rorqual.training.data.chat import MARKERS
from rorqual.training.data.documents import Document, Source
from rorqual.training.data.english import English
from rorqual.training.data.order import Pool
from rorqual.training.data.packing import pack, plan_pass
from rorqual.training.data.shards import HELDOUT, SPLITS, TRAIN, VERSION, Shards, key_of, open_or_build
from rorqual.training.data.sources import Files
from rorqual.training.data.split import heldout_groups
from rorqual.training.data.tokens import special_ids, token_id
from rorqual.training.recipe import Recipe

KINDS = ("text", "chat")
HELDOUT_NUMBERS = 1 << 40
"""Numbers of held-out sequences start here, far above those of a run."""
_NEVER = 1 << 62
_WINDOW = 1024


class TrainingData:
    """Batches by step, held-out sequences, documents; all of it decided by recipe, sources and seed.

    fingerprint: of the content, the seed, and the recipe's settings of the order but for `long_from` and the number of
        steps. A run resumes on the same one only, and on a recipe in which those two are the same.
    """

    def __init__(self, shards: Shards, recipe: Recipe, seed: int) -> None:
        """`prepare` makes one."""
        self.shards, self.recipe, self.seed = shards, recipe, seed
        self.tokenizer: Tokenizer = shards.tokenizer
        self._special = special_ids(self.tokenizer)
        self._markers = {token_id(self.tokenizer, markers[0]): len(markers) for markers in MARKERS.values()}
        self._lengths = [entry.tokens for entry in shards.entries]
        self._pools = self._make_pools()
        self._turn = _turning_step(recipe)
        data = recipe.data
        order = [data.seq_len, data.long_seq_len, data.batch_tokens, data.chat_fraction]
        self.fingerprint = key_of({"content": shards.digest, "order": order, "seed": seed})

    @classmethod
    def prepare(
        cls,
        recipe: Recipe,
        paths: Sequence[str | os.PathLike[str]],
        cache_dir: str | os.PathLike[str],
        seed: int,
        tokenizer: Tokenizer | None = None,
    ) -> TrainingData:
        """Read sources, train the tokenizer on what is not held out, tokenise; or open what the cache has of that.

        paths: text files, folders, JSONL (`rorqual.training.data.sources`), beside the recipe's corpus.
        tokenizer: of a model that is to learn more; `vocab_size` of the recipe is not asked then.

        Raises:
            InputError: no source at all; a source that cannot be read; no text; the cache cannot be read or written.
            ConfigError: heldout does not fit the documents.
        """
        data = recipe.data
        sources: list[Source] = [English()] if data.corpus == "english" else []
        if paths:
            sources.append(Files(paths))
        if not sources:
            raise InputError("data: neither --data nor a corpus in the recipe; give at least one of them")
        # A key of its own for a given tokenizer, the old one where it is trained: caches stay good.
        vocabulary = {"vocab_size": data.vocab_size} if tokenizer is None else {"tokenizer": tokenizer.to_str()}
        key = key_of(
            {
                "version": VERSION,
                "sources": [source.fingerprint() for source in sources],
                **vocabulary,
                "heldout": list(data.heldout),
                "heldout_fraction": data.heldout_fraction,
            }
        )

        def documents() -> Iterator[Document]:
            return (document for source in sources for document in source.documents())

        def decide() -> tuple[Tokenizer, set[str]]:
            held = heldout_groups(documents(), data.heldout, data.heldout_fraction)
            if tokenizer is not None:
                return tokenizer, held
            return train_tokenizer((found for found in documents() if found.family not in held), data.vocab_size), held

        return cls(open_or_build(Path(cache_dir), key, decide, documents), recipe, seed)

    def sequences_at(self, step: int) -> int:
        """Sequences of a step, over all processes: `batch_tokens` in whole ones, at least one."""
        return max(1, self.recipe.data.batch_tokens // self.recipe.seq_len_at(step))

    def batch(self, step: int, rank: int = 0, world: int = 1) -> list[Packed]:
        """The sequences of a step (from 0) that process `rank` of `world` trains; in rank order they are the batch.

        A share is empty where there are more processes than sequences.
        """
        assert step >= 0 and 0 <= rank < world, (step, rank, world)
        count, n = self.sequences_at(step), self.recipe.seq_len_at(step)
        # Sequences before this step: of the other length, and of this one.
        turned = step >= self._turn
        other = self._turn * self.sequences_at(0) if turned else 0
        same = (step - self._turn if turned else step) * count
        places = range(count * rank // world, count * (rank + 1) // world)
        return [self._sequence(same + place, n, other + same + place) for place in places]

    def _sequence(self, index: int, n: int, number: int) -> Packed:
        """The sequence `index` among those of length n."""
        if len(self._pools) > 1:
            share = Fraction(self.recipe.data.chat_fraction).limit_denominator(1 << 20)
            chats = index * share.numerator // share.denominator
            chat = (index + 1) * share.numerator // share.denominator > chats
            pool, index = (self._pools[1], chats) if chat else (self._pools[0], index - chats)
        else:
            pool = self._pools[0]
        plan, place = pool.find(index, n)
        return pack(plan, place, n, number, self._special.pad, self._header, self.shards.ids)

    def heldout_batches(self, seq_len: int, limit: int) -> list[Packed]:
        """At most `limit` held-out sequences of seq_len tokens, spread evenly; [] where nothing is held out."""
        plan = plan_pass(self._documents(HELDOUT, None), self._lengths, seq_len, self._header)
        count = min(limit, plan.sequences)
        places = [place * plan.sequences // count for place in range(count)]
        return [
            pack(plan, place, seq_len, HELDOUT_NUMBERS + place, self._special.pad, self._header, self.shards.ids)
            for place in places
        ]

    def documents(self, split: str, kind: str | None = None) -> Iterator[tuple[str, str, Tensor]]:
        """(name, kind, ids int64) of each document of a split, "train" or "heldout".

        kind: "text", "chat", or None for both. Ids begin with bos and end with eos, but for a conversation in
        which the user has the last word: it has no eos.
        """
        assert split in SPLITS, split
        for document in self._documents(split, kind):
            entry = self.shards.entries[document]
            yield entry.name, entry.kind, self.shards.ids(document)

    def summary(self) -> str:
        """A line for each split and kind."""
        lines = [f"{self.tokenizer.get_vocab_size(with_added_tokens=True):,} tokens in the vocabulary"]
        for split in SPLITS:
            for kind in KINDS:
                entries = [self.shards.entries[document] for document in self._documents(split, kind)]
                if entries:
                    tokens = sum(entry.tokens for entry in entries)
                    characters = sum(entry.characters for entry in entries)
                    lines.append(
                        f"{split} {kind}: {len(entries):,} documents, {tokens:,} tokens, {characters:,} characters"
                    )
        if not self._documents(HELDOUT, None):
            lines.append("no document is held out: there is nothing to evaluate on")
        return "\n".join(lines)

    def _make_pools(self) -> list[Pool]:
        """All documents as one, or text and chat apart where the recipe mixes them."""
        texts, chats = (self._documents(TRAIN, kind) for kind in KINDS)
        apart = self.recipe.data.chat_fraction >= 0 and texts and chats
        parts = {"text": texts, "chat": chats} if apart else {"all": self._documents(TRAIN, None)}
        return [
            Pool(documents, self._lengths, self._header, f"{self.seed}/{name}") for name, documents in parts.items()
        ]

    def _documents(self, split: str, kind: str | None) -> list[int]:
        return [
            index
            for index, entry in enumerate(self.shards.entries)
            if entry.split == split and kind in (None, entry.kind)
        ]

    def _header(self, document: int, start: int) -> list[int]:
        """bos, and inside a turn of a conversation the markers that opened it."""
        header = [self._special.bos]
        if self.shards.entries[document].kind == "chat":
            following = int(self.shards.ids(document, start, start + 1))
            header += [] if following in self._markers else self._opening(document, start)
        return header

    def _opening(self, document: int, start: int) -> list[int]:
        """The markers of the turn that the token before `start` is in."""
        stop = start
        while stop > 0:
            window = max(0, stop - _WINDOW)
            told = self.shards.ids(document, window, stop).tolist()
            for place in reversed(range(len(told))):
                if told[place] in self._markers:
                    opened = window + place
                    return self.shards.ids(document, opened, min(start, opened + self._markers[told[place]])).tolist()
            stop = window
        return []


def _turning_step(recipe: Recipe) -> int:
    """The first step with another sequence length than step 0; beyond any run where there is none."""
    first, steps = recipe.seq_len_at(0), recipe.run.steps
    found = bisect.bisect_left(range(steps), True, key=lambda step: recipe.seq_len_at(step) != first)
    return found if found < steps else _NEVER
