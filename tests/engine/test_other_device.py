"""A model on a device that is not the CPU (`tests.elsewhere`), and on a real one where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from models import GOLDENS, PAGE, golden, random_ids, tiny, tiny_folder
from safetensors.torch import load_file
from torch import Tensor

from rorqual.engine.draft import feed_draft, propose_after
from rorqual.engine.generate import generate
from rorqual.engine.images import image_prompt, read_images
from rorqual.engine.params import SamplingParams
from rorqual.engine.sequence import Prompt, Sequence, new_cache, resume
from rorqual.errors import InputError
from rorqual.model import load as loading
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from tests.elsewhere import elsewhere


class Passed(NamedTuple):
    prefilled: Tensor
    drafts: Tensor
    verified: Tensor
    resumed: Tensor
    sampled: list[int]


def passed(model: Transformer) -> Passed:
    """What every kind of step gives; all inputs on the CPU, as callers have them, all results there too."""
    ids = random_ids(40)
    sequence = Sequence(model, new_cache(model, 64))
    assert sequence.cache.pages.pool.device == sequence.cache.slots.history.device == model.device
    output = sequence.prefill(Prompt(ids=ids), chunk=34)[-1]
    feed_draft(sequence, output)
    drafts = propose_after([sequence], torch.tensor([7]), lambda logits, _: logits.argmax(-1)).ids_Bg
    verified = sequence.append(torch.cat((torch.tensor([7]), drafts[0, :2].cpu())), logits_from=0)
    sequence.rewind(41)
    resume(sequence, Prompt(ids=ids), 32)
    resumed = sequence.prefill(Prompt(ids=ids), write_floor=32, mode="full")[-1]
    drawn = generate(model, ids[:34], max_tokens=1, sampling=SamplingParams(temperature=0.8, seed=1))
    list(drawn)
    assert output.logits is not None and verified.logits is not None and resumed.logits is not None
    tensors = (output.logits, drafts, verified.logits, resumed.logits)
    assert all(tensor.device == model.device for tensor in tensors)
    return Passed(*(tensor.cpu() for tensor in tensors), drawn.ids)


@cache
def here(numerics: str) -> Passed:
    """The same on the CPU."""
    return passed(tiny(numerics=numerics))


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Another device, which `load` takes for CUDA. Its tensors are wrapped, and inference tensors cannot be."""
    with pytest.MonkeyPatch.context() as patch, elsewhere() as device:
        patch.setattr(torch, "inference_mode", torch.no_grad)
        patch.setattr(loading, "chosen_device", lambda _: device)
        yield device


def with_image(model: Transformer, ids: Tensor) -> Tensor:
    prompt = image_prompt(model, ids, read_images(model, [GOLDENS / "fp32-vision" / "image_0.png"]))
    sequence = Sequence(model, new_cache(model, len(ids)))
    logits = sequence.prefill(prompt, chunk=50)[-1].logits
    assert logits is not None
    return logits.cpu()


@pytest.mark.parametrize("numerics", ["fp32", pytest.param("native", marks=pytest.mark.full)])
def test_a_model_stays_on_its_device_and_computes_the_same_there(numerics: str) -> None:
    expected = here(numerics)
    with other_device() as device:
        model = load(tiny_folder(), numerics=numerics, page_tokens=PAGE, kernels="plain", device="cuda")
        assert model.device == device
        found = passed(model)
    for name, ours, theirs in zip(expected._fields, expected, found, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs, name


def test_images_stay_there_too() -> None:
    folder = GOLDENS / "fp32-vision"
    ids = load_file(folder / "expected.safetensors")["input_ids"][0]
    expected = with_image(golden("fp32-vision"), ids)
    with other_device():
        found = with_image(load(folder, page_tokens=PAGE, kernels="plain", device="cuda"), ids)
    assert torch.equal(found, expected)


def test_pages_go_and_come_back_from_there() -> None:
    """What a store gets are a page's bytes, and what it gives back stands there again."""
    page_bytes = tiny().layout.page_bytes
    with other_device() as device:
        model = load(tiny_folder(), page_tokens=PAGE, kernels="plain", device="cuda")
        pages = new_cache(model, 3 * PAGE).pages
        assert pages.pool.device == device
        wanted = torch.arange(page_bytes).to(torch.uint8).to(device)
        pages.pool[1] = wanted
        found = bytes(pages.page(1))
        assert found == bytes(at % 256 for at in range(page_bytes))
        pages.load(2, found)
        assert bytes(pages.page(2)) == found and bytes(pages.page(0)) == bytes(page_bytes)


def test_refusals_name_what_is_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="device: 'tpu' is not supported by this version; legal: cpu, cuda"):
        load(tiny_folder(), device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device: 'cuda' was asked for and there is none; legal here: cpu"):
        load(tiny_folder(), device="cuda")


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_a_model_decodes_with_tritons_ops(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ops.on_triton import INTERPRETED

    if not INTERPRETED:
        pytest.skip("where Triton compiles, the test on a GPU shows it")
    from rorqual.ops.dispatch import reference_ops, triton_ops

    model, logits = tiny(numerics=numerics), []
    plain, all_three = reference_ops(), triton_ops()
    for ops in (plain, replace(all_three, sparse_attention=plain.sparse_attention), all_three):
        monkeypatch.setattr(model, "backend", SimpleNamespace(ops=lambda: plain))
        sequence = Sequence(model, new_cache(model, 96))
        sequence.prefill(Prompt(ids=random_ids(70)))
        monkeypatch.setattr(model, "backend", SimpleNamespace(ops=lambda ops=ops: ops))
        output = sequence.append(torch.tensor([7, 9]), logits_from=0)
        assert output.logits is not None
        logits.append(output.logits)
    assert torch.equal(logits[0], logits[1])
    error = (logits[2] - logits[0]).norm() / logits[0].norm()
    # Attention sums in another order. In native that moves bf16 roundings, and through them codes of the caches.
    assert 0 < error < (1e-5 if numerics == "fp32" else 0.15)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernels", ["plain", "auto"])
def test_on_a_gpu(kernels: str) -> None:
    there = passed(load(tiny_folder(), page_tokens=PAGE, kernels=kernels, device="cuda"))
    # Two machines' sums: a rounding or a selection that hangs on the last bit moves a few values.
    for name in ("prefilled", "resumed"):
        ours, theirs = getattr(here("fp32"), name), getattr(there, name)
        assert (ours - theirs).norm() < 2e-2 * ours.norm(), name
