"""A split says what an engine alone says, to the bit (field case 57)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engines import asked, engine_of, said
from models import demo, golden, random_ids, tiny
from PIL import Image
from splits import assert_both_clean, encoder_of, finish, joint, split_of, split_said

from rorqual.disagg.pair import Split
from rorqual.engine.images import read_images
from rorqual.engine.params import SamplingParams
from rorqual.errors import InputError
from rorqual.model.transformer import Transformer
from rorqual.model.vision.image import image_token_ids
from rorqual.pool.prefix import PrefixChain, root_key

MODELS: dict[str, Callable[[], Transformer]] = {
    "fp32-dspark": lambda: golden("fp32-dspark", "fast"),
    "tiny-native": lambda: tiny("fast", "native"),
}
LENGTHS = 1, 16, 17, 33, 140
DEMO_LENGTHS = 1, 127, 128, 129, 333, 1000


def split_by(name: str, model: Transformer, mode: str, **options: object) -> Split:
    return split_of(model, encoder=None if mode == "rings" else encoder_of(name), handover=mode, **options)


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("mode", ["streams", "rings"])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_joint_run(name: str, mode: str, speculative: bool) -> None:
    """One after another, and all at once; the logits behind the tokens too."""
    model, prompts = MODELS[name](), [random_ids(n, seed=60 + n) for n in LENGTHS]
    wanted = [joint(model, ids, speculative=speculative) for ids in prompts]
    split = split_by(name, model, mode, speculative=speculative)
    assert split_said(split, prompts[2:3]) == wanted[2:3]
    assert split_said(split, prompts) == wanted
    assert_both_clean(split)


@pytest.mark.parametrize(
    ("mode", "speculative"),
    [
        ("streams", True),
        ("rings", False),
        pytest.param("streams", False, marks=pytest.mark.full),
        pytest.param("rings", True, marks=pytest.mark.full),
    ],
)
def test_it_is_the_joint_run_of_the_shipped_model(mode: str, speculative: bool) -> None:
    """A window of 128 tokens: a row less, the window itself, a row more."""
    model, options = demo(), {"chunk_tokens": 512, "pages": 32, "speculative": speculative}
    prompts = [random_ids(n, seed=n) for n in DEMO_LENGTHS]
    engine = engine_of(model, slots=1, **options)
    wanted = []
    for ids in prompts:
        output = engine.output(engine.submit(ids, asked(6)))
        while not output.finished:
            engine.step()
        wanted.append(said(output))
    split = split_by("demo", model, mode, **options)
    assert split_said(split, prompts, 6) == wanted
    assert_both_clean(split)


@pytest.mark.parametrize("mode", ["streams", "rings", "replay"])
def test_images_go_through_it(mode: str) -> None:
    """An image over chunks, one at the prompt's end; the decode side does not encode them."""
    model = golden("fp32-vision", "fast")
    assert model.vision is not None
    pictures = [Image.new("RGB", (60, 50), colour) for colour in ("red", "blue")]
    spans = [image_token_ids(one.grid, model.config.image_token_id) for one in read_images(model, pictures)]
    ids = torch.cat((random_ids(41, seed=1), spans[0], random_ids(5, seed=2), spans[1]))
    engine = engine_of(model, slots=1, chunk_tokens=24, speculative=False)
    output = engine.output(engine.submit(ids, asked(8), images=pictures))
    while not output.finished:
        engine.step()
    encoder = None if mode == "rings" else encoder_of("fp32-vision")
    split = split_of(model, encoder=encoder, handover=mode, chunk_tokens=24, speculative=False)
    name = split.submit(ids, asked(8), images=pictures)
    encoded = []
    model.vision.register_forward_hook(lambda *_: encoded.append(1))
    (found,) = finish(split, [name])
    model.vision._forward_hooks.clear()
    assert found.counts.handed == len(ids)
    # A replay runs the last rows again, and they have images in them.
    assert len(encoded) == (2 if mode == "replay" else 0)
    if mode != "replay":
        assert said(found) == said(output)
    assert_both_clean(split)


