"""DESIGN 12: the bits of decode and verification rows do not depend on what shares their step."""

import pytest
import torch
from engines import all_said, asked, engine_of
from models import golden, random_ids, tiny

from rorqual.cache.kv_cache import KVCache
from rorqual.checkpoint.random import write_random
from rorqual.config import presets
from rorqual.engine.sequence import Prompt, Sequence
from rorqual.model.forward import forward
from rorqual.model.load import load
from rorqual.model.step import SequenceStep
from rorqual.model.transformer import Transformer

WIDTHS = (1, 2, 3, 5, 8, 13, 32)
LENGTHS = (1, 2, 16, 17, 33, 50)


def shared_cache(model: Transformer, slots: int, tokens: int) -> list[Sequence]:
    pages = -(-tokens // model.layout.page_tokens)
    cache = KVCache(model.config, model.layout, pages=pages * slots, slots=slots)
    return [Sequence(model, cache, slot=i) for i in range(slots)]


def prefilled(model: Transformer, count: int, tokens: int = 96) -> list[Sequence]:
    """Sequences of different lengths, each prefilled alone."""
    sequences = shared_cache(model, count, tokens)
    for i, sequence in enumerate(sequences):
        sequence.prefill(Prompt(ids=random_ids(LENGTHS[i % len(LENGTHS)], seed=i)), mode="full")
    return sequences


def step_all(model: Transformer, sequences: list[Sequence], ids: list[torch.Tensor]) -> list[torch.Tensor]:
    steps = [s.step(i, logits_from=0) for s, i in zip(sequences, ids, strict=True)]
    outputs = forward(model, sequences[0].cache, steps)
    for sequence, step, output in zip(sequences, steps, outputs, strict=True):
        sequence.ran(step, output)
    return [o.logits for o in outputs]


MODELS = [
    pytest.param(lambda kernels: golden("fp32-text", kernels), id="fp32"),
    pytest.param(lambda kernels: golden("native-text", kernels), id="native"),
    pytest.param(lambda kernels: tiny(kernels), id="tiny-packed-weights"),
]


@pytest.mark.parametrize("kernels", ["plain", "fast"])
@pytest.mark.parametrize("make", MODELS)
def test_verification_rows_equal_single_steps(make: object, kernels: str) -> None:
    model = make(kernels)  # type: ignore[operator]
    ids = random_ids(32, seed=11)
    widths = WIDTHS if kernels == "fast" else WIDTHS[1::3]
    alone = prefilled(model, 4)[3]
    single = torch.cat([alone.append(ids[t : t + 1]).logits for t in range(32)])
    for width in widths:
        several = prefilled(model, 4)[3]
        parts = [several.append(ids[t : t + width], logits_from=0).logits for t in range(0, 32, width)]
        assert torch.equal(torch.cat(parts), single), f"width {width}"


@pytest.mark.parametrize("kernels", ["plain", "fast"])
@pytest.mark.parametrize("make", MODELS)
def test_ragged_batches_equal_each_alone(make: object, kernels: str) -> None:
    """Odd and even lengths, decode rows and verification rows and a prefill chunk, in one step (field case 20)."""
    model = make(kernels)  # type: ignore[operator]
    counts = (1, 6, 1, 3, 2, 40)
    ids = [random_ids(n, seed=20 + i) for i, n in enumerate(counts)]
    together = step_all(model, prefilled(model, 6), ids)
    for i in range(6):
        alone = prefilled(model, 6)[i].append(ids[i], logits_from=0).logits
        if counts[i] <= 32:
            assert torch.equal(together[i], alone), f"sequence {i}"
        else:
            torch.testing.assert_close(together[i], alone, rtol=1e-3, atol=1e-3)


def test_a_batch_of_32_equals_each_alone() -> None:
    model = golden()
    ids = [random_ids(1, seed=50 + i) for i in range(32)]
    together = step_all(model, prefilled(model, 32), ids)
    alone = prefilled(model, 32)
    for i in (0, 1, 15, 30, 31):
        assert torch.equal(together[i], alone[i].append(ids[i]).logits)


def test_a_sequence_that_takes_a_freed_slot_is_unaffected() -> None:
    """Field cases 10 and 20: freed pages and slots are NaN before reuse."""
    model = golden()
    ids, fresh = random_ids(40, seed=70), shared_cache(model, 1, 96)[0]
    fresh.prefill(Prompt(ids=ids), mode="ced")
    expected = fresh.append(random_ids(3, seed=71), logits_from=0).logits
    used = shared_cache(model, 1, 96)[0]
    used.prefill(Prompt(ids=random_ids(61, seed=72)), mode="full")
    used.cache.slots.poison(0)
    used.cache.pages.poison(used.block_table)
    used.reset()
    used.prefill(Prompt(ids=ids), mode="ced")
    assert torch.equal(used.append(random_ids(3, seed=71), logits_from=0).logits, expected)


@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_where_pages_lie_does_not_matter(kernels: str) -> None:
    """Reads take (block table, group index): scattered pages of a shared pool give the bits of consecutive ones."""
    model, ids = golden("fp32-text", kernels), random_ids(90, seed=80)
    plain = shared_cache(model, 1, 96)[0]
    plain.prefill(Prompt(ids=ids), mode="ced", chunk=25)
    expected = plain.append(random_ids(4, seed=81), logits_from=0).logits
    cache = KVCache(model.config, model.layout, pages=12, slots=2)
    cache.pages.poison(torch.arange(12))
    scattered = Sequence(model, cache, slot=1, block_table=torch.tensor([7, 2, 11, 0, 5, 3]))
    scattered.prefill(Prompt(ids=ids), mode="ced", chunk=25)
    assert torch.equal(scattered.append(random_ids(4, seed=81), logits_from=0).logits, expected)


@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_decode_rows_beside_a_ced_chunk_that_waits(kernels: str) -> None:
    """After a `ced` prefill, beside another prompt's chunk whose decoder does not run yet."""
    model = golden("fp32-text", kernels)
    ids, other = random_ids(50, seed=90), random_ids(40, seed=91)

    def start() -> list[Sequence]:
        sequences = shared_cache(model, 2, 96)
        sequences[0].prefill(Prompt(ids=ids), mode="ced")
        return sequences

    alone = start()[0].append(random_ids(3, seed=92), logits_from=0).logits
    decoding, waiting = start()
    chunk = SequenceStep(
        tokens_n=other[:20], start=0, slot=1, block_table=waiting.block_table, decoder_floor=24, run_decoder=False
    )
    step = decoding.step(random_ids(3, seed=92), logits_from=0)
    outputs = forward(model, decoding.cache, [chunk, step])
    assert outputs[0].logits is None and torch.equal(outputs[1].logits, alone)
    last = SequenceStep(
        tokens_n=other[20:], start=20, slot=1, block_table=waiting.block_table, decoder_floor=24, logits_from=0
    )
    finished = forward(model, decoding.cache, [last])[0]
    expected = shared_cache(model, 1, 96)[0].prefill(Prompt(ids=other), mode="ced", chunk=20, logits_from=0)[-1]
    assert finished.first == 24 and torch.equal(finished.logits, expected.logits)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """`tiny` with a window of more than 32 rows: what the decoder keeps of a prompt is a long segment."""
    folder = tmp_path_factory.mktemp("wide") / "m"
    write_random(presets.load("tiny").without("vision").replace(sliding_window=64), folder, seed=5)
    return load(folder, kernels="fast", page_tokens=64)


@pytest.mark.parametrize("lengths", [(116, 40), (68, 73), (106, 108, 99), (116, 60, 5)])
def test_last_chunks_that_meet_share_nothing(wide: Transformer, lengths: tuple[int, ...]) -> None:
    """Short in the encoder, they keep a window each for the decoder."""
    prompts = [random_ids(length, seed=length) for length in lengths]
    alone = [all_said(engine_of(wide, chunk_tokens=48, pages=16), [ids], asked(4))[0] for ids in prompts]
    assert all_said(engine_of(wide, chunk_tokens=48, pages=16), prompts, asked(4)) == alone
