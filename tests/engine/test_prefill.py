"""One code path: whole prompts, chunks of any size, single tokens, several at once, give the same answers."""

import pytest
import torch
from models import golden, random_ids, tiny

from rorqual.engine.images import image_prompt, read_images
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.errors import CapacityError, InputError
from rorqual.model.transformer import Transformer

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
TOKENS = 75
WINDOW = 16
LONG = 300


def run(model: Transformer, ids: torch.Tensor, **options: object) -> torch.Tensor:
    """Logits of every position that the prefill gives them for."""
    sequence = Sequence(model, new_cache(model, len(ids) + 8))
    outputs = sequence.prefill(Prompt(ids=ids), logits_from=0, **options)
    return torch.cat([o.logits for o in outputs if o.logits is not None])


@pytest.mark.parametrize("mode", ["full", "ced"])
@pytest.mark.parametrize("chunk", [1, 3, 7, WINDOW - 1, WINDOW, WINDOW + 1])
def test_chunked_equals_whole(mode: str, chunk: int) -> None:
    model, ids = golden(), random_ids(TOKENS)
    whole = run(model, ids, mode=mode)
    chunked = run(model, ids, mode=mode, chunk=chunk)
    assert whole.shape[0] == (TOKENS if mode == "full" else WINDOW)
    torch.testing.assert_close(chunked, whole, **TOLERANCE)


def test_ced_is_an_approximation_of_full_and_says_so() -> None:
    model, ids = golden(), random_ids(TOKENS)
    full, ced = run(model, ids, mode="full"), run(model, ids, mode="ced")
    gap = (full[-1] - ced[-1]).abs().max()
    assert 1e-3 < gap < 2.0


def test_ced_equals_full_up_to_a_window() -> None:
    model, ids = golden(), random_ids(WINDOW)
    torch.testing.assert_close(run(model, ids, mode="ced"), run(model, ids, mode="full"), **TOLERANCE)


@pytest.mark.parametrize("chunk", [5, 16, None])
def test_images_split_over_chunks(chunk: int | None) -> None:
    model = golden("fp32-vision")
    from models import GOLDENS
    from safetensors.torch import load_file

    stored = load_file(GOLDENS / "fp32-vision" / "expected.safetensors")
    ids = stored["input_ids"][0]
    prompt = image_prompt(model, ids, read_images(model, [GOLDENS / "fp32-vision" / "image_0.png"]))
    sequence = Sequence(model, new_cache(model, len(ids)))
    logits = torch.cat([o.logits for o in sequence.prefill(prompt, mode="full", chunk=chunk, logits_from=0)])
    torch.testing.assert_close(logits, stored["logits"], **TOLERANCE)


def test_decode_equals_prefill_at_every_length() -> None:
    """Field case 19: lengths 1..300, one token a step against one shot."""
    model, ids = tiny(), random_ids(LONG, seed=3)
    whole = run(model, ids, mode="full")
    sequence = Sequence(model, new_cache(model, LONG))
    steps = [sequence.append(ids[t : t + 1]).logits for t in range(LONG)]
    torch.testing.assert_close(torch.cat(steps), whole, **TOLERANCE)


def test_decode_after_ced_continues_the_prompt() -> None:
    model, ids = golden(), random_ids(TOKENS + 20, seed=5)
    whole = Sequence(model, new_cache(model, len(ids)))
    whole.prefill(Prompt(ids=ids[:TOKENS]), mode="ced")
    one = torch.cat([whole.append(ids[t : t + 1]).logits for t in range(TOKENS, len(ids))])
    several = Sequence(model, new_cache(model, len(ids)))
    several.prefill(Prompt(ids=ids[:TOKENS]), mode="ced", chunk=9)
    at_once = several.append(ids[TOKENS:], logits_from=0).logits
    torch.testing.assert_close(at_once, one, **TOLERANCE)


def test_layer_tokens_follow_the_formula() -> None:
    model, ids = golden(), random_ids(TOKENS)
    config, layout = model.config, model.layout
    for mode in ("ced", "full"):
        sequence = Sequence(model, new_cache(model, TOKENS))
        sequence.prefill(Prompt(ids=ids), mode=mode, chunk=11)
        assert sequence.layer_tokens == layout.prefill_layer_tokens(TOKENS, mode)
    assert layout.prefill_layer_tokens(TOKENS, "full") == TOKENS * config.num_hidden_layers


def test_bad_input_is_one_clear_error() -> None:
    model = golden()
    limit = model.config.max_position_embeddings
    room = Sequence(model, new_cache(model, limit + 32))
    with pytest.raises(InputError, match=f"{limit + 1} tokens do not fit the model's {limit} positions"):
        room.prefill(Prompt(ids=random_ids(limit + 1)))
    with pytest.raises(InputError, match=r"ids: 512 is outside the vocabulary, legal ids are 0..511"):
        room.prefill(Prompt(ids=torch.tensor([1, 512])))
    with pytest.raises(InputError, match="prompt: 0 tokens"):
        room.prefill(Prompt(ids=torch.tensor([], dtype=torch.int64)))
    with pytest.raises(InputError, match="prefill: 'half' is not one of ced, full"):
        room.prefill(Prompt(ids=random_ids(3)), mode="half")
    with pytest.raises(CapacityError, match="do not fit the 16 allocated"):
        Sequence(model, new_cache(model, 10)).prefill(Prompt(ids=random_ids(17)))


@pytest.mark.parametrize("chunk", [64, None])
def test_prefill_memory_is_not_quadratic(chunk: int | None) -> None:
    """Index scores are tiled: no tensor of a prefill holds (queries x context) scores once the context is long."""
    import rorqual.model.indexer as indexer

    model, ids = tiny(), random_ids(400, seed=9)
    seen: list[int] = []
    cut = indexer.GROUP_TILE, indexer.ROW_TILE
    original = indexer.Query._scores

    def spy(self: indexer.Query, rows: slice, groups: tuple[int, int]) -> torch.Tensor:
        scores = original(self, rows, groups)
        seen.append(scores.numel())
        return scores

    indexer.GROUP_TILE, indexer.ROW_TILE, indexer.Query._scores = 64, 32, spy
    try:
        tiled = run(model, ids, mode="full", chunk=chunk)
    finally:
        (indexer.GROUP_TILE, indexer.ROW_TILE), indexer.Query._scores = cut, original
    assert max(seen) <= 64 * 32
    torch.testing.assert_close(tiled, run(model, ids, mode="full", chunk=chunk), **TOLERANCE)


@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_chunks_before_the_wanted_logits_give_none(kernels: str) -> None:
    model, ids = golden("fp32-text", kernels), random_ids(TOKENS)
    sequence = Sequence(model, new_cache(model, TOKENS))
    outputs = sequence.prefill(Prompt(ids=ids), mode="full", chunk=20, logits_from=50)
    assert [len(o.logits) for o in outputs] == [0, 0, 10, 15]
    whole = run(model, ids, mode="full")[50:]
    torch.testing.assert_close(torch.cat([o.logits for o in outputs]), whole, **TOLERANCE)