def test_prefix_hits_on_the_prefill_side() -> None:
    """A second turn: pages are found again, and what is handed over is what an engine with that hit has."""
    model, first = golden("fp32-dspark", "fast"), random_ids(100, seed=4)
    second = torch.cat((first, random_ids(37, seed=5)))
    engine = engine_of(model, slots=1, chunk_tokens=48, speculative=False)
    wanted = []
    for ids in (first, second):
        output = engine.output(engine.submit(ids, asked(1)))
        while not output.finished:
            engine.step()
        wanted.append((said(output), output.counts.hit))
    assert wanted[1][1] == 96
    split = split_by("fp32-dspark", model, "streams", speculative=False)
    offers = []
    inner = split.prefill.step

    def watched() -> list[object]:
        found = inner()
        offers.extend(found)
        return list(found)

    split.prefill.step = watched  # type: ignore[method-assign,assignment]
    assert [split_said(split, [ids], 1)[0] for ids in (first, second)] == [said for said, _ in wanted]
    assert [offer.hit for offer in offers] == [0, 96]
    assert offers[1].computed == 37 + 4 + 16
    assert_both_clean(split)


def test_pages_that_are_there_are_not_held_twice() -> None:
    """Two questions to one document: its pages are shipped twice and kept once; another tenant's are its own."""
    model, document = golden("fp32-dspark", "fast"), random_ids(97, seed=3)
    prompts = [torch.cat((document, random_ids(n, seed=n))) for n in (20, 30)]
    split = split_by("fp32-dspark", model, "streams", speculative=False)
    wanted = [joint(model, ids, speculative=False) for ids in (*prompts, prompts[0])]
    names = [split.submit(ids, asked(8), salt=salt) for ids, salt in zip((*prompts, prompts[0]), "aab", strict=True)]
    while not all(name in split.engine and split.state(name) == "decode" for name in names):
        split.step()
        split.check_integrity()
    tables = [split.engine.kv.block_table(f"{name}/0") for name in names]
    assert tables[0][:6] == tables[1][:6] and not set(tables[0][6:]) & set(tables[1][6:])
    assert not set(tables[2]) & {*tables[0], *tables[1]}
    outputs = finish(split, names)
    assert [said(output) for output in outputs] == wanted
    assert_both_clean(split)


def test_pages_of_other_bytes_are_not_taken_for_its_own() -> None:
    """One key, other bits: the request reads what was handed over, and the other page stays as it is."""
    model, ids = golden("fp32-dspark", "fast"), random_ids(70, seed=3)
    split = split_by("fp32-dspark", model, "streams", speculative=False)
    wanted = split_said(split, [ids])
    (page, *_) = split.engine.kv.pages.match(_keys(split, ids))
    split.engine.cache.pages.pool[page] ^= 1
    before = split.engine.cache.pages.pool[page].clone()
    split.prefill.drop_cached()
    assert split_said(split, [ids]) == wanted
    assert torch.equal(split.engine.cache.pages.pool[page], before)
    assert_both_clean(split)


def _keys(split: Split, ids: torch.Tensor) -> list[bytes]:
    size = split.model.layout.page_tokens
    chain = PrefixChain(root_key(split.engine.fingerprint, size), size)
    chain.extend(ids.tolist())
    return chain.keys


def test_afterwards_it_is_an_ordinary_request() -> None:
    """Sampling with a seed, several completions, a constraint on length, log-probabilities, preemption, a rewind."""
    model, ids = golden("fp32-dspark", "fast"), random_ids(50, seed=9)
    params = asked(10, n=3, temperature=1.1, seed=5)
    engine = engine_of(model, slots=4, chunk_tokens=48)
    output = engine.output(engine.submit(ids, params))
    while not output.finished:
        engine.step()
    split = split_by("fp32-dspark", model, "streams")
    (found,) = finish(split, [split.submit(ids, params)])
    assert [said(found, at) for at in range(3)] == [said(output, at) for at in range(3)]
    name = split.submit(ids, asked(12))
    while name not in split.engine or split.state(name) != "decode":
        split.step()
    split.engine.preempt(name)
    (preempted,) = finish(split, [name])
    assert preempted.counts.preempted == 1 and preempted.counts.handed == 50 and preempted.counts.replayed > 0
    assert len(preempted.token_ids) == 12
    assert_both_clean(split)


