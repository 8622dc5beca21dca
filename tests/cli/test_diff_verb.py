"""`rorqual diff` as people call it: exit codes, one line for a mistake, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rorqual.cli import main

Capture = pytest.CaptureFixture[str]
CASE = "fp32-text"


@pytest.fixture
def golden(goldens: Path) -> Path:
    return goldens / CASE


@pytest.fixture
def theirs(golden: Path, tmp_path: Path) -> Path:
    """A dump whose attention output of layer 3 has its channel pairs swapped, and all that follows from it changed."""
    dump = load_file(golden / "expected.safetensors")
    out = dump["layers.3.attn_out"]
    dump["layers.3.attn_out"] = out.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).contiguous()
    dump["layers.4.x_in"] = dump["layers.4.x_in"] + 1
    dump["logits"][0, 0] = float("inf")
    del dump["state.engram_tokens"]
    dump["extra"] = out.clone()
    save_file(dump, tmp_path / "theirs.safetensors")
    return tmp_path / "theirs.safetensors"


def test_equal_is_exit_0(golden: Path, capsys: Capture) -> None:
    assert main(["diff", str(golden), str(golden / "expected.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "187 tensors in common, 187 agree (fp32 tolerance)" in out
    assert out.endswith("equal within tolerance\n")


def test_divergent_is_exit_1_and_says_where(golden: Path, theirs: Path, capsys: Capture) -> None:
    assert main(["diff", str(golden), str(theirs)]) == 1
    out = capsys.readouterr().out
    assert "only in ours: state.engram_tokens" in out
    assert "only in theirs: extra" in out
    assert "first divergence: layers.3.attn_out [97, 64], row 0, element [0, 0]: ours " in out
    assert "97 of 97 rows and " in out
    assert " of 6208 elements diverge" in out
    assert "looks like a permutation: nibble order; the elements of every pair (2i, 2i+1) are swapped" in out
    lines = [line.split() for line in out.splitlines()]
    assert next(line for line in lines if line[:1] == ["layers.*.x_in"])[-3:] == ["after", "the", "first"]
    assert next(line for line in lines if line[:1] == ["layers.*.attn_out"])[-1] == "first"


def test_json(golden: Path, theirs: Path, capsys: Capture) -> None:
    assert main(["diff", str(golden), str(theirs), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["common"], told["agreeing"], told["numerics"]) == (False, 186, 183, "fp32")
    assert (told["first"]["name"], told["first"]["row"]) == ("layers.3.attn_out", 0)
    assert told["first"]["cause"]["kind"] == "permutation"
    assert [group["relation"] for group in told["groups"]] == ["first", "after the first", "after the first"]
    assert told["groups"][-1]["worst"] == "inf"
    assert main(["diff", str(golden), str(golden), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["first"], told["groups"]) == (True, None, [])


def test_rename(golden: Path, tmp_path: Path, capsys: Capture) -> None:
    dump = load_file(golden / "expected.safetensors")
    save_file({f"their/{name}": value for name, value in dump.items()}, tmp_path / "theirs.safetensors")
    arguments = ["diff", str(golden), str(tmp_path / "theirs.safetensors")]
    assert main(arguments) == 2
    assert "no tensor name in common" in capsys.readouterr().err
    (tmp_path / "names.toml").write_text('"their/**" = "**"\n"none.*" = "*"\n')
    assert main([*arguments, "--rename", str(tmp_path / "names.toml")]) == 0
    out = capsys.readouterr().out
    assert "rename rules that matched nothing: none.*" in out
    assert "only in" not in out


def test_numerics_is_an_option(golden: Path, tmp_path: Path) -> None:
    dump = load_file(golden / "expected.safetensors")
    dump["layers.3.attn_out"] = dump["layers.3.attn_out"].bfloat16()
    save_file(dump, tmp_path / "theirs.safetensors")
    arguments = ["diff", str(golden), str(tmp_path / "theirs.safetensors")]
    assert main(arguments) == 1
    assert main([*arguments, "--numerics", "native"]) == 0


def test_a_mistake_is_one_line_and_exit_2(golden: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"not a dump")
    (tmp_path / "broken.npz").write_bytes(b"not a dump")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "names.toml").write_text("a = = b")
    (tmp_path / "names.json").write_text("[")
    good = str(golden)
    for arguments, named in (
        ((good, str(tmp_path / "absent.safetensors")), "absent.safetensors: no such file"),
        ((str(tmp_path), good), "expected.safetensors"),
        ((good, str(tmp_path / "broken.safetensors")), "broken.safetensors: cannot be read"),
        ((good, str(tmp_path / "broken.npz")), "broken.npz: cannot be read"),
        ((good, str(tmp_path / "notes.txt")), "ends in .safetensors or .npz"),
        ((good, good, "--rename", str(tmp_path / "absent.toml")), "absent.toml does not exist"),
        ((good, good, "--rename", str(tmp_path / "names.toml")), "names.toml is not TOML"),
        ((good, good, "--rename", str(tmp_path / "names.json")), "names.json is not JSON"),
        ((good, good, "--numerics", "fp64"), "'fp64' is not one of auto, fp32, native"),
    ):
        assert main(["diff", *arguments]) == 2, arguments
        streams = capsys.readouterr()
        assert streams.out == ""
        assert streams.err.startswith("rorqual: ")
        assert streams.err.count("\n") == 1
        assert named in streams.err
