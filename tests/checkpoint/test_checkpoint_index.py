"""One file or shards: what belongs together is found, what does not is named (field case 37)."""

from __future__ import annotations

import shutil

import pytest
import torch
from checkpoint_files import write_index
from safetensors.torch import load_file, save_file

from rorqual.checkpoint.index import read_index
from rorqual.errors import CheckpointError

INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


def refused(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_index(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_file_and_shards_hold_the_same_tensors(tiny_folder, sharded):
    folder, weight_map = sharded
    single, split = read_index(tiny_folder), read_index(folder)
    assert set(single) == set(split) == set(weight_map)
    for name, (path, entry) in split.items():
        assert path == folder / weight_map[name]
        assert (entry.dtype, entry.shape) == (single[name].entry.dtype, single[name].entry.shape)
    assert read_index(tiny_folder / "model.safetensors") == single


def test_missing_shard(sharded):
    folder, weight_map = sharded
    (folder / SECOND).unlink()
    message = refused(folder)
    assert SECOND in message and "missing shard" in message
    assert next(name for name in weight_map if weight_map[name] == SECOND) in message


def test_truncated_shard(sharded):
    folder, _ = sharded
    data = (folder / THIRD).read_bytes()
    (folder / THIRD).write_bytes(data[:-1])
    message = refused(folder)
    assert THIRD in message and "truncated" in message


def test_a_name_that_its_shard_does_not_hold(sharded):
    folder, weight_map = sharded
    write_index(folder, weight_map | {"layers.0.extra": FIRST})
    assert "layers.0.extra" in (message := refused(folder)) and FIRST in message


def test_a_name_that_the_index_puts_elsewhere(sharded):
    folder, weight_map = sharded
    write_index(folder, weight_map | {"norm.weight": FIRST if weight_map["norm.weight"] != FIRST else SECOND})
    message = refused(folder)
    assert "norm.weight" in message and FIRST in message and weight_map["norm.weight"] in message


def test_a_tensor_that_the_index_does_not_name(sharded):
    folder, weight_map = sharded
    write_index(folder, {name: shard for name, shard in weight_map.items() if name != "norm.weight"})
    assert "holds norm.weight, which model.safetensors.index.json does not name" in refused(folder)


def test_a_name_in_two_shards(sharded):
    folder, weight_map = sharded
    other = FIRST if weight_map["norm.weight"] != FIRST else SECOND
    tensors = load_file(folder / other)
    save_file(tensors | {"norm.weight": torch.ones(4)}, folder / other)
    message = refused(folder)
    assert "norm.weight stands in two shards" in message and other in message and weight_map["norm.weight"] in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "duplicate key 'a'"),
        ("{}", "needs a weight_map"),
        ("[]", "needs a weight_map"),
        ('{"weight_map": {"a": 3}}', "needs a weight_map"),
        ("{", "not JSON"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "'../x.safetensors' is not the name of"),
        ('{"weight_map": {"a": "/x.safetensors"}}', "is not the name of"),
        ('{"weight_map": {"a": "x.bin"}}', "'x.bin' is not the name of a .safetensors file"),
    ],
)
def test_damaged_index(tmp_path, text, message):
    (tmp_path / INDEX).write_text(text)
    assert message in refused(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert name in refused(tmp_path)
    assert "only .safetensors" in refused(tmp_path / name)


def test_nothing_to_read(tmp_path, tiny_folder, sharded):
    assert "no such checkpoint folder" in refused(tmp_path / "absent")
    assert "no model.safetensors" in refused(tmp_path)
    folder, _ = sharded
    (folder / INDEX).unlink()
    assert f"{FIRST} needs the index" in refused(folder)


def test_both_arrangements_in_one_folder_are_ambiguous(sharded, tiny_folder):
    folder, _ = sharded
    shutil.copy(tiny_folder / "model.safetensors", folder)
    assert "holds both" in refused(folder)