@pytest.mark.parametrize("mode", ["streams", "rings", "replay"])
def test_preempted_before_it_began_it_is_computed(mode: str) -> None:
    """What was handed over is dropped then, and an image is encoded after all."""
    model = golden("fp32-vision", "fast")
    pictures = [Image.new("RGB", (60, 50), "green")]
    (span,) = [image_token_ids(one.grid, model.config.image_token_id) for one in read_images(model, pictures)]
    ids = torch.cat((span, random_ids(30, seed=6)))
    split = split_of(model, handover=mode, speculative=False)
    name = split.submit(ids, asked(5), images=pictures)
    inner = split.engine.step
    split.engine.step = list  # type: ignore[method-assign]
    while name not in split.engine:
        split.step()
    track = split.engine.scheduler._admit()
    assert track is not None and track.standing is not None
    split.engine.preempt(name)
    split.engine.step = inner  # type: ignore[method-assign]
    (found,) = finish(split, [name])
    alone = engine_of(model, slots=1, chunk_tokens=48, speculative=False)
    output = alone.output(alone.submit(ids, asked(5), images=pictures))
    while not output.finished:
        alone.step()
    assert said(found) == said(output) and found.counts.handed == 0
    assert_both_clean(split)


def test_what_the_encoder_does_not_compute_is_the_engines() -> None:
    model, ids = golden("fp32-dspark", "fast"), random_ids(40, seed=2)
    split = split_by("fp32-dspark", model, "streams")
    params = SamplingParams(max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    names = [split.submit(ids, params), split.submit(ids, asked(3), prefill="full")]
    assert not split.prefill.has_work
    outputs = finish(split, names)
    assert outputs[0].prompt_logprobs is not None and len(outputs[0].prompt_logprobs) == 40
    assert all(output.counts.handed == 0 for output in outputs)


def test_generate_is_called_like_an_llm() -> None:
    model = demo()
    split = Split(model, encoder=encoder_of("demo"), pages=32, slots=2)
    outputs = split.generate(["The whale", "A ship"], SamplingParams(max_tokens=5, ignore_eos=True))
    engine = engine_of(model, slots=1, pages=32)
    for text, output in zip(("The whale", "A ship"), outputs, strict=True):
        alone = engine.output(engine.submit(text, SamplingParams(max_tokens=5, ignore_eos=True)))
        while not alone.finished:
            engine.step()
        assert output.text == alone.text and output.counts.handed == output.counts.prompt
    name = split.submit("The sea", SamplingParams(max_tokens=5, ignore_eos=True))
    assert "".join(delta.text for delta in split.stream(name)) == split.output(name).text
    split.step()
    assert not split.has_work


def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    model = golden("fp32-dspark", "fast")
    with pytest.raises(InputError, match="handover: 'all' is not one of replay, streams, rings"):
        split_of(model, handover="all")
    with pytest.raises(InputError, match="model: it was loaded without its decoder"):
        split_of(encoder_of("fp32-dspark"))
    split = split_by("fp32-dspark", model, "streams", pages=8)
    with pytest.raises(InputError, match="100 tokens with 90 new ones never fit"):
        split.submit(random_ids(100), asked(90), request="a")
    with pytest.raises(InputError, match="id 512 is outside the vocabulary"):
        split.submit([512])
    name = split.submit([5, 6], asked(3))
    with pytest.raises(InputError, match=f"request: '{name}' is live already"):
        split.submit([5], request=name)
    split.abort(name)
    assert_both_clean(split)
    rings = split_of(model, encoder=encoder_of("fp32-dspark"), handover="rings")
    with pytest.raises(InputError, match="mode: 'rings' needs the decoder, which this model was loaded without"):
        rings.submit([5, 6])
    assert not rings.has_work
