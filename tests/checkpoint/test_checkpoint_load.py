"""Opening against a config: both sides of every mismatch are named before anything is read (field cases 26, 32, 37)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rorqual.checkpoint.check import check_tensors
from rorqual.checkpoint.header import TensorEntry, read_header
from rorqual.checkpoint.index import StoredTensor
from rorqual.checkpoint.load import Checkpoint
from rorqual.checkpoint.mapping import MappedFile
from rorqual.checkpoint.writer import CheckpointWriter
from rorqual.config import ModelConfig, WeightFormats, presets
from rorqual.errors import CheckpointError
from rorqual.inventory.names import expected_tensors


def refused(folder: Path, config: ModelConfig) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder, config)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_tensors_are_those_of_the_file(tiny_folder, tiny_config, sharded):
    opened = [Checkpoint.open(tiny_folder, tiny_config), Checkpoint.open(sharded[0], tiny_config)]
    with safe_open(tiny_folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            theirs = file.get_tensor(name)
            for checkpoint in opened:
                ours = checkpoint.tensor(name)
                assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
                assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)), name
    assert opened[0].nbytes == opened[1].nbytes == sum(spec.nbytes for spec in opened[0].specs.values())


def test_renamed_tensor_names_both_sides(edited, tiny_config):
    old, new = "layers.0.attn.q_norm.weight", "layers.0.attn.q_nrom.weight"
    folder = edited(lambda tensors: tensors.update({new: tensors.pop(old)}))
    message = refused(folder, tiny_config)
    assert f"{old} is missing; the checkpoint has {new}, which the config does not name" in message


def test_a_prefix_on_every_name_is_shown_on_the_right_pair(edited, tiny_config):
    def prefix(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    message = refused(edited(prefix), tiny_config)
    assert "embed.weight is missing; the checkpoint has model.embed.weight" in message
    assert re.search(r"\((\S+) missing, \1 unexpected in all\)", message)


def test_deleted_scale(edited, tiny_config):
    folder = edited(lambda tensors: tensors.pop("layers.1.attn.wkv.scale"))
    message = refused(folder, tiny_config)
    assert "layers.1.attn.wkv.scale is missing: layers.1.attn.wkv.weight is F8_E4M3" in message


def test_scale_of_a_plain_weight(edited, tiny_config):
    folder = edited(lambda tensors: tensors.update({"norm.scale": torch.ones(1)}))
    assert "norm.scale in model.safetensors is not a tensor of this config" in refused(folder, tiny_config)
    plain = tiny_config.replace(weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16"))
    assert "which stores" in refused(folder, plain)


def test_missing_draft_tensor(edited, tiny_config):
    name = "mtp.2.markov_head.head.weight"
    folder = edited(lambda tensors: tensors.pop(name))
    assert f"{name} is missing" in refused(folder, tiny_config)


def test_drafts_that_the_config_does_not_name(tiny_folder, tiny_config):
    message = refused(tiny_folder, tiny_config.without("drafts"))
    assert "mtp." in message and "is not a tensor of this config" in message


@pytest.mark.parametrize(
    ("name", "change", "found", "wanted"),
    [
        ("norm.weight", lambda t: t[:-1].clone(), "BF16 [{d1}]", "BF16 or F32 [{d}]"),
        ("norm.weight", lambda t: t.to(torch.float16), "F16 [{d}]", "BF16 or F32 [{d}]"),
        ("layers.0.attn.wkv.weight", lambda t: t.view(torch.int8), "I8 ", "F8_E4M3 "),
        ("layers.0.ffn.experts.1.w1.weight", lambda t: t.view(torch.float8_e4m3fn), "F8_E4M3 ", "I8 "),
        ("layers.0.attn.wkv.scale", lambda t: t[:, :1].clone(), "F8_E8M0 ", "F8_E8M0 "),
    ],
)
def test_wrong_shape_or_dtype_shows_both(edited, tiny_config, name, change, found, wanted):
    message = refused(edited(lambda tensors: tensors.update({name: change(tensors[name])})), tiny_config)
    d = tiny_config.hidden_size
    assert f"{name} is {found.format(d=d, d1=d - 1)}" in message
    assert f"the config asks for {wanted.format(d=d)}" in message


def test_packed_fp4_is_no_fp8(edited, tiny_config):
    """Half as many bytes a row under the dtype of FP8: a shape error, not half a matrix."""
    fp8 = tiny_config.replace(weights=WeightFormats(dense="fp8", experts="fp8", engram="fp8"))

    def disguise(tensors):
        for name in tensors:
            if ".experts." in name and name.endswith(".weight"):
                tensors[name] = tensors[name].view(torch.float8_e4m3fn)

    message = refused(edited(disguise), fp8)
    d, width = tiny_config.hidden_size, tiny_config.moe_intermediate_size
    assert f"F8_E4M3 [{width}, {d // 2}]" in message and f"the config asks for F8_E4M3 [{width}, {d}]" in message


def test_native_checkpoint_with_a_plain_config_and_the_reverse(tiny_folder, tiny_config, goldens):
    plain = tiny_config.replace(weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16"))
    assert ".scale in model.safetensors is not a tensor of this config, which stores" in refused(tiny_folder, plain)
    config = ModelConfig.from_json(goldens / "fp32-text")
    native = config.replace(weights=WeightFormats())
    message = refused(goldens / "fp32-text", native)
    assert ".scale is missing" in message and "is BF16 and the config, which asks for F8_E4M3" in message


def test_views_are_writable_and_the_file_is_not(edited, tiny_config):
    folder = edited(lambda tensors: None)
    before = (folder / "model.safetensors").read_bytes()
    Checkpoint.open(folder, tiny_config).tensor("norm.weight").zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_unaligned_tensors_are_read_all_the_same(tmp_path):
    path = tmp_path / "x.safetensors"
    data = torch.arange(4, dtype=torch.float32)
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[4],"data_offsets":[1,17]}}'
    )
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x" + data.numpy().tobytes())
    assert torch.equal(MappedFile(path).view(read_header(path)["b"]), data)


def resident_file_kib() -> int:
    status = Path("/proc/self/status")
    match = re.search(r"RssFile:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if match is None:
        pytest.skip("resident file pages cannot be read on this system")
    return int(match[1])


def test_opening_reads_no_weights(tmp_path):
    mib = 2**20
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(16, mib, dtype=torch.uint8)}, path)
    start = resident_file_kib()
    view = MappedFile(path).view(read_header(path)["a"])
    opened = resident_file_kib() - start
    assert view[7, :10].sum() == 10
    touched = resident_file_kib() - start
    assert int(view.sum()) == 16 * mib
    summed = resident_file_kib() - start
    assert opened < 1024 and touched < 4 * 1024 and summed > 15 * 1024


@pytest.fixture
def release_folder(tmp_path):
    """The release's 96,085 tensors in shards of 11 GB: true headers over holes, so nearly nothing is stored."""
    specs = expected_tensors(presets.load("v4.1-flash"))
    try:
        CheckpointWriter(tmp_path, specs.values(), 11 * 10**9).close()
    except OSError as error:
        pytest.skip(f"no sparse files of this size here: {error}")
    yield tmp_path
    for path in tmp_path.iterdir():
        path.unlink()


def test_the_release_is_checked_whole(release_folder):
    config = presets.load("v4.1-flash")
    checkpoint = Checkpoint.open(release_folder, config)
    assert len(checkpoint.stored) == 96_085 and checkpoint.nbytes == 510_286_023_000
    table = checkpoint.scope("layers.14.engram").table("embed")  # 98 GB, mapped whole
    last = table.shape[0] - 1
    assert table.rows(torch.tensor([0, last])).count_nonzero() == 0


def test_a_missing_tensor_among_96085_is_found(tmp_path):
    specs = expected_tensors(presets.load("v4.1-flash"))
    path = tmp_path / "model.safetensors"
    stored = {spec.name: StoredTensor(path, TensorEntry(spec.dtypes[0], spec.shape, 0, 0)) for spec in specs.values()}
    check_tensors(specs, stored)
    old, new = "layers.39.ffn.experts.383.w3.scale", "layers.39.ffn.experts.384.w3.scale"
    stored[new] = stored.pop(old)
    with pytest.raises(CheckpointError, match=rf"{old} is missing.* has {new}, which the config does not name"):
        check_tensors(specs, stored)
