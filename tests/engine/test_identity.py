"""Which model a stored page is of: other weights are another model, whichever tensor it is that differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from models import PAGE, random_ids, tiny, tiny_folder
from safetensors.torch import load_file, save_file

from rorqual.engine.engine import Engine
from rorqual.engine.identity import fingerprint, store_identity
from rorqual.engine.params import SamplingParams
from rorqual.model.load import load


def test_kernels_and_use_change_nothing() -> None:
    """What one run stores, the next one finds, however it computes."""
    model = tiny("fast")
    engine = Engine(model, pages=8, slots=1)
    list(engine.stream(engine.submit(random_ids(40), SamplingParams(max_tokens=4, ignore_eos=True))))
    assert fingerprint(model) == fingerprint(tiny("plain")) == fingerprint(load(tiny_folder(), kernels="plain"))
    own, other = store_identity(model), store_identity(load(tiny_folder()))
    assert own.page_tokens == PAGE != other.page_tokens and own.fingerprint == other.fingerprint
    assert own.page_bytes == model.layout.page_bytes


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("embed.weight", False),
        ("layers.2.attn.q_norm.weight", False),
        ("layers.2.attn.attn_sink", False),
        ("layers.3.attn_norm.weight", False),
        ("layers.3.attn.compressor.wkv.weight", False),
        ("layers.3.attn.indexer.k_norm.weight", False),
        ("layers.3.attn.q_norm.weight", True),
        ("layers.5.ffn.gate.weight", True),
        ("layers.0.attn.wq_a.weight", False),
        ("layers.0.attn.wq_a.scale", False),
        ("layers.2.ffn.experts.5.w2.weight", False),
        ("layers.0.engram.embed.weight", False),
        ("vision.blocks.0.attn.wqkv.weight", False),
        ("mtp.0.attn_norm.weight", True),
    ],
)
def test_one_byte_of_one_tensor_is_another_model(name: str, same: bool, tmp_path: Path) -> None:
    """As where an adapter was merged; decoder layers, from 3 on, and drafts write no global KV but their source's."""
    shutil.copytree(tiny_folder(), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(torch.uint8).flatten()[1] ^= 1
    save_file(tensors, file)
    assert (fingerprint(load(tmp_path / "m", kernels="plain")) == fingerprint(tiny())) == same


def test_an_encoder_has_the_fingerprint_of_the_whole() -> None:
    """A prefill worker's pages are those that a decode worker keeps."""
    for numerics in ("fp32", "native"):
        whole, encoder = (load(tiny_folder(), numerics=numerics, part=part) for part in ("all", "encoder"))
        assert fingerprint(whole) == fingerprint(encoder) != fingerprint(whole, decoder=True)
