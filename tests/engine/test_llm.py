"""`LLM` and the names that `rorqual` exports."""

from __future__ import annotations

import pytest
import torch
from models import golden, random_ids, tiny

import rorqual
from rorqual import LLM, SamplingParams
from rorqual.errors import InputError

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny("fast"), pages=32, slots=4)


def test_names_are_exported() -> None:
    for name in ("LLM", "Engine", "SamplingParams", "Constraint", "RequestOutput", "StoreOptions"):
        assert getattr(rorqual, name).__module__.startswith("rorqual.engine.")


def test_outputs_come_in_the_order_of_prompts(llm: LLM) -> None:
    prompts = [random_ids(length, seed=length) for length in (30, 3, 12)]
    outputs = llm.generate(prompts, GREEDY)
    alone = [llm.generate(ids, GREEDY)[0] for ids in prompts]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    assert [o.prompt_token_ids for o in outputs] == [ids.tolist() for ids in prompts]
    assert all(o.finished and o.finish_reason == "length" and o.counts.new == 6 for o in outputs)


def test_one_prompt_in_every_shape(llm: LLM) -> None:
    ids = random_ids(9)
    wanted = llm.generate([ids], GREEDY)[0].token_ids
    for prompt in (ids, ids.tolist(), [ids.tolist()], ids[None]):
        assert llm.generate(prompt, GREEDY)[0].token_ids == wanted


def test_params_of_each_prompt(llm: LLM) -> None:
    outputs = llm.generate([[5, 6], [5, 6]], [GREEDY, SamplingParams(max_tokens=2, ignore_eos=True)])
    assert outputs[0].token_ids[:2] == outputs[1].token_ids and len(outputs[0].token_ids) == 6
    with pytest.raises(InputError, match="params: 1 for 2 prompts"):
        llm.generate([[5, 6], [5, 6]], [GREEDY])


def test_a_stream_is_the_output_in_pieces(llm: LLM) -> None:
    prompts = [random_ids(40, seed=1), random_ids(4, seed=2)]
    wanted = llm.generate(prompts, GREEDY, salt="whole")
    ids: list[list[int]] = [[], []]
    text = ["", ""]
    for at, delta in llm.stream(prompts, GREEDY, salt="pieces"):
        ids[at] += delta.token_ids
        text[at] += delta.text
    assert ids == [o.token_ids for o in wanted] and text == [o.text for o in wanted]


def test_an_illegal_prompt_stops_the_batch_before_it_runs(llm: LLM) -> None:
    before = llm.engine.stats().steps
    with pytest.raises(InputError, match="id -1 is outside the vocabulary"):
        llm.generate([[5, 6], [-1]], GREEDY)
    assert not llm.engine.has_work and llm.engine.stats().steps == before
    for prompts in ([], [[]], 3.5, ["text"]):
        if prompts == []:
            assert llm.generate(prompts) == []
        else:
            with pytest.raises(InputError):
                llm.generate(prompts)  # type: ignore[arg-type]


def test_who_stops_reading_ends_what_is_left(llm: LLM) -> None:
    stream = llm.stream([[5, 6], [7, 8]], GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_work


def test_options_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(InputError, match="numerics: not legal with a loaded model"):
        LLM(tiny(), numerics="native")
    with pytest.raises(InputError, match="prefill: 'half' is not one of ced, full"):
        LLM(tiny(), prefill="half")
    with pytest.raises(InputError, match="slots: 0 is not legal"):
        LLM(tiny(), slots=0)
    with pytest.raises(InputError, match=r"max_model_len: 5000 is not legal; legal: 2\.\.1024"):
        LLM(tiny(), max_model_len=5000)


def test_images_and_where_they_are_refused() -> None:
    model = golden("fp32-vision", "fast")
    assert model.vision is not None
    from PIL import Image

    pictures = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    from rorqual.engine.images import read_images
    from rorqual.model.vision.image import image_token_ids

    llm = LLM(model, pages=40, slots=2, speculative=False)
    spans = [image_token_ids(image.grid, model.config.image_token_id) for image in read_images(model, pictures)]
    tail = random_ids(30, seed=3)
    outputs = [
        llm.generate([torch.cat((spans[i], tail))], SamplingParams(max_tokens=4, logprobs=0), images=[[pictures[i]]])[0]
        for i in (0, 1, 0)
    ]
    # Field case 16: two images of one size do not share; the same one does.
    assert [o.counts.hit for o in outputs[:2]] == [0, 0] and outputs[2].counts.hit > 0
    with pytest.raises(InputError, match=r"^image"):
        llm.generate([tail], images=[[pictures[0]]])
